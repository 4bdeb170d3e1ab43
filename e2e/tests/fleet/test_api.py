"""The API server's side: the CRD's own rules, what `kubectl` does with it, and the calls that the operator
relies on.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import manifest_examples
import pytest
from kube_contract import KubeContract

from e2e.cluster.commands import ClusterError
from e2e.environment import REPOSITORY
from tandem_operator.kube import Invalid
from tandem_operator.kube_api import KubeApi

from .conftest import CRD, manifest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from manifest_examples import Example

    from e2e.cluster.layout import Layout
    from e2e.kubectl import Kubectl
    from tandem_operator.kube import Kube


def refusal(kubectl: Kubectl, example: Example, *words: str) -> str:
    text = json.dumps(manifest_examples.manifest(example.changes))
    with pytest.raises(ClusterError) as raised:
        kubectl("create", "--dry-run=server", *words, "-f", "-", input=text)
    return " ".join(str(raised.value).split())


@pytest.mark.parametrize("example", manifest_examples.RULES, ids=lambda one: one.says[:50])
def test_the_server_refuses_what_breaks_a_rule_in_our_words(admin: Kubectl, example: Example) -> None:
    said = refusal(admin, example)
    assert example.says in said
    # A rule over two fields stands at their parent; what its message names is below.
    assert any(path in said for path in (example.field, example.field.rpartition(".")[0]))


@pytest.mark.parametrize("example", manifest_examples.TYPES, ids=lambda one: one.says[:50])
def test_the_server_refuses_what_is_of_another_type_and_names_the_field(
    admin: Kubectl, example: Example
) -> None:
    last = re.split(r"[.\[]", example.field.removesuffix("[0].effect"))[-1]
    assert last in refusal(admin, example)


@pytest.mark.parametrize(
    "path", ["spec.fabric.profil", "spec.prefill.tensor_parallel", "spec.topology.colour"]
)
def test_a_field_that_is_not_there_is_refused_by_kubectl(admin: Kubectl, path: str) -> None:
    example = next(one for one in manifest_examples.OURS if one.field == path)
    assert f'unknown field "{path}"' in refusal(admin, example)


def test_the_valid_example_is_accepted_and_defaulted(namespace: Kubectl) -> None:
    namespace("create", "-f", "-", input=json.dumps(manifest_examples.VALID))
    found = namespace.get("dm", "smollm2")
    assert found["spec"]["decode"]["replicas"] == 1
    assert found["spec"]["fabric"]["profile"] == "tcp"


@pytest.mark.parametrize("words", [(), ("--server-side",)], ids=["client-side", "server-side"])
def test_the_crd_is_applied_again_either_way(admin: Kubectl, words: tuple[str, ...]) -> None:
    admin("apply", *words, *(("--force-conflicts",) if words else ()), "-f", CRD)


@pytest.mark.parametrize("file", sorted((REPOSITORY / "examples").glob("*.yaml")), ids=lambda one: one.stem)
def test_the_examples_apply_as_they_are(namespace: Kubectl, file: str) -> None:
    namespace("apply", "--dry-run=server", "-f", file)
    namespace("apply", "--server-side", "-f", file)


def test_scale_and_explain_and_columns(namespace: Kubectl, name: str) -> None:
    namespace.apply([manifest(name)])
    namespace("scale", f"dm/{name}", "--replicas=3")
    assert namespace.get("dm", name)["spec"]["decode"]["replicas"] == 3
    assert namespace("get", "dm").split()[:2] == ["NAME", "READY"]
    # Every field that a user may write has a text.
    listed = namespace("explain", "dm.spec", "--recursive").split("FIELDS:")[1]
    paths: list[str] = []
    stack: list[str] = []
    for line in listed.splitlines():
        if found := re.match(r"( +)(\w+)\t<", line):
            depth = len(found[1]) // 2 - 1
            stack = [*stack[:depth], found[2]]
            paths.append(".".join(stack))
    assert len(paths) > 60
    for path in ("decode.engine.kvCacheMemory", "scaling.targetQPS", "fabric.profile", "rollout.maxSurge"):
        assert path in paths
        text = namespace("explain", f"dm.spec.{path}").split("DESCRIPTION:")[1]
        assert len(text.split()) > 5


class TestKubeApi(KubeContract):  # type: ignore[misc]
    """What the operator's tests in memory assume, on the real server."""

    @pytest.fixture
    async def kube(self, layout: Layout, admin: Kubectl) -> AsyncIterator[Kube]:
        kube = await KubeApi.connect(str(layout.kubeconfig()))
        yield kube
        await kube.close()

    @pytest.fixture
    def namespace(self, admin: Kubectl, name: str) -> str:
        admin("create", "namespace", name)
        return name

    async def test_an_undeclared_field_is_invalid_for_ever(self, kube: Kube, namespace: str) -> None:
        body = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "d", "namespace": namespace},
            "spec": {"replicsa": 1},
        }
        with pytest.raises(Invalid, match="replicsa"):
            await kube.apply(body)
