"""A control plane with kwok's nodes: whatever hangs on the API server's, the scheduler's and the controllers'
behaviour, and on fleets that nobody has at home. No pod runs anything here; `serving/` does that.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import published
import pytest
from local_hub import local_hub

from e2e import environment
from e2e.cluster import fake_nodes, lifecycle, tools
from e2e.cluster.layout import Layout
from e2e.environment import REPOSITORY
from e2e.kubectl import Kubectl
from e2e.operator_process import OperatorProcess
from tandem_runtime.up.demo_model import default_cache_dir, ensure_demo_model

if TYPE_CHECKING:
    from collections.abc import Iterator

MODELS = "models"
CRD = REPOSITORY / "crds" / "disaggregatedmodels.tandem.dev.yaml"
URI = "pvc://models/smollm2-135m-instruct"
_numbers = itertools.count(1)


def facts(uri: str, *words: str, **env: str) -> str:
    """What the runtime image's own command says about a model."""
    command = [sys.executable, "-m", "tandem_runtime.cli", "inspect", uri, *words]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def served(message: str) -> str:
    """As an image would say it whose engine computes that architecture."""
    return json.dumps({**json.loads(message), "engine_refuses": ""})


@pytest.fixture(scope="session")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of the example and of the two large models, from a hub that has their published headers."""
    models = ensure_demo_model(default_cache_dir()).parent
    found = {URI: facts(URI, "--volume", f"models={models}")}
    with local_hub() as hub:
        hub.repositories |= published.fleet()
        env = {
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": "hf_secret",
            "HF_HOME": str(tmp_path_factory.mktemp("hub")),
        }
        for uri in (published.R1_URI, published.QWEN3_URI):
            found[uri] = facts(uri, **env)
    return found


@pytest.fixture(scope="session")
def layout(messages: dict[str, str]) -> Iterator[Layout]:
    layout = Layout("fleet", index=2, nodes=0)
    lifecycle.up(layout)
    large = {uri: served(message) for uri, message in messages.items()}
    # The same models as an image says that cannot compute them.
    large["hf://refused/DeepSeek-R1"] = messages[published.R1_URI]
    fake_nodes.start(layout, tools.directory(), large)
    fake_nodes.add(layout, tools.directory(), ["cpu-1", "cpu-2"], {})
    yield layout
    if not os.environ.get("TANDEM_E2E_KEEP"):
        lifecycle.down(layout.name)


@pytest.fixture(scope="session")
def admin(layout: Layout) -> Kubectl:
    """With the CRD, and the namespaces that the session's operator watches."""
    kubectl = Kubectl(layout)
    kubectl("apply", "-f", CRD)
    kubectl("wait", "--for=condition=Established", "crd/disaggregatedmodels.tandem.dev", "--timeout=20s")
    kubectl.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": MODELS}}])
    kubectl.within(MODELS).apply(environment.claims(MODELS, Path("/nowhere")))
    return kubectl


@pytest.fixture(scope="session")
def operator(
    admin: Kubectl, layout: Layout, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    directory = tmp_path_factory.mktemp("operator")
    with OperatorProcess(layout.kubeconfig(), directory, namespaces=(MODELS,)) as operator:
        yield operator
        assert operator.exit_code is None, operator.log()[-3000:]
        assert "for a reason that should not exist" not in operator.log()


@pytest.fixture
def models(admin: Kubectl, operator: OperatorProcess) -> Iterator[Kubectl]:
    """The namespace of the session's operator; models of a test are gone after it."""
    kubectl = admin.within(MODELS)
    yield kubectl
    kubectl("delete", "dm", "--all", "--wait=false")


@pytest.fixture
def namespace(admin: Kubectl) -> Iterator[Kubectl]:
    """One that no operator watches yet."""
    name = f"ns-{next(_numbers)}"
    admin("create", "namespace", name)
    yield admin.within(name)
    admin("delete", "namespace", name, "--wait=false")


@pytest.fixture
def name() -> str:
    """Of a model, none other's."""
    return f"m{next(_numbers)}-{int(time.time()) % 10000}"


def manifest(name: str, **spec: Any) -> dict[str, Any]:
    """The smallest, with parts of its spec replaced."""
    base: dict[str, Any] = {
        "model": {"uri": URI},
        "accelerator": {"type": "CPU"},
        "prefill": {"replicas": 1, "engine": {"kvCacheMemory": "512Mi"}},
        "decode": {"replicas": 1, "engine": {"kvCacheMemory": "512Mi"}},
    }
    for key, value in spec.items():
        base[key] = {**base[key], **value} if isinstance(base.get(key), dict) else value
    return {
        "apiVersion": "tandem.dev/v1alpha1",
        "kind": "DisaggregatedModel",
        "metadata": {"name": name},
        "spec": {key: value for key, value in base.items() if value is not None},
    }


def held(**more: Any) -> dict[str, Any]:
    """A podTemplate whose pods wait for a status that the test writes."""
    return {"metadata": {"annotations": {fake_nodes.HELD: "true"}}, **more}
