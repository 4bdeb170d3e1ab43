"""How the model's facts are come by."""

import pytest
from worlds import FACTS, START, World, container, ended, manifest, settings, status

from tandem_operator.inspection import RETRY_S, inspection_key
from tandem_operator.objects import CONFIG_MAP, JOB
from tandem_operator.refusals import Refusal, read_model
from tandem_operator.timestamps import text


def key_of(**model):
    read = read_model(manifest(model={"uri": "pvc://models/smollm2", **model}))
    assert not isinstance(read, Refusal)
    return inspection_key(read)


def fail(world, message="no config.json in /models/smollm2", code=2):
    """The Job's pod ends without an answer, then the Job itself gives up."""
    world.inspection = lambda: ended(code, message)
    world.run()
    world.tick()
    world.tick()
    (name,) = world.names(JOB)
    world.named(JOB, name)["status"] = {
        "conditions": [{"type": "Failed", "status": "True", "lastTransitionTime": text(world.now)}]
    }
    world.run()


def test_a_model_is_inspected_once_and_the_job_goes():
    world = World()
    world.run()
    assert len(world.names(JOB)) == 1
    assert world.condition("Reconciled") == ("Unknown", "Inspecting")
    assert world.condition("Progressing") == ("True", "Inspecting")
    world.settle()
    assert world.names(JOB) == []
    assert [name for name in world.names(CONFIG_MAP) if "-inspect-" in name]
    assert world.parent["status"]["model"]["weightsId"] == FACTS.weights_id


def test_the_job_stays_until_its_answer_is_seen_in_a_config_map():
    world = World()
    world.run()
    world.tick()
    world.tick()
    plan = world.plan()
    assert any(body["kind"] == "ConfigMap" and "-inspect-" in body["metadata"]["name"] for body in plan.apply)
    assert plan.delete == ()


def test_the_served_name_is_no_reason_to_inspect_again():
    assert key_of(servedName="other") == key_of()
    assert key_of(uri="pvc://models/other") != key_of()
    assert key_of(uri="hf://a/b", cache={"claimName": "c"}) != key_of(
        uri="hf://a/b", cache={"claimName": "d"}
    )


def test_a_failure_is_told_in_the_jobs_own_words():
    world = World()
    fail(world)
    assert world.condition("Reconciled") == ("False", "InspectFailed")
    assert "no config.json in /models/smollm2" in world.message("Reconciled")
    assert world.condition("Ready") == ("False", "InspectFailed")
    assert world.condition("Compatible") == ("Unknown", "InspectFailed")
    assert "InspectFailed" in world.events


def test_a_failed_inspection_is_tried_again_after_five_minutes_and_not_before():
    world = World()
    fail(world)
    plan = world.plan()
    assert plan.delete == ()
    assert plan.requeue_s == pytest.approx(RETRY_S, abs=5)
    world.now += RETRY_S
    world.inspection = lambda: ended(0, FACTS.model_dump_json())
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")


def test_a_changed_spec_is_inspected_at_once_and_the_failed_job_goes():
    world = World()
    fail(world)
    world.inspection = lambda: ended(0, FACTS.model_dump_json())
    world.edit(model={"uri": "pvc://models/right"})
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")
    assert world.names(JOB) == []


def test_a_job_whose_image_was_wrong_is_replaced_when_the_image_changes():
    world = World()
    world.run()
    world.tick()
    (pod,) = (pod for pod in world.pods.values() if "-inspect-" in pod["metadata"]["name"])
    pod["status"] = status(
        container(
            "inspect",
            image="registry.example/tandem:nope",
            waiting={"reason": "ImagePullBackOff", "message": "Back-off"},
        )
    )
    world.run()
    assert world.condition("Reconciled") == ("False", "InspectFailed")
    assert "cannot pull image registry.example/tandem:nope" in world.message("Reconciled")
    first = world.named(JOB, world.names(JOB)[0])["metadata"]["uid"]
    world.edit(runtime={"image": "registry.example/tandem:2"})
    world.run()
    assert world.names(JOB) == []
    world.run()
    assert world.named(JOB, world.names(JOB)[0])["metadata"]["uid"] != first
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("not JSON", "not understood"),
        (FACTS.model_dump_json().replace('"role_config_version":1', '"role_config_version":9'), "version 9"),
        ("", "not understood"),
    ],
    ids=["garbage", "another version", "nothing"],
)
def test_an_answer_that_cannot_be_used_says_why(answer, words):
    world = World()
    world.inspection = lambda: ended(0, answer)
    for _ in range(4):
        world.run()
        world.tick()
    assert world.condition("Reconciled") == ("False", "InspectFailed")
    assert words in world.message("Reconciled")


def test_facts_that_were_lost_are_read_again_while_the_pods_go_on():
    world = World()
    world.settle()
    pods = sorted(world.pods)
    (name,) = [name for name in world.names(CONFIG_MAP) if "-inspect-" in name]
    world.remove(CONFIG_MAP, name)
    world.facts = FACTS.model_copy(update={"weights_id": "a later commit"})
    world.run()
    assert world.condition("Ready") == ("True", "Ready")
    world.settle()
    assert name in world.names(CONFIG_MAP)
    assert sorted(world.pods) == pods
    assert world.parent["status"]["model"]["weightsId"] == FACTS.weights_id


def test_pods_of_the_old_model_serve_while_the_new_one_is_inspected():
    world = World()
    world.settle()
    pods = sorted(world.pods)
    world.edit(model={"uri": "pvc://models/other"})
    fail(world)
    assert set(pods) <= set(world.pods)
    assert world.condition("Available") == ("True", "PairReady")
    assert world.condition("Ready") == ("False", "InspectFailed")


def test_settings_that_render_the_job_alike_leave_a_running_one_alone():
    world = World()
    world.run()
    assert world.plan(settings(resyncSeconds=5)).delete == ()
    assert world.now == START
