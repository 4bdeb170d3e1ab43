"""`python -m e2e.demo`: a cluster, the chart, one manifest, one question; shows what a user would look at.

Where the machine does not permit a cluster it says why, and serves the same manifest as local processes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

import yaml

from tandem_runtime.up.demo_model import DemoModelError, default_cache_dir, ensure_demo_model

from . import timeline
from .cluster import lifecycle, node, tools
from .cluster.commands import ClusterError, run, say
from .cluster.layout import Layout
from .environment import REPOSITORY
from .installation import Installation
from .kubectl import Kubectl

READY_S = 300.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.demo", description=__doc__)
    parser.add_argument("--ask", default="What is the capital of France?", metavar="QUESTION")
    parser.add_argument("file", nargs="?", type=Path, default=REPOSITORY / "examples" / "smollm2.yaml")
    arguments = parser.parse_args(argv)
    try:
        models = ensure_demo_model(default_cache_dir()).parent
        if reason := not_possible():
            _embedded(reason, arguments.file, models, arguments.ask)
        return _on_cluster(arguments.file, models, arguments.ask)
    except (ClusterError, DemoModelError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def not_possible() -> str:
    """Why this machine cannot run a cluster; nothing if it can."""
    if reason := node.not_permitted():
        return reason
    if not tools.directory().is_dir() and shutil.which("go") is None:
        return "Kubernetes is built from its Go modules, and Go is not installed"
    if shutil.which("apt-get") is None:
        return "nodes are made of Debian's containerd and runc, and there is no apt-get"
    return ""


def _embedded(reason: str, file: Path, models: Path, question: str) -> None:
    """Does not return."""
    print(f"No cluster here: {reason}.\nEmbedded mode instead: {file.name} as local processes.\n", flush=True)
    words = [sys.executable, "-m", "tandem_runtime.cli", "up", str(file)]
    os.execv(sys.executable, [*words, "--volume", f"models={models}", "--ask", question])


def _on_cluster(file: Path, models: Path, question: str) -> int:
    name = yaml.safe_load(file.read_text())["metadata"]["name"]
    layout = Layout()
    lifecycle.up(layout)
    kubectl = Kubectl(layout)
    installation = Installation(kubectl)
    installation.prepare(models)
    say("helm upgrade --install tandem charts/tandem")
    installation.install()
    say(f"kubectl apply -f {file}")
    began = time.monotonic()
    created = "created" in kubectl("apply", "-f", file)
    _until_ready(kubectl, name)
    took = time.monotonic() - began
    kubectl.until_condition(
        name, "Progressing", "False"
    )  # pods count as settled a little after they are ready
    _show(kubectl, name)
    if created:
        parts = ", ".join(f"{stage} {seconds:.0f}" for stage, seconds in timeline.stages(kubectl, name))
        print(f"\napply to Ready {took:.1f} s: {parts}")
    url = f"http://{kubectl.address(f'{name}-router')}"
    print(run(sys.executable, "-m", "tandem_runtime.cli", "ask", url, question))
    print(
        f'Go on:   eval "$({sys.executable} -m e2e.cluster env)"; kubectl get dm,pods; curl {url}/v1/models'
    )
    print("The end: make cluster-down")
    return 0


def _until_ready(kubectl: Kubectl, name: str) -> None:
    """Says each time that the reason why it is not Ready changes."""
    told = ""

    def satisfied() -> object:
        nonlocal told
        document = kubectl.get("dm", name)
        ready = kubectl.condition(name, "Ready")
        text = f"{ready.get('reason', 'Waiting')}: {ready.get('message', 'for the operator')}"
        if text != told:
            say(f"{name}: {text}")
            told = text
        fresh = ready.get("observedGeneration") == document["metadata"]["generation"]
        return (fresh and ready["status"] == "True") or text

    kubectl.until(f"{name} Ready", satisfied, READY_S)


def _show(kubectl: Kubectl, name: str) -> None:
    print()
    columns = (
        "NAME:.metadata.name,ROLE:.metadata.labels.tandem\\.dev/role,NODE:.spec.nodeName,IP:.status.podIP"
    )
    print(
        kubectl(
            "get", "pods", "-l", f"tandem.dev/model={name},tandem.dev/role", "-o", f"custom-columns={columns}"
        )
    )
    conditions = kubectl.get("dm", name)["status"]["conditions"]
    rows = [("CONDITION", "STATUS", "REASON", "MESSAGE")]
    rows += [(one["type"], one["status"], one["reason"], one["message"]) for one in conditions]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("   ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]))


if __name__ == "__main__":
    sys.exit(main())
