"""Which GPUs, NICs and CPUs belong together: one group for each fabric and its progress thread.

Knows: sysfs. Does not know: libfabric, ranks, what a pod was given.

A NIC belongs to the GPU with which it shares the deepest PCI bridge. GPUs that share their nearest NICs
make one group. Without GPUs each NUMA node with a NIC is a group; without RDMA NICs the host is one group.
A progress thread is pinned only where that can help: to the CPUs of its group's NUMA node that this process
may use, when these are not all it may use.

All of it reads below a sysfs root, so that a made tree is as good as the machine's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers


@dataclass(frozen=True, slots=True)
class PciDevice:
    """`name` is libfabric's domain for a NIC and the PCI address for a GPU. `path` lists the bridges from
    the root complex down.
    """

    name: str
    path: tuple[str, ...]
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class Group:
    """What one fabric serves. `cpus` is empty when its thread is better left to the scheduler."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    numa_node: int | None
    cpus: tuple[int, ...]


def groups(sysfs: Path = Path("/sys"), allowed: frozenset[int] | None = None) -> tuple[Group, ...]:
    """The machine's groups, at least one. `allowed` are the CPUs this process may use (default:
    sched_getaffinity).
    """
    usable = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    nics, gpus, nodes = read_nics(sysfs), read_gpus(sysfs), read_numa_nodes(sysfs)
    if not nics:
        return (Group(tuple(gpu.name for gpu in gpus), (), None, ()),)
    if gpus:
        by_nics: dict[tuple[PciDevice, ...], list[PciDevice]] = {}
        for gpu in gpus:
            by_nics.setdefault(nearest(gpu, nics), []).append(gpu)
        return tuple(
            _group(tuple(members), near, members[0].numa_node, nodes, usable)
            for near, members in by_nics.items()
        )
    by_node: dict[int | None, list[PciDevice]] = {}
    for nic in nics:
        by_node.setdefault(nic.numa_node, []).append(nic)
    return tuple(_group((), tuple(members), node, nodes, usable) for node, members in by_node.items())


def nearest(gpu: PciDevice, nics: tuple[PciDevice, ...]) -> tuple[PciDevice, ...]:
    """The NICs below the deepest bridge that is also above the GPU; if none shares even a root, those of
    its NUMA node, or all.
    """
    depths = [_shared_depth(gpu.path, nic.path) for nic in nics]
    if (deepest := max(depths)) > 0:
        return tuple(nic for nic, depth in zip(nics, depths, strict=True) if depth == deepest)
    return tuple(nic for nic in nics if nic.numa_node == gpu.numa_node) or nics


def read_nics(sysfs: Path) -> tuple[PciDevice, ...]:
    """RDMA devices, in name order."""
    folder = sysfs / "class" / "infiniband"
    if not folder.is_dir():
        return ()
    return tuple(_pci_device(entry.name, entry / "device") for entry in sorted(folder.iterdir()))


def read_gpus(sysfs: Path) -> tuple[PciDevice, ...]:
    """NVIDIA GPUs, in PCI order, which is CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    folder = sysfs / "bus" / "pci" / "devices"
    if not folder.is_dir():
        return ()
    return tuple(
        _pci_device(entry.name, entry)
        for entry in sorted(folder.iterdir())
        if _text(entry / "vendor") == _NVIDIA and _text(entry / "class").startswith(_DISPLAY_CLASSES)
    )


def read_numa_nodes(sysfs: Path) -> dict[int, frozenset[int]]:
    """CPUs by NUMA node."""
    folder = sysfs / "devices" / "system" / "node"
    if not folder.is_dir():
        return {}
    return {
        int(entry.name.removeprefix("node")): parse_cpu_list(_text(entry / "cpulist"))
        for entry in folder.iterdir()
        if entry.name.removeprefix("node").isdigit()
    }


def parse_cpu_list(text: str) -> frozenset[int]:
    """`0-3,8` as sysfs writes it."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _group(
    gpus: tuple[PciDevice, ...],
    nics: tuple[PciDevice, ...],
    numa_node: int | None,
    nodes: dict[int, frozenset[int]],
    usable: frozenset[int],
) -> Group:
    near = nodes.get(numa_node, frozenset()) & usable if numa_node is not None else frozenset()
    cpus = tuple(sorted(near)) if near and near != usable else ()
    return Group(tuple(gpu.name for gpu in gpus), tuple(nic.name for nic in nics), numa_node, cpus)


def _pci_device(name: str, link: Path) -> PciDevice:
    place = link.resolve()
    node = _text(place / "numa_node")
    parts = [part for part in place.parent.parts if ":" in part]  # pci0000:00, 0000:00:01.0, ...
    return PciDevice(
        name, tuple(parts), int(node) if node.isdigit() else None
    )  # -1: the firmware does not say


def _shared_depth(left: tuple[str, ...], right: tuple[str, ...]) -> int:
    depth = 0
    for ours, theirs in zip(left, right, strict=False):
        if ours != theirs:
            break
        depth += 1
    return depth


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
