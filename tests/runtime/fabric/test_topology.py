"""Groups of GPUs, NICs and CPUs, read from a made sysfs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tandem_runtime.fabric.topology import Group, groups, parse_cpu_list, read_nics

if TYPE_CHECKING:
    from pathlib import Path

ALL = frozenset(range(16))


class Tree:
    """A sysfs to be filled."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def node(self, number: int, cpulist: str) -> None:
        folder = self.root / "devices/system/node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpulist + "\n")

    def device(self, path: str, vendor: str, pci_class: str, numa_node: int) -> Path:
        place = self.root / "devices" / path
        place.mkdir(parents=True)
        for name, value in (("vendor", vendor), ("class", pci_class), ("numa_node", str(numa_node))):
            (place / name).write_text(value + "\n")
        by_address = self.root / "bus/pci/devices"
        by_address.mkdir(parents=True, exist_ok=True)
        (by_address / place.name).symlink_to(place)
        return place

    def gpu(self, path: str, numa_node: int) -> None:
        self.device(path, "0x10de", "0x030200", numa_node)

    def nic(self, name: str, path: str, numa_node: int) -> None:
        place = self.device(path, "0x1d0f", "0x020000", numa_node)
        folder = self.root / "class/infiniband" / name
        folder.mkdir(parents=True)
        (folder / "device").symlink_to(place)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_each_gpu_gets_the_nics_of_its_switch(tree: Tree) -> None:
    tree.node(0, "0-7")
    tree.node(1, "8-15")
    for number, root in enumerate(("pci0000:10", "pci0000:80")):
        switch = f"{root}/0000:{number}1:00.0"
        tree.gpu(f"{switch}/0000:{number}2:00.0", number)
        for port in (0, 1):
            tree.nic(f"rdmap{number}{port}", f"{switch}/0000:{number}3:0{port}.0", number)
    assert groups(tree.root, ALL) == (
        Group(("0000:02:00.0",), ("rdmap00", "rdmap01"), 0, tuple(range(8))),
        Group(("0000:12:00.0",), ("rdmap10", "rdmap11"), 1, tuple(range(8, 16))),
    )


def test_gpus_that_share_their_nearest_nics_make_one_group(tree: Tree) -> None:
    tree.node(0, "0-15")
    tree.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", 0)
    tree.gpu("pci0000:00/0000:00:02.0/0000:02:00.0", 0)
    tree.nic("mlx5_0", "pci0000:00/0000:00:03.0/0000:03:00.0", 0)
    assert groups(tree.root, ALL) == (Group(("0000:01:00.0", "0000:02:00.0"), ("mlx5_0",), 0, ()),), (
        "the one NUMA node is all there is: nothing to pin to"
    )


def test_a_gpu_under_another_root_takes_its_numa_nodes_nics(tree: Tree) -> None:
    tree.node(0, "0-7")
    tree.node(1, "8-15")
    tree.gpu("pci0000:10/0000:11:00.0", 1)
    tree.nic("mlx5_0", "pci0000:20/0000:21:00.0", 0)
    tree.nic("mlx5_1", "pci0000:30/0000:31:00.0", 1)
    (group,) = groups(tree.root, ALL)
    assert group.nics == ("mlx5_1",)
    assert group.cpus == tuple(range(8, 16))


def test_threads_are_pinned_only_within_what_the_process_may_use(tree: Tree) -> None:
    tree.node(0, "0-7")
    tree.node(1, "8-15")
    tree.nic("mlx5_0", "pci0000:20/0000:21:00.0", 1)
    tree.nic("mlx5_1", "pci0000:30/0000:31:00.0", 1)
    cases = [
        (frozenset({1, 9, 10}), (9, 10)),
        (frozenset({9, 10}), ()),  # all it may use
        (frozenset({1, 2}), ()),  # none of them is near
    ]
    for allowed, cpus in cases:
        assert groups(tree.root, allowed) == (Group((), ("mlx5_0", "mlx5_1"), 1, cpus),)


def test_without_gpus_each_numa_node_with_nics_is_a_group(tree: Tree) -> None:
    tree.node(0, "0-7")
    tree.node(1, "8-15")
    tree.nic("mlx5_0", "pci0000:20/0000:21:00.0", 0)
    tree.nic("mlx5_1", "pci0000:30/0000:31:00.0", 1)
    assert [(group.nics, group.numa_node) for group in groups(tree.root, ALL)] == [
        (("mlx5_0",), 0),
        (("mlx5_1",), 1),
    ]


def test_a_host_that_tells_nothing_is_one_group(tree: Tree) -> None:
    assert groups(tree.root, ALL) == (Group((), (), None, ()),)
    tree.gpu("pci0000:10/0000:11:00.0", 0)
    assert groups(tree.root, ALL) == (Group(("0000:11:00.0",), (), None, ()),)


def test_firmware_that_knows_no_numa_node_means_none(tree: Tree) -> None:
    tree.node(0, "0-15")
    tree.nic("mlx5_0", "pci0000:20/0000:21:00.0", -1)
    assert read_nics(tree.root)[0].numa_node is None
    assert groups(tree.root, ALL) == (Group((), ("mlx5_0",), None, ()),)


def test_this_machine_has_at_least_one_group() -> None:
    assert len(groups()) >= 1


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("3", {3}), ("0-3,8", {0, 1, 2, 3, 8}), ("0,2-3", {0, 2, 3})]
)
def test_cpu_lists(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus
