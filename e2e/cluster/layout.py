"""Where a cluster's files are and what its addresses, links and namespaces are called.

Knows: every name that is unique on the host, derived from the cluster's name and index, so that several
clusters run side by side. Does not know: what listens there.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path

NODES_MAX = 9
INDEX_MAX = 9
DOMAIN = "cluster.local"


def cache() -> Path:
    """Where built tools, images and clusters live: `$XDG_CACHE_HOME/tandem/cluster`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "cluster"


@dataclass(frozen=True)
class Layout:
    """One cluster. `index` (0 to 9) chooses its subnets; `nodes` 0 is a control plane alone, on loopback."""

    name: str = "tandem"
    index: int = 0
    nodes: int = 2
    bare: bool = False  # etcd and the API server, nothing else

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9]{0,9}", self.name):
            raise ValueError(f"name {self.name!r}: 1 to 10 of a-z and 0-9, a letter first")
        if not 0 <= self.index <= INDEX_MAX:
            raise ValueError(f"index {self.index}: 0 to {INDEX_MAX}")
        if not 0 <= self.nodes <= NODES_MAX or (self.bare and self.nodes):
            raise ValueError(f"nodes {self.nodes}: 0 to {NODES_MAX}, and 0 for a bare one")

    # Files.
    @property
    def state(self) -> Path:
        return cache() / self.name

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def logs(self) -> Path:
        return self.state / "log"

    @property
    def processes(self) -> Path:
        return self.state / "processes"

    @property
    def audit_log(self) -> Path:
        return self.logs / "audit.log"

    def kubeconfig(self, user: str = "admin") -> Path:
        return self.state / f"{user}.kubeconfig"

    def node_state(self, node: int) -> Path:
        return self.state / self.node(node)

    # Addresses.
    @property
    def loopback(self) -> str:
        """Of what only the control plane talks to."""
        return f"127.0.{90 + self.index}.1"

    @property
    def host(self) -> str:
        """Of the API server: the bridge's address where there are nodes."""
        return f"10.{90 + self.index}.0.1" if self.nodes else self.loopback

    @property
    def server(self) -> str:
        return f"https://{self.host}:6443"

    @property
    def services(self) -> str:
        return f"10.{130 + self.index}.0.0/16"

    @property
    def first_service(self) -> str:
        return str(ipaddress.ip_network(self.services)[1])

    @property
    def dns(self) -> str:
        return str(ipaddress.ip_network(self.services)[10])

    @property
    def pods(self) -> str:
        return f"10.{110 + self.index}.0.0/16"

    def node_pods(self, node: int) -> str:
        return f"10.{110 + self.index}.{node}.0/24"

    @property
    def fake_pods(self) -> str:
        """Of kwok's pods. Nothing that is sent there leaves the host."""
        return f"127.{150 + self.index}.0.0/16"

    def node_address(self, node: int) -> str:
        return f"10.{90 + self.index}.0.{10 + node}"

    # Names on the host; a link's has 15 characters at most.
    @property
    def bridge(self) -> str:
        return f"{self.name}-br"

    def link(self, node: int) -> str:
        return f"{self.name}-v{node}"

    def namespace(self, node: int) -> str:
        """Of the network, and of the cgroup subtree."""
        return f"{self.name}-n{node}"

    def node(self, node: int) -> str:
        return f"node{node}"

    @property
    def node_numbers(self) -> range:
        return range(1, self.nodes + 1)
