"""The nodes' network: a bridge on the host, a network namespace and a /24 of pod addresses for each node.

The host reaches pods and Services by routes, as a machine of a flat network would; nothing is masqueraded, so
pods reach the host and each other, and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .commands import run, succeeds

if TYPE_CHECKING:
    from .layout import Layout


def make(layout: Layout) -> None:
    run("ip", "link", "add", layout.bridge, "type", "bridge")
    run("ip", "address", "add", f"{layout.host}/24", "dev", layout.bridge)
    run("ip", "link", "set", layout.bridge, "up")
    for node in layout.node_numbers:
        namespace, link, address = layout.namespace(node), layout.link(node), layout.node_address(node)
        run("ip", "netns", "add", namespace)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        run("ip", "link", "set", link, "master", layout.bridge, "up")
        inside = ("ip", "-n", namespace)
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "address", "add", f"{address}/24", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        run(*inside, "route", "add", "default", "via", layout.host)
        run("ip", "netns", "exec", namespace, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        run("ip", "route", "add", layout.node_pods(node), "via", address)
    for node in layout.node_numbers:
        for other in layout.node_numbers:
            if other != node:
                route = ("route", "add", layout.node_pods(other), "via", layout.node_address(other))
                run("ip", "-n", layout.namespace(node), *route)
    run("ip", "route", "add", layout.services, "via", layout.node_address(1))  # its kube-proxy


def remove(layout: Layout) -> None:
    """Whatever of it is there; routes go with the bridge."""
    for file in Path("/run/netns").glob(f"{layout.name}-n[0-9]"):
        run("ip", "netns", "delete", file.name)
    if succeeds("ip", "link", "show", layout.bridge):
        run("ip", "link", "delete", layout.bridge)
