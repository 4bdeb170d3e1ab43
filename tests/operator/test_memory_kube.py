from __future__ import annotations

import pytest
from kube_contract import KubeContract
from memory_kube import MemoryKube


@pytest.fixture
def kube() -> MemoryKube:
    return MemoryKube()


@pytest.fixture
def namespace() -> str:
    return "default"


class TestMemoryKube(KubeContract):
    pass
