"""The Job that reads a model's facts, with the model's volumes and secret and no API token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem_crds import names

from ..objects import JOB
from .container import POD_SECURITY, SCRATCH, SCRATCH_MOUNT, SECURITY, environment
from .model_files import CLAIM_PATH, IMAGE_PATH, claim, hub_token, model_files
from .overlay import installed

if TYPE_CHECKING:
    from tandem_crds.model import DisaggregatedModel

    from ..objects import Obj
    from ..settings import Settings

# A private or absent model is told at once; what is unreachable is tried again before people are told.
_BACKOFF_LIMIT, _DEADLINE_S = 2, 900
MESSAGE_PATH = "/dev/termination-log"


def inspect_job(model: DisaggregatedModel, settings: Settings, *, image: str, key: str) -> Obj:
    """Its container leaves the facts as JSON, or one line of error, in its termination message."""
    name, spec = model.metadata.name, model.spec.model
    files = model_files(model)
    command = ["python3", "-m", "tandem_runtime.cli", "inspect", spec.uri]
    if spec.revision is not None:
        command += ["--revision", spec.revision]
    if claim(spec.uri):
        command += ["--volume", f"{claim(spec.uri)}={CLAIM_PATH}"]
    if spec.uri.startswith("oci://"):
        command += ["--image-at", IMAGE_PATH]
    command += ["--termination-log", MESSAGE_PATH]
    labels = names.labels(name, "inspect")
    pod: Obj = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        "containers": [
            {
                "name": "inspect",
                "image": image,
                "imagePullPolicy": settings.runtime.image_pull_policy,
                "command": command,
                "env": environment(settings, hub_token(model)),
                "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}},
                "volumeMounts": [SCRATCH_MOUNT, *({**one, "readOnly": True} for one in files.mounts)],
                "securityContext": SECURITY,
                "terminationMessagePath": MESSAGE_PATH,
                "terminationMessagePolicy": "FallbackToLogsOnError",
            }
        ],
        "volumes": [SCRATCH, *files.volumes],
    }
    if model.spec.runtime.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": one.name} for one in model.spec.runtime.image_pull_secrets]
    template = installed({"metadata": {}, "spec": pod}, settings.runtime.pod_template)
    metadata = template["metadata"]
    template["metadata"] = {**metadata, "labels": {**metadata.get("labels", {}), **labels}}
    return {
        "apiVersion": JOB.api_version,
        "kind": JOB.kind,
        "metadata": {"name": names.inspect_job(name, key), "labels": labels},
        "spec": {
            "backoffLimit": _BACKOFF_LIMIT,
            "activeDeadlineSeconds": _DEADLINE_S,
            "template": template,
        },
    }
