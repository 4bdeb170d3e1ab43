"""One node: containerd, kubelet and kube-proxy in namespaces and a cgroup subtree of their own.

Knows: their configuration, and that the death of the namespaces' pid 1 ends every pod. Does not know: pods.
node.sh makes the namespaces and is that pid 1.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .commands import ClusterError, Wait, run, succeeds
from .layout import DOMAIN
from .processes import end, spawn, start_time

if TYPE_CHECKING:
    from .layout import Layout

_SCRIPT = Path(__file__).with_name("node.sh")
# Mount points that a node covers with directories of its own; made on the host if need be.
_COVERED = ("/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/var/log/containers")
PAUSE_IMAGE = "localhost/tandem-e2e/pause:1"


def start(layout: Layout, node: int, tools: Path, images: list[Path]) -> None:
    state, name = layout.node_state(node), layout.node(node)
    for directory in ("cni", "cni-data", "var-lib-cni", "kubelet", "pods", "containers", "containerd"):
        (state / directory).mkdir(parents=True)
    for covered in _COVERED:
        Path(covered).mkdir(parents=True, exist_ok=True)
    (state / "resolv.conf").write_text("")
    (state / "cni" / "10-bridge.conflist").write_text(json.dumps(_cni(layout, node)))
    (state / "containerd.toml").write_text(_containerd(layout, node))
    (state / "kubelet.json").write_text(json.dumps(_kubelet(layout, node)))
    (state / "proxy.json").write_text(json.dumps(_proxy(layout, node)))
    spawn(
        layout,
        name,
        *("bash", _SCRIPT),
        env={
            "NODE": name,
            "STATE": str(state),
            "LOGS": str(layout.logs),
            "ADDRESS": layout.node_address(node),
            "NETWORK_NAMESPACE": layout.namespace(node),
            "CGROUP": layout.namespace(node),
            "KUBECONFIG": str(layout.kubeconfig(name)),
            "TOOLS": str(tools),
            "IMAGES": " ".join(map(str, images)),
        },
    )


def enter(layout: Layout, node: int) -> list[str]:
    """The words before a command that is to run inside the node."""
    return ["nsenter", "--all", "--target", (layout.node_state(node) / "init.pid").read_text().split()[0]]


def load_image(layout: Layout, node: int, archive: Path) -> None:
    """An OCI or Docker archive into the node's containerd."""
    run(*enter(layout, node), "ctr", "-n", "k8s.io", "images", "import", archive)


def stop(layout: Layout, node: int) -> None:
    """Kills the node, its pods with it, at once: as a power cut does."""
    init = layout.node_state(node) / "init.pid"
    if init.exists():
        pid, started = init.read_text().split()
        if start_time(int(pid)) == started:
            os.kill(int(pid), signal.SIGKILL)
    end(layout, layout.node(node))


def clean(layout: Layout) -> None:
    """Cgroups and mount points that nodes have left."""
    for group in Path("/sys/fs/cgroup").glob(f"*/{layout.name}-n[0-9]"):
        _remove_cgroup(group)
    for group in Path("/sys/fs/cgroup").glob(f"{layout.name}-n[0-9]"):
        _remove_cgroup(group)
    for covered in _COVERED:
        # Empty ones only: on a machine that is a node of another cluster they are not ours.
        if not os.listdir(covered) if Path(covered).is_dir() else False:
            Path(covered).rmdir()


def _remove_cgroup(group: Path) -> None:
    wait = Wait(10, f"the end of the processes in {group}")
    while group.exists():
        subprocess.run(
            ["find", str(group), "-depth", "-type", "d", "-exec", "rmdir", "{}", "+"],
            check=False,
            capture_output=True,
        )
        if group.exists():
            wait.again()


def not_permitted() -> str:
    """What this process may not do that nodes need; nothing if it may."""
    if os.geteuid() != 0:
        return "nodes need root, for namespaces, mounts and bridges"
    held = int(
        next(
            line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line
        ),
        16,
    )
    lacking = [name for bit, name in ((21, "CAP_SYS_ADMIN"), (12, "CAP_NET_ADMIN")) if not held >> bit & 1]
    return f"nodes need {' and '.join(lacking)}, which this process does not hold" if lacking else ""


def require() -> None:
    """Installs what is missing. Raises ClusterError with what this machine lacks, and how to get it."""
    if reason := not_permitted():
        raise ClusterError(f"{reason}. Without: `--bare`, or `tandem up`")
    packages = {
        "containerd": "containerd",
        "runc": "runc",
        "ip": "iproute2",
        "iptables": "iptables",
        "conntrack": "conntrack",
        "debootstrap": "debootstrap",
        "openssl": "openssl",
        "nsenter": "util-linux",
    }
    missing = [package for command, package in packages.items() if shutil.which(command) is None]
    if not Path("/usr/lib/cni/bridge").exists():
        missing.append("containernetworking-plugins")
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise ClusterError(f"missing: {', '.join(missing)} (as Debian names them)")
    if not succeeds("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing):
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)


def _cni(layout: Layout, node: int) -> dict[str, Any]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "dataDir": str(layout.node_state(node) / "cni-data"),
            "ranges": [[{"subnet": layout.node_pods(node)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": layout.name, "plugins": [bridge, ports]}


def _containerd(layout: Layout, node: int) -> str:
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    state = layout.node_state(node)
    # Without CAP_SYS_RESOURCE an oom_score_adj can only be raised: runc fails where it tries to lower one.
    return f"""version = 2
root = "{state}/containerd"
state = "/run/containerd"
[{cri}]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
[{cri}.cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "{state}/cni"
[{cri}.containerd]
  snapshotter = "overlayfs"
[{cri}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[{cri}.containerd.runtimes.runc.options]
  SystemdCgroup = false
"""


def _kubelet(layout: Layout, node: int) -> dict[str, Any]:
    name = layout.node(node)
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": layout.node_address(node),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(layout.pki / f"{name}.crt"),
        "tlsPrivateKeyFile": str(layout.pki / f"{name}.key"),
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "clusterDNS": [layout.dns],
        "clusterDomain": DOMAIN,
        "resolvConf": str(layout.node_state(node) / "resolv.conf"),
        "healthzBindAddress": "127.0.0.1",
        "failSwapOn": False,
        "serializeImagePulls": False,
        # A full disk of the host is the host's matter.
        "evictionHard": dict.fromkeys(("nodefs.available", "imagefs.available", "nodefs.inodesFree"), "1%")
        | {"memory.available": "100Mi"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "volumeStatsAggPeriod": "0s",
        # Death is noticed soon, and a changed ConfigMap too.
        "nodeStatusUpdateFrequency": "3s",
        "nodeLeaseDurationSeconds": 12,
        "syncFrequency": "10s",
    }


def _proxy(layout: Layout, node: int) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clusterCIDR": layout.pods,
        "hostnameOverride": layout.node(node),
        "clientConnection": {"kubeconfig": str(layout.kubeconfig("proxy"))},
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "conntrack": {"maxPerCore": 0, "min": 0},  # these are the host's sysctls
        "iptables": {"minSyncPeriod": "0s"},
    }
