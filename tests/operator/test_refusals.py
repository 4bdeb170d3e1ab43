"""What the operator does not carry out, and in which words."""

import pytest
from worlds import World, manifest, settings

from tandem_operator.objects import DEPLOYMENT
from tandem_operator.reasons import Reason
from tandem_operator.refusals import Refusal, read_model, refusal

GPU = {"accelerator": {"type": "GPU"}}
KV = {"engine": {"kvCacheMemory": "1Gi"}}

REFUSED = [
    (
        {"fabric": {"profile": "myrinet"}},
        Reason.UNKNOWN_PROFILE,
        "is myrinet; known here: efa, infiniband, roce, tcp",
    ),
    (
        GPU | {"fabric": {"profile": "efa", "deviceClassName": "gpu-nic"}},
        Reason.NOT_IMPLEMENTED,
        "spec.fabric.deviceClassName is gpu-nic",
    ),
    (
        GPU | {"decode": {"replicas": 1, "tensorParallel": 16, **KV}},
        Reason.NOT_IMPLEMENTED,
        "spec.decode asks for tensorParallel 16 × dataParallel 1 = 16 GPUs",
    ),
    (
        {"decode": {"replicas": 1, "dataParallel": 2}},
        Reason.NOT_IMPLEMENTED,
        "spec.decode.dataParallel is 2; a replica has one engine so far",
    ),
    (
        {"engine": {"speculative": {"method": "MTP"}}},
        Reason.NOT_IMPLEMENTED,
        "spec.engine.speculative.method is MTP; no draft tokens are made yet",
    ),
]


@pytest.mark.parametrize(("spec", "reason", "words"), REFUSED)
def test_what_cannot_be_done_is_refused_with_field_and_value(spec, reason, words):
    model = read_model(manifest(**spec))
    assert not isinstance(model, Refusal)
    refused = refusal(model, settings())
    assert refused is not None
    assert refused.reason == reason
    assert words in refused.message


def test_ranks_on_cpu_share_one_pod_whatever_their_number():
    model = read_model(manifest(decode={"replicas": 1, "tensorParallel": 16}))
    assert not isinstance(model, Refusal)
    assert refusal(model, settings()) is None


def test_a_profile_that_the_installation_adds_is_known():
    model = read_model(manifest(fabric={"profile": "slingshot"}))
    assert not isinstance(model, Refusal)
    assert refusal(model, settings(profiles={"slingshot": {"providers": ["cxi"]}})) is None


UNREADABLE = [
    ({"prefill": {"replicas": 1, "tensorParallel": 0}}, "spec.prefill.tensorParallel is 0"),
    (
        {"scaling": {"ratio": {"prefill": 1, "decode": 1}}},
        "exactly one of prefill.replicas and scaling.ratio",
    ),
    ({"model": {"uri": "s3://bucket"}}, "spec.model.uri"),
]


@pytest.mark.parametrize(("spec", "words"), UNREADABLE)
def test_a_spec_that_an_older_crd_let_through_is_named_by_its_field(spec, words):
    refused = read_model(manifest(**spec))
    assert isinstance(refused, Refusal)
    assert refused.reason == Reason.INVALID_SPEC
    assert words in refused.message


def test_a_long_name_is_refused_with_the_limit():
    parent = manifest()
    parent["metadata"]["name"] = "m" * 41
    refused = read_model(parent)
    assert isinstance(refused, Refusal)
    assert refused.reason == Reason.NAME_TOO_LONG
    assert "at most 40" in refused.message


def test_fields_that_this_version_does_not_know_are_passed_over():
    parent = manifest(futureField={"a": 1})
    parent["status"] = {"conditions": "written by somebody else"}
    assert not isinstance(read_model(parent), Refusal)


@pytest.mark.parametrize(
    "spec", [{"fabric": {"profile": "myrinet"}}, {"drainSeconds": -1}], ids=["refused", "unreadable"]
)
def test_a_refusal_leaves_everything_that_serves_alone(spec):
    world = World()
    world.settle()
    running = sorted(world.pods), dict(world.objects)
    world.edit(**spec)
    world.settle()
    assert (sorted(world.pods), dict(world.objects)) == running
    assert world.condition("Available") == ("True", "PairReady")
    assert world.condition("Reconciled")[0] == world.condition("Ready")[0] == "False"
    assert world.parent["status"]["decode"]["ready"] == 2


def test_a_model_that_is_refused_from_the_start_gets_no_objects_and_all_conditions():
    world = World(manifest(fabric={"profile": "myrinet"}))
    world.settle()
    assert world.names(DEPLOYMENT) == []
    assert world.objects == {}
    assert not world.peer_secret
    assert len(world.parent["status"]["conditions"]) == 7
    assert world.events == ["UnknownProfile"]
