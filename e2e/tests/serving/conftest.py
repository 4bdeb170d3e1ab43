"""One cluster, one installation and one model for the whole session; what a test changes it changes back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from e2e import clients
from e2e.cluster import lifecycle
from e2e.cluster.layout import Layout
from e2e.environment import REPOSITORY
from e2e.installation import Installation
from e2e.kubectl import Kubectl
from tandem_runtime.up.demo_model import default_cache_dir, ensure_demo_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXAMPLE = REPOSITORY / "examples" / "smollm2.yaml"
MODEL = "smollm2"


@pytest.fixture(scope="session")
def layout() -> Iterator[Layout]:
    """Two real nodes. TANDEM_E2E_KEEP=1 leaves them standing, for the next run to use."""
    layout = Layout("e2e", index=1, nodes=2)
    lifecycle.up(layout)
    yield layout
    if not os.environ.get("TANDEM_E2E_KEEP"):
        lifecycle.down(layout.name)


@pytest.fixture(scope="session")
def kubectl(layout: Layout) -> Kubectl:
    return Kubectl(layout)


@pytest.fixture(scope="session")
def models() -> Path:
    return ensure_demo_model(default_cache_dir()).parent


@pytest.fixture(scope="session")
def installation(kubectl: Kubectl, models: Path) -> Installation:
    installation = Installation(kubectl)
    installation.prepare(models)
    installation.install()
    return installation


@pytest.fixture(scope="session")
def serving(kubectl: Kubectl, installation: Installation) -> str:
    """The example as it is, applied and Ready: the router's URL."""
    kubectl("apply", "-f", EXAMPLE)
    kubectl.until_condition(MODEL, "Ready", "True", timeout=180)
    return f"http://{kubectl.address(f'{MODEL}-router')}"


@pytest.fixture(scope="session")
def expected(models: Path) -> dict[str, list[int]]:
    """What `tandem up` answers to the same manifest."""
    command = [sys.executable, "-m", "tandem_runtime.cli", "up", EXAMPLE, "--port", "0"]
    with subprocess.Popen(
        [*map(str, command), "--volume", f"models={models}"], stderr=subprocess.PIPE, text=True
    ) as up:
        try:
            assert up.stderr is not None
            for line in up.stderr:
                if found := re.search(r"serving \S+ on (http://\S+)/v1", line):
                    return clients.answers(found[1], MODEL)
            raise AssertionError("tandem up ended before it served")
        finally:
            up.terminate()
            up.communicate(timeout=60)
