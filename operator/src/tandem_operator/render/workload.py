"""The Deployment of one revision of a role, and the role's disruption budget.

Knows: labels and counts. Does not know: what is in the template.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem_crds import names

from ..objects import DEPLOYMENT, DISRUPTION_BUDGET

if TYPE_CHECKING:
    from tandem_crds.model import DisaggregatedModel
    from tandem_crds.role_config import Role

    from ..objects import Obj

# Loading a large model takes longer than the default 600 s, and the progress that counts is told by pods.
_DEADLINE_S = 7 * 24 * 3600


def deployment(
    model: DisaggregatedModel, role: Role, revision: str, kv_key: str, template: Obj, replicas: int
) -> Obj:
    """Its template never changes: another template is another revision."""
    name = model.metadata.name
    labels = names.role_labels(name, role, revision, kv_key)
    metadata = template.get("metadata", {})
    return {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.kind,
        "metadata": {"name": names.role_name(name, role, revision), "labels": labels},
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 0,
            "progressDeadlineSeconds": _DEADLINE_S,
            "selector": {
                "matchLabels": {
                    names.LABEL_MODEL: name,
                    names.LABEL_ROLE: role.value,
                    names.LABEL_REVISION: revision,
                }
            },
            "template": {
                **template,
                "metadata": {**metadata, "labels": {**metadata.get("labels", {}), **labels}},
            },
        },
    }


def disruption_budget(model: DisaggregatedModel, role: Role) -> Obj:
    """One pod of a role at a time, of whatever revision; pods that are not ready never hold up a drain."""
    name = model.metadata.name
    return {
        "apiVersion": DISRUPTION_BUDGET.api_version,
        "kind": DISRUPTION_BUDGET.kind,
        "metadata": {"name": names.disruption_budget(name, role), "labels": names.labels(name, role.value)},
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": {names.LABEL_MODEL: name, names.LABEL_ROLE: role.value}},
        },
    }
