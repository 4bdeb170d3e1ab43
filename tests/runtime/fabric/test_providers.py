"""Finding libfabric and a provider, and saying in one line why there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fabric_sides import RemoteSide, Side, join, write_and_count

from tandem_runtime.fabric.fabric import Fabric, FabricError
from tandem_runtime.fabric.providers import ProviderError, available, choose_provider


def run(code: str, **environment: str) -> str:
    """In a process of its own, because libfabric is loaded once and reads its settings once."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_core_loads_no_libfabric() -> None:
    """Ranks import it for one store with release order."""
    loaded = run(
        "from tandem_runtime.layer_counter import LayerCounter\n"
        "LayerCounter().bump()\n"
        "print('libfabric' in open('/proc/self/maps').read())"
    )
    assert loaded == "False"


def test_each_provider_says_whether_it_works_and_why_not() -> None:
    net, shm, efa, nonsense = available(["net", "shm", "efa", "nonsense"])
    assert net.works
    assert str(net).startswith("net: ok (libfabric ")
    assert shm.works
    if not Path("/sys/class/infiniband").exists():
        assert not efa.works
        assert "is there an EFA NIC" in str(efa)
    assert not nonsense.works
    assert "fi_getinfo" in nonsense.reason


def test_the_first_provider_that_works_is_chosen() -> None:
    assert choose_provider(["nonsense", "shm", "net"]) == "shm"
    with pytest.raises(ProviderError, match=r"nonsense: .*fi_getinfo"):
        choose_provider(["nonsense"])
    with pytest.raises(ProviderError, match="no provider named"):
        choose_provider([])


def test_tcp_is_net_under_its_later_name() -> None:
    fabric = Fabric(provider="tcp", bind_address="127.0.0.1", node_id=1, incarnation=1)
    assert fabric.info.provider in ("net", "tcp"), "never tcp;ofi_rxm"
    fabric.close()


def test_a_library_that_is_not_there_is_named() -> None:
    said = run(
        "from tandem_runtime.fabric.providers import available\nprint(*available(['net']))",
        TANDEM_LIBFABRIC="/nowhere/libfabric.so.1",
    )
    assert said.startswith("net: TANDEM_LIBFABRIC=/nowhere/libfabric.so.1 cannot be loaded")


def test_a_library_that_is_not_libfabric_is_refused() -> None:
    said = run(
        "from tandem_runtime.fabric.providers import available\nprint(*available(['net']))",
        TANDEM_LIBFABRIC="libc.so.6",
    )
    assert "version 1.17 or later is needed" in said


def test_what_cannot_be_opened_says_so_in_one_line() -> None:
    cases = [
        ({"bind_address": "203.0.113.7"}, "is the bind address one of this host's"),
        ({"provider": "nonsense"}, "nonsense"),
        ({"port_range": (5000, 4000)}, "port range 5000-4000"),
        ({"port_range": (0, 4000)}, "port range"),
        ({"port_range": (21_000, 70_000)}, "port range"),
        ({"cpus": [100_000]}, "CPUs"),
    ]
    for wrong, reason in cases:
        options = {"provider": "net", "bind_address": "127.0.0.1", "node_id": 1, "incarnation": 1} | wrong
        with pytest.raises(FabricError, match=reason) as caught:
            Fabric(**options)
        assert "\n" not in str(caught.value)


def test_links_take_their_ports_from_the_range_and_say_when_it_is_used_up() -> None:
    with RemoteSide("net", 2, {}, port_range=(21_600, 21_603)) as side:
        ports = [int.from_bytes(side.fabric.bootstrap_address[2:4], "big")]
        for link in range(1, 4):
            address, _ = side.open(link)
            ports.append(int.from_bytes(address[2:4], "big"))
        assert sorted(ports) == [21_600, 21_601, 21_602, 21_603]
        side.fabric.link_open(4)
        assert "widen the port range" in side.wait_failed().text
        side.fabric.link_close(4)
        side.wait_closed(4)
        side.fabric.link_close(2)
        side.wait_closed(2)
        address, _ = side.open(5)
        assert int.from_bytes(address[2:4], "big") == ports[2]


def test_two_port_ranges_do_not_fit_into_one_process() -> None:
    said = run(
        "from tandem_runtime.fabric.providers import available\n"
        "print(*available(['net']), sep='')\n"
        "print(*available(['net'], port_range=(21700, 21710)), sep='')\n"
    )
    first, second = said.splitlines()
    assert first.startswith("net: ok")
    assert "ports 21700-21710" in second
    assert "only once" in second


@pytest.mark.parametrize("provider", ["net", "shm"])
def test_signal_handlers_survive_libfabric(provider: str) -> None:
    """psm2 takes SIGTERM as soon as it is loaded, shm with its first endpoint: a worker could not drain."""
    said = run(
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('drain', flush=True))\n"
        "from tandem_runtime.fabric.fabric import Fabric\n"
        f"fabric = Fabric(provider={provider!r}, bind_address='127.0.0.1', node_id=1, incarnation=1)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "fabric.close()\n"
        "print('closed')"
    )
    assert said.split() == ["drain", "closed"]


def test_the_progress_thread_runs_where_it_is_told() -> None:
    cpu = min(os.sched_getaffinity(0))
    with Side("net", 1, cpus=[cpu], name="tandem-pinned") as left, Side("net", 2) as right:
        (thread,) = [
            task
            for task in Path("/proc/self/task").iterdir()
            if (task / "comm").read_text().strip() == "tandem-pinned"
        ]
        assert os.sched_getaffinity(int(thread.name)) == {cpu}
        join(left, right)
        write_and_count(left, right, 1, slot=0, transfer=1)


def files_of(pid: int) -> list[str]:
    return [
        name
        for name in os.listdir("/dev/shm")
        if name.startswith("tandem-") and name.split("-")[2] == str(pid)
    ]


def test_files_of_dead_processes_are_swept_and_those_of_the_living_are_not() -> None:
    ours = len(files_of(os.getpid()))  # an endpoint that a peer had not seen yet leaves its file
    with RemoteSide("shm", 2) as dead, RemoteSide("shm", 3) as alive:
        dead.open(1)
        assert len(files_of(dead.pid)) == 2, "bootstrap and link"
        dead.signal(signal.SIGKILL)
        dead.join_process()
        assert len(files_of(dead.pid)) == 2
        with Side("shm", 1):
            assert files_of(dead.pid) == []
            assert len(files_of(alive.pid)) == 1
            assert len(files_of(os.getpid())) == ours + 1
        assert len(files_of(os.getpid())) == ours
