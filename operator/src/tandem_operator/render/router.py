"""The router: its pod template and its Deployment, which rolls by itself, one pod more at a time.

Knows: `spec.router`. Does not know: workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem_crds import names

from ..objects import DEPLOYMENT
from .container import (
    POD_SECURITY,
    SCRATCH,
    SCRATCH_MOUNT,
    SECURITY,
    TOKEN_MOUNT,
    environment,
    http_probe,
    token_volume,
)
from .overlay import installed

if TYPE_CHECKING:
    from tandem_crds.model import DisaggregatedModel

    from ..objects import Obj
    from ..settings import Settings

PORT = 8000
_KEYS_DIR = "/etc/tandem/api-keys"
# Streams outlive a router's last new request by as long as an answer takes; `RouterConfig.drain_s` is 30.
_GRACE_S = 45


def router_template(model: DisaggregatedModel, settings: Settings, *, image: str) -> Obj:
    name = model.metadata.name
    command = ["python3", "-m", "tandem_runtime.router", "--host", "0.0.0.0", "--port", str(PORT)]
    volumes, mounts = [SCRATCH, token_volume()], [SCRATCH_MOUNT, TOKEN_MOUNT]
    if (keys := model.spec.router.api_key_secret_ref) is not None:
        command += ["--api-keys", f"{_KEYS_DIR}/{keys.key}"]
        volumes.append({"name": "tandem-api-keys", "secret": {"secretName": keys.name}})
        mounts.append({"name": "tandem-api-keys", "mountPath": _KEYS_DIR, "readOnly": True})
    own = [{"name": "TANDEM_PEER_SELECTOR", "value": names.decode_selector(name)}]
    container = {
        "name": "router",
        "image": image,
        "imagePullPolicy": settings.runtime.image_pull_policy,
        "command": command,
        "env": environment(settings, own),
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "volumeMounts": mounts,
        "securityContext": SECURITY,
        "readinessProbe": http_probe("/ready", "http", period_s=2, failures=2),
        "livenessProbe": http_probe("/health", "http", period_s=5, failures=6, timeout_s=5),
        "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pod: Obj = {
        "serviceAccountName": names.worker_account(name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        "terminationGracePeriodSeconds": _GRACE_S,
        "containers": [container],
        "volumes": volumes,
    }
    if model.spec.runtime.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": one.name} for one in model.spec.runtime.image_pull_secrets]
    return installed({"metadata": {}, "spec": pod}, settings.runtime.pod_template)


def router_deployment(model: DisaggregatedModel, revision: str, template: Obj) -> Obj:
    name = model.metadata.name
    labels = names.labels(name, names.ROUTER)
    metadata = template.get("metadata", {})
    own = {**metadata.get("labels", {}), **labels, names.LABEL_REVISION: revision}
    return {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.kind,
        "metadata": {"name": names.router(name), "labels": labels},
        "spec": {
            "replicas": model.spec.router.replicas,
            "revisionHistoryLimit": 0,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": labels},
            "template": {**template, "metadata": {**metadata, "labels": own}},
        },
    }
