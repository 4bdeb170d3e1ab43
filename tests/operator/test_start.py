"""What the operator checks before it does anything, and how it says what is missing."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from aiohttp import ClientSession
from memory_kube import MemoryKube

from tandem_crds.generate import custom_resource_definition
from tandem_operator import access_review, probes
from tandem_operator.handlers import WATCHED
from tandem_operator.main import main
from tandem_operator.metrics import Metrics
from tandem_operator.objects import POD
from tandem_operator.probes import Health
from tandem_operator.served_schema import missing_fields
from tandem_operator.watch_freshness import WatchFreshness
from tandem_operator.work_queue import WorkQueue

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def served() -> dict[str, Any]:
    """As the API server publishes our CRD."""
    schema = copy.deepcopy(custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    schema["x-kubernetes-group-version-kind"] = [
        {"group": "tandem.dev", "kind": "DisaggregatedModel", "version": "v1alpha1"}
    ]
    return {"components": {"schemas": {"dev.tandem.v1alpha1.DisaggregatedModel": schema}}}


def test_the_crd_of_this_release_lacks_nothing() -> None:
    assert missing_fields(served()) == []


def test_fields_that_an_older_crd_lacks_are_named() -> None:
    document = served()
    properties = document["components"]["schemas"]["dev.tandem.v1alpha1.DisaggregatedModel"]["properties"]
    del properties["spec"]["properties"]["topology"]
    del properties["status"]["properties"]["conditions"]["items"]["properties"]["reason"]
    assert missing_fields(document) == ["spec.topology", "status.conditions.reason"]


def test_without_the_kind_everything_is_missing() -> None:
    assert missing_fields({"components": {"schemas": {}}}) == ["spec", "status"]


async def test_every_refused_verb_is_told_with_its_class() -> None:
    kube = MemoryKube()
    kube.denied = {("list", "pods"), ("create", "deployments"), ("create", "events")}
    refused = await access_review.refused(kube, "default")
    assert {(str(one), one.need) for one in refused} == {
        ("list pods", "read"),
        ("create deployments", "child"),
        ("create events", "told"),
    }


def test_the_verbs_are_few_and_each_has_a_reason() -> None:
    assert all(one.why for one in access_review.VERBS)
    assert not {"*", "escalate", "bind", "update", "deletecollection"} & {
        one.verb for one in access_review.VERBS
    }
    secrets = [str(one) for one in access_review.VERBS if one.kind.plural == "secrets"]
    assert secrets == ["create secrets"]
    assert any(one.kind == POD and one.verb == "patch" for one in access_review.VERBS)


async def test_the_probes_tell_ready_healthy_and_ill() -> None:
    now = 0.0
    fresh = WatchFreshness(WATCHED, lambda: now)
    health = Health(WorkQueue(), fresh)
    runner = await probes.serve(health, Metrics(), "127.0.0.1", 0)
    port = runner.addresses[0][1]

    async def ask(path: str) -> tuple[int, str]:
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
            return answer.status, await answer.text()

    try:
        assert await ask("/readyz") == (503, "starting")
        health.obstacle = ""
        assert await ask("/readyz") == (200, "ok")
        assert await ask("/healthz") == (200, "ok")
        pod = {"kind": "Pod", "metadata": {"uid": "u", "resourceVersion": "1"}}
        fresh.listed(("n", "m"), [pod])
        now = 100.0
        status, text = await ask("/healthz")
        assert (status, text) == (500, "the watch has not delivered for 100 s what a list shows")
        status, text = await ask("/metrics")
        assert "tandem_operator_watch_mute_seconds 100.0" in text
    finally:
        await runner.cleanup()


def test_wrong_settings_are_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "operator.yaml"
    file.write_text("runtime: {image: x}\nworkerz: 3\n")
    assert main(["--settings", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "workerz" in error


def test_no_api_server_to_be_found_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    file = tmp_path / "operator.yaml"
    file.write_text("runtime: {image: x}\n")
    assert main(["--settings", str(file)]) == 2
    assert "no API server" in capsys.readouterr().err
