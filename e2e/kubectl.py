"""kubectl as the tests and the demo use it: commands in, text or documents out, waits with a last word."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .cluster import tools
from .cluster.commands import Wait, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from .cluster.layout import Layout

Document = dict[str, Any]


class Kubectl:
    def __init__(self, layout: Layout, namespace: str = "default") -> None:
        self.layout, self.namespace = layout, namespace

    def __call__(self, *words: str | Path, input: str | None = None, timeout: float = 120) -> str:
        """Raises ClusterError with the end of what kubectl said."""
        common = ("--kubeconfig", self.layout.kubeconfig(), "--namespace", self.namespace)
        return run(tools.directory() / "kubectl", *common, *words, input=input, timeout=timeout)

    def within(self, namespace: str) -> Kubectl:
        return Kubectl(self.layout, namespace)

    def apply(self, documents: Iterable[Document], *words: str) -> None:
        items = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(documents)})
        self("apply", *words, "-f", "-", input=items)

    def get(self, kind: str, name: str) -> Document:
        found: Document = json.loads(self("get", kind, name, "-o", "json"))
        return found

    def find(self, kind: str, selector: str = "") -> list[Document]:
        words = ("-l", selector) if selector else ()
        items: list[Document] = json.loads(self("get", kind, *words, "-o", "json"))["items"]
        return items

    def until(
        self, what: str, satisfied: Callable[[], object], timeout: float = 60, pause: float = 0.25
    ) -> None:
        """Raises ClusterError. A falsy answer, or a string (which is a reason), is asked again."""
        wait = Wait(timeout, what, pause)
        while True:
            answer = satisfied()
            if answer and not isinstance(answer, str):
                return
            wait.again(answer)

    # --- what is asked of models ----------------------------------------------------------------

    def condition(self, model: str, kind: str) -> Document:
        conditions = self.get("dm", model).get("status", {}).get("conditions", [])
        return next((one for one in conditions if one["type"] == kind), {})

    def until_condition(
        self, model: str, kind: str, status: str, reason: str = "", timeout: float = 120
    ) -> Document:
        """The condition, once it has that status and reason, of the newest generation."""
        found: Document = {}

        def satisfied() -> object:
            nonlocal found
            document = self.get("dm", model)
            conditions = document.get("status", {}).get("conditions", [])
            found = next((one for one in conditions if one["type"] == kind), {})
            fresh = found.get("observedGeneration") == document["metadata"]["generation"]
            if fresh and found["status"] == status and reason in ("", found["reason"]):
                return True
            return f"{kind} is {found}"

        self.until(f"{model}: {kind}={status} {reason}".rstrip(), satisfied, timeout)
        return found

    def pods(self, model: str, role: str) -> list[Document]:
        """Those not on their way out."""
        found = self.find("pods", f"tandem.dev/model={model},tandem.dev/role={role}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def address(self, service: str) -> str:
        """host:port, which the host can reach."""
        spec = self.get("service", service)["spec"]
        return f"{spec['clusterIP']}:{spec['ports'][0]['port']}"


def ready(pod: Document) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
