"""The Kubernetes API that a test's own fixture `api` describes, served."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api.api import KubernetesApi
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.fake_kubernetes import FakeKubernetes
from tests.support.nodes.recorded_server import Server


@pytest.fixture
def kubeconfig(api: FakeKubernetes, tmp_path: Path) -> Iterator[str]:
    """A file with which a client reaches it."""
    with fake_kubernetes.serving(api, tmp_path) as path:
        yield path


@pytest_asyncio.fixture
async def client(kubeconfig: str) -> AsyncIterator[KubernetesApi]:
    made = kubernetes_api.client(kubeconfig)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    yield made
    await made.api.close()
