"""From events to keys: whose object it is, and whether there is anything to look at."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
from worlds import manifest, settings

from tandem_operator.handlers import WATCHED, Relevance, Watch, kopf_settings, model_key
from tandem_operator.objects import DEPLOYMENT, MODEL, POD, SERVICE, owner_reference
from tandem_operator.watch_freshness import WatchFreshness
from tandem_operator.work_queue import WorkQueue

if TYPE_CHECKING:
    from tandem_operator.objects import Obj


def parent() -> Obj:
    obj = manifest()
    obj["metadata"] |= {"namespace": "n", "uid": "u-m", "generation": 1, "resourceVersion": "1"}
    return obj


def pod() -> Obj:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "namespace": "n",
            "uid": "u-p",
            "resourceVersion": "5",
            "labels": {"tandem.dev/model": "by-label"},
        },
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "False", "lastProbeTime": None}],
            "containerStatuses": [{"name": "worker", "state": {"running": {}}}],
        },
    }


def test_a_child_belongs_to_its_controller_and_else_to_its_labels_model() -> None:
    one = pod()
    assert model_key(POD, one) == ("n", "by-label")
    one["metadata"]["ownerReferences"] = [owner_reference(parent())]
    assert model_key(POD, one) == ("n", parent()["metadata"]["name"])
    one["metadata"]["ownerReferences"] = [
        {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": True}
    ]
    assert model_key(POD, one) == ("n", "by-label")
    del one["metadata"]["labels"]
    assert model_key(POD, one) is None


def test_our_own_status_writes_are_no_news_but_edits_are() -> None:
    relevance, one = Relevance(), parent()
    assert relevance.is_news(MODEL, one, gone=False)
    written = copy.deepcopy(one)
    written["metadata"]["resourceVersion"] = "2"
    written["status"] = {"selector": "x"}
    assert not relevance.is_news(MODEL, written, gone=False)
    written["metadata"]["generation"] = 2
    assert relevance.is_news(MODEL, written, gone=False)
    assert relevance.is_news(MODEL, written, gone=True)
    assert relevance.is_news(MODEL, written, gone=False), "made anew"


@pytest.mark.parametrize(
    ("change", "news"),
    [
        (lambda one: one["metadata"].update(resourceVersion="6"), False),
        (lambda one: one["status"]["conditions"][0].update(lastProbeTime="now"), False),
        (lambda one: one["status"]["conditions"][0].update(status="True"), True),
        (lambda one: one["status"].update(podIP="10.0.0.1"), True),
        (lambda one: one["status"]["containerStatuses"][0].update(state={"waiting": {}}), True),
        (lambda one: one["metadata"].update(deletionTimestamp="now"), True),
    ],
)
def test_a_kubelets_heartbeat_is_no_news_but_a_change_is(change: object, news: bool) -> None:
    relevance, one = Relevance(), pod()
    relevance.is_news(POD, one, gone=False)
    changed = copy.deepcopy(one)
    change(changed)  # type: ignore[operator]
    assert relevance.is_news(POD, changed, gone=False) is news


def test_any_change_of_a_child_without_a_status_is_news() -> None:
    relevance = Relevance()
    one = {**pod(), "kind": "ConfigMap"}
    del one["status"]
    relevance.is_news(SERVICE, one, gone=False)
    changed = copy.deepcopy(one)
    changed["metadata"]["resourceVersion"] = "7"
    assert relevance.is_news(SERVICE, changed, gone=False)


async def test_events_become_keys_at_once_for_models_and_together_for_children() -> None:
    queue: WorkQueue[tuple[str, str]] = WorkQueue()
    watch = Watch(settings(), queue, WatchFreshness(WATCHED, lambda: 0.0))
    watch.heard(MODEL, None, parent())
    assert await queue.get() == ("n", parent()["metadata"]["name"])
    for number in range(5):
        one = pod()
        one["status"]["podIP"] = f"10.0.0.{number}"
        watch.heard(POD, "MODIFIED", one)
    assert len(queue) == 0
    assert await queue.get() == ("n", "by-label")
    assert len(queue) == 0


def test_a_watch_that_owes_what_a_list_shows_is_mute_until_it_delivers() -> None:
    now = 0.0
    fresh = WatchFreshness(WATCHED, lambda: now)
    key, one = ("n", "m"), pod()
    fresh.listed(key, [one])
    now = 40.0
    assert fresh.mute_s == 40.0
    fresh.listed(key, [one])
    assert fresh.mute_s == 40.0, "a second list does not start anew"
    assert fresh.overdue(30.0) == [key]
    fresh.delivered(key, "u-p", "4", gone=False)
    assert fresh.mute_s == 0.0, "whatever comes, the stream moves"
    fresh.delivered(key, "u-p", "5", gone=False)
    fresh.listed(key, [one])
    assert fresh.mute_s == 0.0


def test_what_is_gone_is_owed_no_longer() -> None:
    now = 0.0
    fresh = WatchFreshness(WATCHED, lambda: now)
    fresh.listed(("n", "m"), [pod()])
    now = 40.0
    fresh.listed(("n", "m"), [])
    assert fresh.mute_s == 0.0


def test_kopf_stores_posts_and_scans_nothing_and_lists_children_by_label() -> None:
    made = kopf_settings()
    assert made.scanning.disabled
    assert made.peering.standalone
    assert not made.posting.enabled
    assert "zalando" not in made.persistence.finalizer
    assert len(made.watching.label_selectors) == len(WATCHED) - 1
    assert DEPLOYMENT in WATCHED
