"""The Kubernetes API that a test's own fixture `api` describes, served."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nodes import fake_kubernetes
from tests.support.nodes.fake_kubernetes import FakeKubernetes


@pytest.fixture
def kubeconfig(api: FakeKubernetes, tmp_path: Path) -> Iterator[str]:
    """A file with which a client reaches it."""
    with fake_kubernetes.serving(api, tmp_path) as path:
        yield path
