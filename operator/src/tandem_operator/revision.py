"""What a pod starts from, frozen: a revision of a role, or of the router.

Knows: which inputs make a revision, and how one is kept in its ConfigMap. Does not know: which pods run it.

    inputs   = hash(version, role's inputs in the spec)
    name     = hash(inputs, KV key, longest length)

Not among the inputs: replicas, scaling, rollout, the router, and nothing of the installation. A revision is
looked up by its inputs, so another default image, another profile or another way to render changes nothing
that runs; it is rendered once, when its ConfigMap is first written.

The KV key and the longest length are in the name because prefill and decode must agree on both, and they
depend on more than one role's inputs: on the other role's KV cache, on the commit that `main` was at, on the
version that lays out pages. So it is the **pair** that is looked up: two stored revisions of the wanted
inputs that agree are kept; else both names are made anew from what holds now, and the half of them that is
stored already is used as it is.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem_crds import names, quantity, sizing
from tandem_crds.role_config import FabricConfig, Role, build_role_config
from tandem_crds.status import ModelStatus

from .objects import labels_of, name_of
from .render.model_files import model_path
from .render.revision import config_map
from .render.router import router_template
from .render.worker import worker_template

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tandem_crds.model import DisaggregatedModel
    from tandem_crds.role_config import ModelFacts, RoleConfig

    from .objects import Obj
    from .settings import FabricProfile, Settings

# Raised when the meaning of the inputs changes: every pod of every model is then replaced.
INPUTS_VERSION = 1
RECORD_VERSION = 1
ROLE_FILE, RECORD_FILE = "role.json", "revision.json"

# Of the spec, beside the role's own part.
_SHARED_INPUTS = ("accelerator", "drainSeconds", "engine", "fabric", "model", "runtime", "topology")
_PORTS = (10000, 10999)  # of providers that have ports; the NetworkPolicy opens the same
_PORT_PROVIDERS = {"net", "tcp"}


@dataclass(frozen=True, slots=True)
class Revision:
    """One role's. `role_json` is the RoleConfig as the pods read it, word for word."""

    role: Role
    name: str
    inputs: str
    kv_key: str
    max_model_len: int
    image: str
    profile: str
    providers: tuple[str, ...]
    facts: dict[str, Any]  # `status.model`
    role_json: str
    template: Obj
    created: str = ""  # when its ConfigMap was written; empty: not yet

    def agrees_with(self, other: Revision) -> bool:
        return (self.kv_key, self.max_model_len) == (other.kv_key, other.max_model_len)

    def config_map(self, model: str) -> Obj:
        record = {
            "version": RECORD_VERSION,
            "inputs": self.inputs,
            "kvKey": self.kv_key,
            "maxModelLen": self.max_model_len,
            "image": self.image,
            "profile": self.profile,
            "providers": list(self.providers),
            "facts": self.facts,
            "template": self.template,
        }
        return config_map(
            names.role_name(model, self.role, self.name),
            names.role_labels(model, self.role, self.name, self.kv_key),
            {ROLE_FILE: self.role_json, RECORD_FILE: _json(record)},
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """The newest revision of each role; they agree."""

    prefill: Revision
    decode: Revision

    def of(self, role: Role) -> Revision:
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True, slots=True)
class RouterRevision:
    name: str
    image: str
    template: Obj
    created: str = ""

    def config_map(self, model: str) -> Obj:
        record = {"version": RECORD_VERSION, "image": self.image, "template": self.template}
        labels = names.labels(model, names.ROUTER) | {names.LABEL_REVISION: self.name}
        return config_map(names.router_revision(model, self.name), labels, {RECORD_FILE: _json(record)})


def role_inputs(model: DisaggregatedModel, role: Role) -> str:
    """The hash of what a role's pods depend on in the spec.

    Values that equal their defaults are left out: a field that a later version adds then changes no hash.
    """
    spec = model.spec.model_dump(mode="json", exclude_defaults=True)
    own = {key: value for key, value in spec.get(role.value, {}).items() if key != "replicas"}
    shared = {key: spec[key] for key in _SHARED_INPUTS if key in spec}
    return _hash([INPUTS_VERSION, role.value, _canonical(own), _canonical(shared)])


def router_inputs(model: DisaggregatedModel) -> str:
    spec = model.spec.model_dump(mode="json", exclude_defaults=True)
    keys = spec.get("router", {}).get("apiKeySecretRef")
    return _hash([INPUTS_VERSION, names.ROUTER, keys, spec.get("runtime")])


def stored_revisions(config_maps: Iterable[Obj]) -> list[Revision]:
    """Those of both roles; what another version wrote and this one cannot read is passed over."""
    return [one for one in map(_read, config_maps) if one is not None]


def newest_pair(
    model: DisaggregatedModel, facts: ModelFacts | None, settings: Settings, stored: Iterable[Revision]
) -> Pair | None:
    """What the spec asks for now. None: no stored pair will do, and without facts none can be made.

    Raises RoleConfigError where spec and facts do not fit together.
    """
    stored = list(stored)
    candidates = {
        role: [one for one in stored if one.role is role and one.inputs == role_inputs(model, role)]
        for role in (Role.PREFILL, Role.DECODE)
    }
    agreeing = [
        Pair(prefill, decode)
        for prefill in candidates[Role.PREFILL]
        for decode in candidates[Role.DECODE]
        if prefill.agrees_with(decode)
    ]
    if agreeing:
        return max(
            agreeing,
            key=lambda pair: (pair.prefill.created, pair.decode.created, pair.prefill.name, pair.decode.name),
        )
    if facts is None:
        return None
    return Pair(*(_newest(model, role, facts, settings, candidates[role]) for role in candidates))


def newest_router(
    model: DisaggregatedModel, settings: Settings, config_maps: Iterable[Obj]
) -> RouterRevision:
    name = router_inputs(model)
    for one in config_maps:
        if name_of(one) == names.router_revision(model.metadata.name, name):
            record = _record(one)
            if record is not None:
                return RouterRevision(
                    name, record["image"], record["template"], one["metadata"].get("creationTimestamp", "")
                )
    image = model.spec.runtime.image or settings.runtime.image
    return RouterRevision(name, image, router_template(model, settings, image=image))


def _newest(
    model: DisaggregatedModel, role: Role, facts: ModelFacts, settings: Settings, stored: list[Revision]
) -> Revision:
    spec = model.spec
    profile = settings.profile(spec.fabric.profile)
    assert profile is not None, "unknown profiles are refused before"
    path = model_path(spec.model.uri, facts.weights_id)
    config = build_role_config(model, facts, role, path, _fabric(profile))
    inputs = role_inputs(model, role)
    name = _hash([inputs, config.kv_key, config.engine.max_model_len])
    if found := next((one for one in stored if one.name == name), None):
        return found
    image = spec.runtime.image or settings.runtime.image
    return Revision(
        role=role,
        name=name,
        inputs=inputs,
        kv_key=config.kv_key,
        max_model_len=config.engine.max_model_len,
        image=image,
        profile=spec.fabric.profile,
        providers=profile.providers,
        facts=_model_status(model, facts, config),
        role_json=config.model_dump_json(),
        template=worker_template(
            model,
            role,
            config,
            settings,
            image=image,
            profile=profile,
            config_map=names.role_name(model.metadata.name, role, name),
        ),
    )


def _fabric(profile: FabricProfile) -> FabricConfig:
    low, high = _PORTS if _PORT_PROVIDERS.intersection(profile.providers) else (0, 0)
    return FabricConfig(providers=list(profile.providers), port_low=low, port_high=high)


def _model_status(model: DisaggregatedModel, facts: ModelFacts, config: RoleConfig) -> dict[str, Any]:
    degree = model.spec.decode.tensor_parallel
    reported: dict[str, Any] = ModelStatus(
        weights_id=facts.weights_id,
        architecture=facts.architecture,
        dtype=facts.dtype,
        layers=facts.layers,
        heads=facts.heads,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        weights_bytes=facts.weights_nbytes,
        kv_bytes_per_token=degree * sizing.kv_token_nbytes(facts, config.kv.dtype, degree),
        max_model_len=config.engine.max_model_len,
    ).model_dump(mode="json")
    return reported


def _read(one: Obj) -> Revision | None:
    labels, record, data = labels_of(one), _record(one), one.get("data") or {}
    role, name = labels.get(names.LABEL_ROLE), labels.get(names.LABEL_REVISION)
    if record is None or name is None or ROLE_FILE not in data or role not in (Role.PREFILL, Role.DECODE):
        return None
    return Revision(
        role=Role(role),
        name=name,
        inputs=record["inputs"],
        kv_key=record["kvKey"],
        max_model_len=record["maxModelLen"],
        image=record["image"],
        profile=record["profile"],
        providers=tuple(record["providers"]),
        facts=record["facts"],
        role_json=data[ROLE_FILE],
        template=record["template"],
        created=one["metadata"].get("creationTimestamp", ""),
    )


def _record(one: Obj) -> dict[str, Any] | None:
    try:
        record = json.loads((one.get("data") or {})[RECORD_FILE])
    except (KeyError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("version") == RECORD_VERSION else None


def _canonical(value: Any, key: str = "") -> Any:
    """Quantities by value: "0.2" and "200m" are one, and servers and tools turn one into the other."""
    if isinstance(value, dict):
        amounts = key in ("limits", "requests")
        return {name: _canonical(one, "quantity" if amounts else name) for name, one in value.items()}
    if isinstance(value, list):
        return [_canonical(one) for one in value]
    if key in ("quantity", "kvCacheMemory", "sizeLimit") and isinstance(value, int | str):
        try:
            return str(quantity.parse(value))
        except ValueError:  # in an opaque podTemplate anything may be called so
            return value
    return value


def _hash(parts: list[Any]) -> str:
    return hashlib.sha256(_json(parts).encode()).hexdigest()[: names.HASH_LENGTH]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
