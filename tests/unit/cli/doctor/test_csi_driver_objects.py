"""`crust doctor`: the CSIDriver objects of the cluster against the settings."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from crust.cli.doctor import csi_driver_objects
from crust.cli.doctor.finding import Level
from crust.cli.doctor.node import Node
from tests.support.drivers import fake_driver
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.examined_node import bad, found, write
from tests.support.nodes.fake_kubernetes import FakeKubernetes

NAME = "csi.example.com"


@contextmanager
def of_cluster(root: Path, api: FakeKubernetes, defer: str = "") -> Iterator[Node]:
    """A node whose settings name a driver, at csi.sock, and the API."""
    with fake_kubernetes.serving(api, root) as kubeconfig:
        driver = f'name = "{NAME}"\nsocket = "{root}/csi.sock"\nbackend = "/b.sock"\n{defer}\n'
        table = f'[kubernetes]\nkubeconfig = "{kubeconfig}"\nruntime_handlers = ["kata"]\n'
        write(root, "etc/crust/proxy.toml", f"[[drivers]]\n{driver}{table}")
        yield Node(root=root, csi_driver_mismatches=csi_driver_objects.mismatches)


@pytest.mark.parametrize(
    ("pod_info", "defer", "level"),
    [
        (True, "", Level.OK),
        (False, "", Level.WARNING),
        (False, 'defer = "runtime-class"', Level.ERROR),
    ],
)
async def test_csi_driver_object_is_compared_with_the_settings(
    root: Path, *, pod_info: bool, defer: str, level: Level
) -> None:
    """The real API over HTTP, and a driver at the socket that the kubelet calls."""
    api = FakeKubernetes()
    api.add_object("csidrivers", NAME, spec={"attachRequired": False, "podInfoOnMount": pod_info})
    driver = fake_driver.FakeDriver()
    with of_cluster(root, api, defer) as node:
        async with fake_driver.serving(driver, str(root / "csi.sock")):
            (result,) = await asyncio.to_thread(found, node, "csidriver")
    assert (result.level, NAME in result.what) == (level, True)


def test_cluster_is_not_asked_without_access_to_it(good: Node) -> None:
    assert (
        found(replace(good, csi_driver_mismatches=csi_driver_objects.mismatches), "csidriver") == ()
    )


def test_kubernetes_api_that_is_away_is_a_finding_of_doctor(root: Path) -> None:
    api = FakeKubernetes()
    api.faults.status = 500
    with of_cluster(root, api) as node:
        assert "Kubernetes API" in bad(node, "csidriver", Level.ERROR)
