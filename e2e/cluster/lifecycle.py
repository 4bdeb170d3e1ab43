"""Up and down.

Knows: the order, what a whole cluster is, what is left over of a broken one. `up` of a cluster that stands
does nothing; of one that is half there, it begins again.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from . import certificates, control_plane, images, network, node, processes, tools
from .commands import Wait, run, say
from .layout import Layout, cache

if TYPE_CHECKING:
    from collections.abc import Iterator


def up(layout: Layout) -> None:
    """Raises ClusterError; what was made until then is removed, but for the logs' last lines in the error."""
    if layout.nodes:
        node.require()
    binaries = tools.ensure()
    archives = images.ensure() if layout.nodes else []
    with _locked(layout):
        if _stands(layout):
            say(f"cluster {layout.name} is up")
            return
        _remove(layout)
        try:
            for directory in (layout.logs, layout.processes):
                directory.mkdir(parents=True)
            (layout.state / "layout.json").write_text(json.dumps(vars(layout)))
            certificates.make(layout)
            if layout.nodes:
                network.make(layout)
                # Beside the control plane's start, which images take longer than.
                for number in layout.node_numbers:
                    node.start(layout, number, binaries, archives)
            control_plane.start(layout, binaries)
            _until_nodes_ready(layout)
        except BaseException:
            _remove(layout, keep_logs=True)
            raise
        say(f"cluster {layout.name} is up: KUBECONFIG={layout.kubeconfig()}")


def down(name: str) -> None:
    layout = existing(name) or Layout(name)
    with _locked(layout):
        _remove(layout)
        layout.state.with_suffix(".lock").unlink()


def existing(name: str) -> Layout | None:
    """As it was made."""
    try:
        return Layout(**json.loads((cache() / name / "layout.json").read_text()))
    except FileNotFoundError:
        return None


@contextmanager
def _locked(layout: Layout) -> Iterator[None]:
    layout.state.parent.mkdir(parents=True, exist_ok=True)
    with layout.state.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _expected(layout: Layout) -> list[str]:
    if layout.bare:
        return ["etcd", "kube-apiserver"]
    expected = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"]
    if layout.nodes:
        expected += ["coredns", *(layout.node(number) for number in layout.node_numbers)]
    return expected


def _stands(layout: Layout) -> bool:
    return existing(layout.name) == layout and all(
        processes.pid_of(layout, name) is not None for name in _expected(layout)
    )


def _until_nodes_ready(layout: Layout) -> None:
    wanted = {layout.node(number) for number in layout.node_numbers}
    wait = Wait(120, "nodes Ready", pause=0.2)
    while wanted:
        for name in wanted:
            processes.must_run(layout, name)
        listed = json.loads(
            run(
                tools.directory() / "kubectl",
                "--kubeconfig",
                layout.kubeconfig(),
                "get",
                "nodes",
                "-o",
                "json",
            )
        )
        messages = {
            item["metadata"]["name"]: condition.get("message", "")
            for item in listed["items"]
            for condition in item.get("status", {}).get("conditions", [])
            if condition["type"] == "Ready" and condition["status"] != "True"
        }
        ready = {item["metadata"]["name"] for item in listed["items"]} - set(messages)
        if wanted <= ready:
            say(f"nodes Ready: {', '.join(sorted(wanted))}")
            return
        wait.again(messages or f"registered so far: {sorted(ready) or 'none'}")


def _remove(layout: Layout, keep_logs: bool = False) -> None:
    if layout.processes.is_dir():
        for number in range(1, 10):
            node.stop(layout, number)
        for name in processes.names(layout):
            processes.end(layout, name)
    network.remove(layout)
    if layout.nodes:
        node.clean(layout)
    for path in layout.state.iterdir() if layout.state.is_dir() else ():
        if keep_logs and path == layout.logs:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    if layout.state.is_dir() and not keep_logs:
        layout.state.rmdir()
