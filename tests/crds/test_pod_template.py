from __future__ import annotations

from typing import Any

import pytest

from tandem_crds.pod_template import refused


@pytest.mark.parametrize(
    ("template", "paths"),
    [
        ({}, []),
        ({"metadata": {"labels": {"team": "a"}}, "spec": {"priorityClassName": "high"}}, []),
        (
            {"spec": {"containers": [{"name": "engine", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}]}},
            [],
        ),
        ({"metadata": {"labels": {"tandem.dev/role": "x"}}}, ["metadata.labels.tandem.dev/role"]),
        ({"spec": {"hostNetwork": True, "hostPID": True}}, ["spec.hostNetwork", "spec.hostPID"]),
        ({"spec": {"serviceAccountName": "admin"}}, ["spec.serviceAccountName"]),
        ({"spec": {"volumes": [{"name": "tandem-keys"}, {"name": "data"}]}}, ["spec.volumes.tandem-keys"]),
        (
            {"spec": {"initContainers": [{"env": [{"name": "TANDEM_ROLE"}]}]}},
            ["spec.initContainers.env.TANDEM_ROLE"],
        ),
        ({"status": {}}, ["status"]),
        ({"spec": {"containers": "nonsense", "volumes": [3]}, "metadata": None}, []),
    ],
)
def test_an_overlay_may_not_touch_what_is_ours(template: dict[str, Any], paths: list[str]) -> None:
    assert refused(template) == paths
