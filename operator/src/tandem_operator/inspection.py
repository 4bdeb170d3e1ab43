"""The model's facts: read once per change of `spec.model` by a Job, then kept in a ConfigMap.

Knows: the Job's life and what its pods say. Does not know: what the facts are good for.

    nothing ──► Job ──exit 0, facts in the termination message──► ConfigMap, Job removed
                 │
                 └──failed──► the message in a condition; 5 minutes later the Job is removed and made anew,
                              at once when the manifest or the settings render another one

A Job's template cannot be changed, so one that was rendered differently is replaced, never applied over.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from tandem_crds import names
from tandem_crds.role_config import ROLE_CONFIG_VERSION, ModelFacts

from . import pods, timestamps
from .objects import CONFIG_MAP, JOB, is_terminating, labels_of, name_of, uid_of
from .render.inspect_job import inspect_job
from .render.revision import config_map

if TYPE_CHECKING:
    from tandem_crds.model import DisaggregatedModel

    from .objects import Kind, Obj
    from .observed import Observed
    from .settings import Settings

FACTS_FILE = "facts.json"
CONTAINER = "inspect"
RETRY_S = 300.0
ANNOTATION_RENDERED = f"{names.RESERVED_PREFIX}rendered"


@dataclass(frozen=True, slots=True)
class Inspection:
    """`facts`, or why there are none yet: a failure, else what is waited for."""

    facts: ModelFacts | None = None
    apply: tuple[Obj, ...] = ()
    keep: frozenset[tuple[Kind, str]] = frozenset()  # of Jobs and ConfigMaps; the others go
    failure: str = ""
    waiting_for: str = ""
    retry_s: float | None = None


def inspection_key(model: DisaggregatedModel) -> str:
    """Of what the Job is given. The served name is not: it is no property of the files."""
    document = model.spec.model.model_dump(mode="json", exclude_defaults=True, exclude={"served_name"})
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[: names.HASH_LENGTH]


def inspect(observed: Observed, model: DisaggregatedModel, settings: Settings, now: float) -> Inspection:
    key = inspection_key(model)
    name = names.inspect_job(model.metadata.name, key)
    kept = observed.named(CONFIG_MAP, name)
    facts = _facts((kept.get("data") or {}).get(FACTS_FILE, "")) if kept is not None else None
    if isinstance(facts, ModelFacts):
        return Inspection(facts, keep=frozenset({(CONFIG_MAP, name)}))
    body = _job(model, settings, key)
    job = observed.named(JOB, name)
    if job is None:
        return Inspection(apply=(body,), waiting_for=f"Job {name} to read the model's facts")
    if is_terminating(job):
        return Inspection(waiting_for=f"the earlier Job {name} to go")
    ends = [end for pod in pods.of_owner(observed.pods, uid_of(job)) if (end := pods.ended(pod, CONTAINER))]
    answers = [_facts(end.get("message", "")) for end in ends if end["exitCode"] == 0]
    held = frozenset({(JOB, name)})
    if (found := next((one for one in answers if isinstance(one, ModelFacts)), None)) is not None:
        data = {FACTS_FILE: found.model_dump_json()}
        # The Job goes when the ConfigMap has been seen: were it removed now and the write failed, the answer
        # would be lost.
        return Inspection(found, apply=(config_map(name, labels_of(body), data),), keep=held)
    if _rendered(job) != _rendered(body):
        return Inspection(waiting_for=f"Job {name} to be replaced, since its image or settings changed")
    return _unanswered(observed, job, ends, [one for one in answers if isinstance(one, str)], held, now)


def _unanswered(
    observed: Observed,
    job: Obj,
    ends: list[Obj],
    misunderstood: list[str],
    held: frozenset[tuple[Kind, str]],
    now: float,
) -> Inspection:
    name = name_of(job)
    failures = sorted(
        (end for end in ends if end["exitCode"] != 0), key=lambda end: str(end.get("finishedAt", ""))
    )
    if misunderstood:
        failure = min(misunderstood)
    elif failures:
        said, code = pods.brief(failures[-1].get("message", "")), failures[-1]["exitCode"]
        failure = said or f"it exited with {code} and said nothing; see kubectl logs job/{name}"
    else:
        failure = ""
    for condition in ("Failed", "Complete"):
        over = pods.condition(job, condition)
        if over.get("status") == "True":
            wait_s = timestamps.seconds(over["lastTransitionTime"]) + RETRY_S - now
            why = failure or pods.brief(over.get("message", "")) or "it ended without an answer"
            why += f"; tried again {RETRY_S / 60:.0f} minutes after it ended, at once when spec.model changes"
            if wait_s <= 0:
                return Inspection(failure=why, retry_s=1.0)
            return Inspection(keep=held, failure=why, retry_s=wait_s)
    own = pods.of_owner(observed.pods, uid_of(job))
    stuck = pods.worst(one for one in map(pods.trouble, own) if one is not None)
    if not failure and stuck is not None:
        failure = stuck.message
    return Inspection(keep=held, failure=failure, waiting_for=f"Job {name} to read the model's facts")


def _facts(text: str) -> ModelFacts | str:
    """The facts, or why this version cannot use them."""
    try:
        facts = ModelFacts.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        return (
            f"its answer is not understood ({where}: {first['msg']}): the runtime image is of another "
            "version than this operator"
        )
    if facts.role_config_version != ROLE_CONFIG_VERSION:
        return (
            f"the runtime image starts from RoleConfig version {facts.role_config_version}, this operator "
            f"writes version {ROLE_CONFIG_VERSION}: use an image of the operator's version"
        )
    return facts


def _job(model: DisaggregatedModel, settings: Settings, key: str) -> Obj:
    body = inspect_job(model, settings, image=model.spec.runtime.image or settings.runtime.image, key=key)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
    annotations = {**body["metadata"].get("annotations", {}), ANNOTATION_RENDERED: digest}
    return {**body, "metadata": {**body["metadata"], "annotations": annotations}}


def _rendered(job: Obj) -> str:
    return str((job["metadata"].get("annotations") or {}).get(ANNOTATION_RENDERED, ""))
