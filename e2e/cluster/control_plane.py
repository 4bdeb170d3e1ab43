"""The control plane: plain processes on the host, with the flags of a cluster that people run.

Knows: flags, the order of starting, what ready means. Node and RBAC authorization, PodSecurity admission, an
audit log of every request but the system's own reads, API aggregation through the front proxy's certificate.
"""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from .certificates import FRONT_PROXY
from .commands import Wait, run, say
from .layout import DOMAIN
from .processes import must_run, spawn

if TYPE_CHECKING:
    from pathlib import Path

    from .layout import Layout

_ETCD, _ETCD_PEER, _CONTROLLER_MANAGER, _SCHEDULER, _DNS = 2379, 2380, 10257, 10259, 1053

# What a test asks the audit log: who wrote what, and who read more than it should.
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "users": ["system:apiserver", "system:kube-scheduler", "kwok"]},
        {"level": "None", "userGroups": ["system:nodes", "system:serviceaccounts:kube-system"]},
        {"level": "None", "users": ["system:kube-controller-manager", "coredns", "system:kube-proxy"]},
        {"level": "Metadata"},
    ],
}


def start(layout: Layout, tools: Path) -> None:
    start_etcd(layout, tools)
    start_api_server(layout, tools)
    if layout.bare:
        return
    kubeconfig = layout.kubeconfig
    fast = ("--kube-api-qps=1000", "--kube-api-burst=2000")  # the tests' fleets are large
    spawn(
        layout,
        "kube-controller-manager",
        tools / "kube-controller-manager",
        *(f"--kubeconfig={kubeconfig('controller-manager')}", f"--bind-address={layout.loopback}", *fast),
        *(f"--secure-port={_CONTROLLER_MANAGER}", f"--cert-dir={layout.state}/controller-manager-tls"),
        *(f"--root-ca-file={layout.pki}/ca.crt", f"--cluster-signing-cert-file={layout.pki}/ca.crt"),
        *(f"--cluster-signing-key-file={layout.pki}/ca.key", "--use-service-account-credentials=true"),
        *(f"--service-account-private-key-file={layout.pki}/accounts.key", "--leader-elect=false"),
        *(f"--cluster-cidr={layout.pods}", "--allocate-node-cidrs=false"),
        # A node's death is seen in 12 s instead of 50; an HPA looks every 2 s instead of 15.
        *("--node-monitor-grace-period=12s", "--node-monitor-period=2s"),
        *(
            "--horizontal-pod-autoscaler-sync-period=2s",
            "--horizontal-pod-autoscaler-downscale-stabilization=5s",
        ),
        "--concurrent-deployment-syncs=20",
        # Without nodes, Services lead to kwok's pods alone, whose addresses no EndpointSlice may have.
        *([] if layout.nodes else ["--controllers=*,-endpointslice-controller"]),
    )
    spawn(
        layout,
        "kube-scheduler",
        tools / "kube-scheduler",
        *(f"--kubeconfig={kubeconfig('scheduler')}", f"--bind-address={layout.loopback}", *fast),
        *(f"--secure-port={_SCHEDULER}", f"--cert-dir={layout.state}/scheduler-tls", "--leader-elect=false"),
    )
    for name, port in (("kube-controller-manager", _CONTROLLER_MANAGER), ("kube-scheduler", _SCHEDULER)):
        _until_healthy(layout, name, f"https://{layout.loopback}:{port}/healthz")
    say("kube-controller-manager and kube-scheduler healthy")
    if layout.nodes:
        _start_dns(layout, tools)


def start_etcd(layout: Layout, tools: Path) -> None:
    client = f"http://{layout.loopback}:{_ETCD}"
    peer = f"http://{layout.loopback}:{_ETCD_PEER}"
    spawn(
        layout,
        "etcd",
        tools / "etcd",
        *(f"--data-dir={layout.state}/etcd", "--log-level=warn", "--unsafe-no-fsync"),
        *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
        *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
        f"--initial-cluster=default={peer}",
    )
    _until_healthy(layout, "etcd", f"{client}/health")
    say("etcd healthy")


def start_api_server(layout: Layout, tools: Path) -> None:
    policy = layout.state / "audit-policy.json"
    policy.write_text(json.dumps(_AUDIT_POLICY))
    pki = layout.pki
    reconciler = [] if layout.nodes else ["--endpoint-reconciler-type=none"]  # it refuses loopback
    spawn(
        layout,
        "kube-apiserver",
        tools / "kube-apiserver",
        *(f"--etcd-servers=http://{layout.loopback}:{_ETCD}", "--secure-port=6443", *reconciler),
        *(f"--bind-address={layout.host}", f"--advertise-address={layout.host}"),
        *(f"--tls-cert-file={pki}/apiserver.crt", f"--tls-private-key-file={pki}/apiserver.key"),
        *(f"--client-ca-file={pki}/ca.crt", f"--cert-dir={layout.state}/apiserver-tls"),
        *("--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"),
        *(f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}", "--allow-privileged=true"),
        *(f"--service-account-key-file={pki}/accounts.pub", f"--service-cluster-ip-range={layout.services}"),
        f"--service-account-signing-key-file={pki}/accounts.key",
        f"--kubelet-client-certificate={pki}/kubelet-client.crt",
        *(f"--kubelet-client-key={pki}/kubelet-client.key", "--kubelet-preferred-address-types=InternalIP"),
        *("--default-not-ready-toleration-seconds=5", "--default-unreachable-toleration-seconds=5"),
        *(f"--requestheader-client-ca-file={pki}/front-proxy-ca.crt", "--enable-aggregator-routing=true"),
        *(f"--requestheader-allowed-names={FRONT_PROXY}", "--requestheader-username-headers=X-Remote-User"),
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        *(
            f"--proxy-client-cert-file={pki}/{FRONT_PROXY}.crt",
            f"--proxy-client-key-file={pki}/{FRONT_PROXY}.key",
        ),
        *(f"--audit-policy-file={policy}", f"--audit-log-path={layout.audit_log}", "--audit-log-maxsize=500"),
        # Requests that a test fleet makes on one core must not wait for one another's turn.
        *("--max-requests-inflight=1000", "--max-mutating-requests-inflight=500"),
    )
    _until_healthy(layout, "kube-apiserver", f"{layout.server}/readyz")
    say(f"kube-apiserver ready at {layout.server}")


def _start_dns(layout: Layout, tools: Path) -> None:
    """CoreDNS on the host; the Service kube-dns has it for its one endpoint."""
    corefile = layout.state / "Corefile"
    corefile.write_text(
        f"{DOMAIN}:{_DNS} {{\n  bind {layout.host}\n  errors\n  kubernetes {DOMAIN} {{\n"
        f"    kubeconfig {layout.kubeconfig('coredns')} {layout.name}\n    ttl 1\n  }}\n}}\n"
    )
    spawn(layout, "coredns", tools / "coredns", "-conf", corefile)
    protocols = (("dns", "UDP"), ("dns-tcp", "TCP"))
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system"},
        "spec": {
            "clusterIP": layout.dns,
            "ports": [{"name": name, "port": 53, "protocol": protocol} for name, protocol in protocols],
        },
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "kube-dns-host",
            "namespace": "kube-system",
            "labels": {"kubernetes.io/service-name": "kube-dns"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [layout.host], "conditions": {"ready": True}}],
        "ports": [{"name": name, "port": _DNS, "protocol": protocol} for name, protocol in protocols],
    }
    documents = json.dumps({"apiVersion": "v1", "kind": "List", "items": [service, endpoints]})
    run(tools / "kubectl", "--kubeconfig", layout.kubeconfig(), "apply", "-f", "-", input=documents)
    must_run(layout, "coredns")
    say("CoreDNS started")


def _until_healthy(layout: Layout, name: str, url: str) -> None:
    context = None
    if url.startswith("https"):
        context = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
        context.load_cert_chain(layout.pki / "admin.crt", layout.pki / "admin.key")
        if name != "kube-apiserver":  # their certificates are their own
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        *([urllib.request.HTTPSHandler(context=context)] if context else []),
    )
    wait = Wait(90, f"{name} at {url}")
    while True:
        try:
            with opener.open(url, timeout=2):
                return
        except (urllib.error.URLError, OSError) as error:
            must_run(layout, name)
            wait.again(error)
