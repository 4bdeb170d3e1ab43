"""Every reason that a condition may carry, but for the autoscaler's own.

One place, because users script against them and the operations page explains each.
"""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    # Nothing more is written until the manifest or the installation changes.
    INVALID_SPEC = "InvalidSpec"
    NAME_TOO_LONG = "NameTooLong"
    UNKNOWN_PROFILE = "UnknownProfile"
    NOT_IMPLEMENTED = "NotImplemented"
    # Something of the cluster stands in the way of a write.
    NAME_TAKEN = "NameTaken"
    FORBIDDEN = "Forbidden"
    INVALID_CHILD = "InvalidChild"  # the server refuses an object of ours as it is
    # Before the first pods of a model.
    INSPECTING = "Inspecting"
    INSPECT_FAILED = "InspectFailed"
    DOES_NOT_FIT = "DoesNotFit"  # the spec and the model's facts
    RECONCILED = "Reconciled"

    # Of pods.
    WORKER_REFUSED = "WorkerRefused"  # exit 2: it will never start like this
    MODEL_NOT_FETCHED = "ModelNotFetched"
    IMAGE_NOT_PULLED = "ImageNotPulled"
    CONTAINER_NOT_CREATED = "ContainerNotCreated"
    OUT_OF_MEMORY = "OutOfMemory"
    WORKER_EXITED = "WorkerExited"
    POD_FAILED = "PodFailed"
    PODS_NOT_CREATED = "PodsNotCreated"  # quota, admission
    UNSCHEDULABLE = "Unschedulable"
    SCHEDULING_GATED = "SchedulingGated"

    # Available, Ready.
    PAIR_READY = "PairReady"
    PARKED = "Parked"
    NO_READY_PREFILL = "NoReadyPrefill"
    NO_READY_DECODE = "NoReadyDecode"
    NO_MATCHING_PAIR = "NoMatchingPair"  # both are ready, but their KV keys differ
    ROUTER_NOT_READY = "RouterNotReady"
    ROLLING_OUT = "RollingOut"
    STARTING = "Starting"
    COMPLETE = "Complete"
    READY = "Ready"

    # Compatible, FabricReady.
    AGREED = "Agreed"
    PEERS_DISAGREE = "PeersDisagree"
    PROVIDER_IN_USE = "ProviderInUse"
    OTHER_PROVIDER = "OtherProvider"
    PAIRING = "Pairing"
    NOT_PAIRED = "NotPaired"
    NOT_REPORTED = "NotReported"

    SCALING_DISABLED = "ScalingDisabled"
