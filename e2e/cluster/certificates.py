"""Keys, certificates and kubeconfigs, made with openssl at each start and gone with the cluster."""

from __future__ import annotations

import base64
import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from .commands import run
from .layout import DOMAIN

if TYPE_CHECKING:
    from .layout import Layout

_DAYS = "30"
# Who they are: RBAC's built-in roles know these names. `front-proxy` signs for API aggregation.
_USERS = {
    "admin": "/O=system:masters/CN=admin",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "proxy": "/CN=system:kube-proxy",
    "kubelet-client": "/O=system:masters/CN=apiserver-kubelet-client",
    "kwok": "/O=system:masters/CN=kwok",
    "coredns": "/O=system:masters/CN=coredns",
}
FRONT_PROXY = "front-proxy-client"


def make(layout: Layout) -> None:
    pki = layout.pki
    pki.mkdir(parents=True)
    pki.chmod(0o700)
    for authority in ("ca", "front-proxy-ca"):
        _key(layout, authority)
        run(
            *("openssl", "req", "-x509", "-new", "-key", pki / f"{authority}.key", "-days", _DAYS),
            *("-subj", f"/CN={layout.name}-{authority}", "-out", pki / f"{authority}.crt"),
            *("-addext", "basicConstraints=critical,CA:TRUE"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )
    run("openssl", "genrsa", "-out", pki / "accounts.key", "2048")
    run("openssl", "rsa", "-in", pki / "accounts.key", "-pubout", "-out", pki / "accounts.pub")
    names = ["localhost", *("kubernetes" + end for end in ("", ".default", ".default.svc"))]
    names += [f"kubernetes.default.svc.{DOMAIN}"]
    addresses = {"127.0.0.1", layout.loopback, layout.host, layout.first_service}
    alternatives = ",".join([f"DNS:{one}" for one in names] + [f"IP:{one}" for one in sorted(addresses)])
    jobs = [("apiserver", "/CN=kube-apiserver", alternatives, "ca")]
    jobs += [(user, subject, "", "ca") for user, subject in _USERS.items()]
    jobs += [(FRONT_PROXY, f"/CN={FRONT_PROXY}", "", "front-proxy-ca")]
    for node in layout.node_numbers:
        name = layout.node(node)
        jobs.append(
            (
                name,
                f"/O=system:nodes/CN=system:node:{name}",
                f"DNS:{name},IP:{layout.node_address(node)}",
                "ca",
            )
        )
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda job: _certificate(layout, *job), jobs))
    for user in (*_USERS, *(layout.node(node) for node in layout.node_numbers)):
        _kubeconfig(layout, user)


def _key(layout: Layout, name: str) -> None:
    key = layout.pki / f"{name}.key"
    run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key)


def _certificate(layout: Layout, name: str, subject: str, alternatives: str, authority: str) -> None:
    file = layout.pki / name
    _key(layout, name)
    request = run("openssl", "req", "-new", "-key", f"{file}.key", "-subj", subject)
    extensions = "extendedKeyUsage=clientAuth,serverAuth\nkeyUsage=critical,digitalSignature\n"
    if alternatives:
        extensions += f"subjectAltName={alternatives}\n"
    (layout.pki / f"{name}.ext").write_text(extensions)
    run(
        *("openssl", "x509", "-req", "-days", _DAYS, "-out", f"{file}.crt", "-extfile", f"{file}.ext"),
        *("-CA", layout.pki / f"{authority}.crt", "-CAkey", layout.pki / f"{authority}.key"),
        *("-set_serial", f"0x{secrets.token_hex(8)}"),
        input=request,
    )


def _kubeconfig(layout: Layout, user: str) -> None:
    """JSON, which is YAML, with everything in it: it may be copied."""
    embedded = {
        "certificate-authority-data": _base64(layout, "ca.crt"),
        "client-certificate-data": _base64(layout, f"{user}.crt"),
        "client-key-data": _base64(layout, f"{user}.key"),
    }
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": layout.name,
        "clusters": [
            {
                "name": layout.name,
                "cluster": {
                    "server": layout.server,
                    "certificate-authority-data": embedded.pop("certificate-authority-data"),
                },
            }
        ],
        "users": [{"name": user, "user": embedded}],
        "contexts": [{"name": layout.name, "context": {"cluster": layout.name, "user": user}}],
    }
    file = layout.kubeconfig(user)
    file.touch(mode=0o600)
    file.write_text(json.dumps(document, indent=1))


def _base64(layout: Layout, name: str) -> str:
    return base64.b64encode((layout.pki / name).read_bytes()).decode()
