"""The chart, installed as users do: `helm install`, upgrade, uninstall, on the cluster's own helm."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from . import environment
from .cluster import tools
from .cluster.commands import ClusterError, run

if TYPE_CHECKING:
    from pathlib import Path

    from .kubectl import Kubectl

CHART = environment.REPOSITORY / "charts" / "tandem"
NAMESPACE, RELEASE = "tandem-system", "tandem"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


class Installation:
    def __init__(self, kubectl: Kubectl, release: str = RELEASE, namespace: str = NAMESPACE) -> None:
        self.release, self.namespace = release, namespace
        self.kubectl = kubectl.within(namespace)

    def prepare(self, models: Path | None = None, *, in_namespace: str = "default") -> None:
        """Namespaces that enforce PodSecurity `restricted`, and the claims that bring code and model.

        Raises ClusterError where the cluster's pods run another checkout.
        """
        self._must_be_of_this_checkout()
        namespaces = [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}}
            for name in (self.namespace, in_namespace)
        ]
        self.kubectl.within("").apply(
            [
                *namespaces,
                *environment.claims(self.namespace),
                *environment.claims(in_namespace, models),
            ]
        )

    def _must_be_of_this_checkout(self) -> None:
        volumes = self.kubectl.find("persistentvolumes")
        name = environment.volume_name(self.namespace, environment.CLAIM)
        found = next((one for one in volumes if one["metadata"]["name"] == name), None)
        path = found["spec"]["hostPath"]["path"] if found else str(environment.REPOSITORY)
        if path != str(environment.REPOSITORY):
            raise ClusterError(f"the pods of this cluster run {path}: end it there with `make cluster-down`")

    def install(self, **values: Any) -> None:
        """Or upgrade; returns when the operator is ready."""
        self._helm(
            *("upgrade", self.release, CHART, "--install", "--wait", "--timeout", "90s", "--values", "-"),
            input=json.dumps(environment.values(**values)),
        )

    def uninstall(self) -> None:
        self._helm("uninstall", self.release, "--wait")

    def test(self) -> str:
        return self._helm("test", self.release, "--timeout", "60s")

    def operator_pods(self) -> list[dict[str, Any]]:
        return self.kubectl.find("pods", f"app.kubernetes.io/instance={self.release}")

    def log(self) -> str:
        return self.kubectl("logs", f"deployment/{self.release}-operator", "--tail=-1")

    def _helm(self, *words: str | Path, input: str | None = None) -> str:
        layout = self.kubectl.layout
        common = ("--kubeconfig", layout.kubeconfig(), "--namespace", self.namespace)
        return run(tools.directory() / "helm", *common, *words, input=input, timeout=180)
