"""What makes a revision, and that it stays what it was."""

import json

import pytest
from worlds import FACTS, World, manifest, settings

from tandem_crds.role_config import Role, RoleConfigError
from tandem_operator.objects import CONFIG_MAP
from tandem_operator.refusals import Refusal, read_model
from tandem_operator.revision import RECORD_FILE, newest_pair, role_inputs, router_inputs, stored_revisions


def read(**spec):
    model = read_model(manifest(**spec))
    assert not isinstance(model, Refusal)
    return model


def inputs(role=Role.DECODE, **spec):
    return role_inputs(read(**spec), role)


DECODE = {"replicas": 2}


@pytest.mark.parametrize(
    "spec",
    [
        {"decode": {"replicas": 7}},
        {"rollout": {"maxSurge": 2}},
        {"router": {"replicas": 3}},
        {"scaling": {"mode": "QPS", "targetQPS": "1", "maxReplicas": 3}},
        {"prefill": {"replicas": 1, "podTemplate": {"metadata": {"annotations": {"a": "b"}}}}},
        {"decode": {**DECODE, "tensorParallel": 1}},
        {"drainSeconds": 600, "engine": {"pageSize": 16}},
    ],
    ids=["replicas", "rollout", "router", "scaling", "the other role", "a default", "shared defaults"],
)
def test_what_does_not_touch_a_roles_pods_makes_no_revision(spec):
    assert inputs(**spec) == inputs()


@pytest.mark.parametrize(
    "spec",
    [
        {"decode": {**DECODE, "tensorParallel": 3}},
        {"decode": {**DECODE, "prefillFallback": "Local"}},
        {"decode": {**DECODE, "podTemplate": {"metadata": {"annotations": {"a": "b"}}}}},
        {"decode": {**DECODE, "resources": {"limits": {"cpu": 2}}}},
        {"drainSeconds": 5},
        {"engine": {"dtype": "bfloat16"}},
        {"fabric": {"profile": "efa"}},
        {"model": {"uri": "pvc://models/other"}},
        {"runtime": {"image": "other"}},
        {"topology": {"spread": {"key": "kubernetes.io/hostname"}}},
        {"accelerator": {"type": "GPU"}},
    ],
    ids=str,
)
def test_what_a_roles_pods_depend_on_makes_a_revision(spec):
    assert inputs(**spec) != inputs()


@pytest.mark.parametrize(("one", "other"), [("0.2", "200m"), (2, "2"), ("1Gi", "1024Mi")])
def test_quantities_are_compared_by_value(one, other):
    def of(amount):
        template = {"spec": {"containers": [{"name": "x", "resources": {"limits": {"cpu": amount}}}]}}
        return inputs(decode={**DECODE, "resources": {"requests": {"cpu": amount}}, "podTemplate": template})

    assert of(one) == of(other)
    assert of(one) != of(3)


def test_the_hash_of_a_spec_never_changes_by_itself():
    """Else an upgrade of the operator would replace every pod. Raise INPUTS_VERSION if it must."""
    assert inputs(Role.PREFILL) == "46fe0bf871"
    assert inputs(Role.DECODE) == "9a656d4584"
    assert router_inputs(read()) == "e3be5baea5"


def test_a_revision_is_read_back_as_it_was_written():
    pair = newest_pair(read(), FACTS, settings(), [])
    assert pair is not None
    stored = stored_revisions([pair.prefill.config_map("smollm2"), pair.decode.config_map("smollm2")])
    assert stored == [pair.prefill, pair.decode]


def test_stored_revisions_are_used_whatever_the_installation_renders_now():
    pair = newest_pair(read(), FACTS, settings(), [])
    assert pair is not None
    later = settings("registry.example/tandem:2", profiles={"tcp": {"providers": ["tcp"], "env": {"A": "B"}}})
    stored = [pair.prefill, pair.decode]
    assert newest_pair(read(), None, later, stored) == pair
    assert newest_pair(read(), FACTS.model_copy(update={"weights_id": "moved"}), later, stored) == pair


def test_a_half_that_no_longer_agrees_is_made_anew_with_the_other():
    """`main` moved between two edits: prefill of the new commit cannot serve decode of the old."""
    pair = newest_pair(read(), FACTS, settings(), [])
    assert pair is not None
    edited = read(prefill={"replicas": 1, "podTemplate": {"metadata": {"annotations": {"a": "b"}}}})
    moved = FACTS.model_copy(update={"weights_id": "moved"})
    newer = newest_pair(edited, moved, settings(), [pair.prefill, pair.decode])
    assert newer is not None
    assert newer.prefill.agrees_with(newer.decode)
    assert newer.decode.name != pair.decode.name


def test_an_edit_of_one_role_that_keeps_the_kv_key_leaves_the_other_alone():
    pair = newest_pair(read(), FACTS, settings(), [])
    assert pair is not None
    edited = read(prefill={"replicas": 1, "podTemplate": {"metadata": {"annotations": {"a": "b"}}}})
    newer = newest_pair(edited, FACTS, settings("registry.example/tandem:2"), [pair.prefill, pair.decode])
    assert newer is not None
    assert newer.decode == pair.decode
    assert newer.prefill.name != pair.prefill.name
    assert newer.prefill.image == "registry.example/tandem:2"


def test_a_longest_length_that_one_role_lowers_reaches_the_other():
    pair = newest_pair(read(), FACTS, settings(), [])
    assert pair is not None
    smaller = read(prefill={"replicas": 1, "engine": {"kvCacheMemory": "64Mi"}})
    newer = newest_pair(smaller, FACTS, settings(), [pair.prefill, pair.decode])
    assert newer is not None
    assert newer.decode.max_model_len == newer.prefill.max_model_len < pair.decode.max_model_len


def test_a_spec_that_the_model_does_not_allow_is_named_by_its_field():
    with pytest.raises(RoleConfigError, match=r"spec\.decode\.tensorParallel is 4"):
        newest_pair(read(decode={"replicas": 1, "tensorParallel": 4}), FACTS, settings(), [])


def test_records_of_another_version_are_passed_over():
    pair = newest_pair(read(), FACTS, settings(), [])
    assert pair is not None
    config_map = pair.prefill.config_map("smollm2")
    config_map["data"][RECORD_FILE] = json.dumps({"version": 99})
    assert stored_revisions([config_map]) == []


def test_going_back_uses_the_revision_that_still_has_pods():
    world = World()
    world.settle()
    first = world.parent["status"]["decode"]["revision"]
    uid = world.named(CONFIG_MAP, f"smollm2-decode-{first}")["metadata"]["uid"]
    world.becomes_ready = lambda pod: False
    world.edit(drainSeconds=5)
    for _ in range(3):
        world.run()
        world.tick()
    assert world.parent["status"]["decode"]["revision"] != first
    world.becomes_ready = lambda pod: True
    world.edit(drainSeconds=600)
    world.settle(settings("registry.example/tandem:2"))
    assert world.parent["status"]["decode"]["revision"] == first
    assert world.named(CONFIG_MAP, f"smollm2-decode-{first}")["metadata"]["uid"] == uid
    assert world.revisions("decode") == [first]
    assert world.condition("Ready") == ("True", "Ready")
