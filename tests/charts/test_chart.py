"""The Helm chart: what it renders, what its schema refuses, and that its RBAC is what the operator checks.

The renders in golden/ are whole: after a wanted change run this file with --update-golden and read the diff.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import Chart, HelmError

from tandem_crds import generate
from tandem_operator.access_review import LEASE_VERBS, VERBS, Verb
from tandem_operator.settings import load_settings

CHART = Path(__file__).parents[2] / "charts" / "tandem"
GOLDEN = Path(__file__).with_name("golden")
KUBERNETES = "1.33"

VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "namespaced": {
        "watchNamespaces": ["red", "blue"],
        "replicas": 2,
        "podDisruptionBudget": {"enabled": True},
    },
    "full": {
        "image": {"digest": f"sha256:{'a' * 64}"},
        "imagePullSecrets": [{"name": "registry"}],
        "crds": {"install": False},
        "runtime": {
            "image": {"repository": "registry.example/runtime", "tag": "nightly", "pullPolicy": "Always"},
            "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
            "podTemplate": {"spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}},
        },
        "profiles": {"roce": {"providers": ["verbs"], "resourceName": "rdma/hca_a", "nicsPerGPU": 1}},
        "serviceAccount": {"annotations": {"example.com/role": "tandem"}},
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "infra", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
        "podAnnotations": {"example.com/scrape": "true"},
        "podLabels": {"team": "serving"},
        "env": [{"name": "PYTHONPATH", "value": "/src"}],
        "extraVolumes": [{"name": "src", "persistentVolumeClaim": {"claimName": "src", "readOnly": True}}],
        "extraVolumeMounts": [{"name": "src", "mountPath": "/src", "readOnly": True}],
        "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    },
}


def rendered(
    values: dict[str, Any], name: str = "tandem", namespace: str = "tandem-system"
) -> list[dict[str, Any]]:
    files = Chart.load(CHART).render(values, name=name, namespace=namespace)
    return [
        document
        for path in sorted(files)
        if path.endswith(".yaml")
        for document in yaml.safe_load_all(files[path])
        if document
    ]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


@pytest.mark.parametrize("case", VALUES)
def test_golden_render(case: str, request: pytest.FixtureRequest) -> None:
    objects = [one for one in rendered(VALUES[case]) if one["kind"] != "CustomResourceDefinition"]
    text = "---\n".join(yaml.safe_dump(one, sort_keys=False, width=120) for one in objects)
    file = GOLDEN / f"{case}.yaml"
    if request.config.getoption("--update-golden"):
        file.write_text(text)
    assert text == file.read_text(), "read the difference, then run with --update-golden"


@pytest.mark.parametrize("case", VALUES)
def test_every_object_is_what_the_server_accepts(case: str) -> None:
    for one in rendered(VALUES[case]):
        if one["kind"] not in ("CustomResourceDefinition", "ServiceMonitor"):
            kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_the_crd_is_the_generated_one_and_is_kept_at_uninstall() -> None:
    (crd,) = of_kind(rendered({}), "CustomResourceDefinition")
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert crd == yaml.safe_load(generate.FILES[0].read_text())
    assert not of_kind(rendered({"crds": {"install": False}}), "CustomResourceDefinition")


@pytest.mark.parametrize("case", VALUES)
def test_the_operator_reads_the_settings_that_the_chart_writes(case: str, tmp_path: Path) -> None:
    (config_map,) = of_kind(rendered(VALUES[case]), "ConfigMap")
    file = tmp_path / "operator.yaml"
    file.write_text(config_map["data"]["operator.yaml"])
    settings = load_settings(file)
    values = VALUES[case]
    assert list(settings.namespaces) == values.get("watchNamespaces", [])
    if case == "full":
        assert settings.runtime.image == "registry.example/runtime:nightly"
        assert settings.runtime.image_pull_policy == "Always"
        assert settings.profile("roce").resource_name == "rdma/hca_a"  # type: ignore[union-attr]
        assert settings.runtime.pod_template == values["runtime"]["podTemplate"]
        assert list(settings.runtime.env) == values["runtime"]["env"]


def granted(rules: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def needed(verbs: tuple[Verb, ...]) -> set[tuple[str, str, str]]:
    return {
        (
            one.kind.api_version.rpartition("/")[0],
            f"{one.kind.plural}/{one.subresource}" if one.subresource else one.kind.plural,
            one.verb,
        )
        for one in verbs
    }


def test_rbac_is_what_the_operator_checks_at_start_verb_by_verb() -> None:
    cluster = rendered({})
    (main,) = [one for one in of_kind(cluster, "ClusterRole") if one["metadata"]["name"].endswith("operator")]
    assert granted(main["rules"]) == needed(VERBS)
    (lease,) = of_kind(cluster, "Role")
    assert granted(lease["rules"]) == needed(tuple(LEASE_VERBS))
    assert lease["metadata"]["namespace"] == "tandem-system"


def test_namespaced_installation_has_no_cluster_wide_right() -> None:
    objects = rendered(VALUES["namespaced"])
    assert not of_kind(objects, "ClusterRoleBinding")
    roles = of_kind(objects, "Role")
    assert [one["metadata"]["namespace"] for one in roles] == ["red", "blue"]
    for role in roles:
        assert granted(role["rules"]) == needed((*VERBS, *LEASE_VERBS))
    for binding in of_kind(objects, "RoleBinding"):
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "tandem-operator", "namespace": "tandem-system"}
        ]


@pytest.mark.parametrize("case", VALUES)
def test_pods_are_restricted(case: str) -> None:
    """PodSecurity `restricted`, of the operator and of `helm test`."""
    objects = rendered(VALUES[case])
    pods = [one["spec"]["template"]["spec"] for one in of_kind(objects, "Deployment")]
    pods += [one["spec"] for one in of_kind(objects, "Pod")]
    assert len(pods) == 2
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_two_releases_in_one_cluster_share_no_name() -> None:
    def names(name: str, namespace: str) -> set[tuple[str, str, str]]:
        return {
            (one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"])
            for one in rendered({"crds": {"install": False}}, name, namespace)
        }

    assert not names("tandem", "a") & names("tandem", "b")
    assert not names("tandem", "a") & names("other", "a")


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 1},
        {"replicas": -1},
        {"image": {"digest": "latest"}},
        {"image": {"pullPolicy": "Sometimes"}},
        {"watchNamespaces": ["Not_A_Name"]},
        {"runtime": {"env": {"A": "b"}}},
        {"logLevel": "chatty"},
        {"profiles": {"roce": {"resource": "rdma/hca"}}},
        {"metrics": {"serviceMonitor": {"enabled": "yes"}}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(HelmError, match=r"[Vv]alues"):
        rendered(values)
