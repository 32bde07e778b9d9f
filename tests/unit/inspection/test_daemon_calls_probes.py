"""A driver that is away, or stopped, is said to be so in crust's words."""

import errno
import os

import grpc
import pytest

from tests.support.drivers import fake_driver
from tests.support.faults import lies
from tests.support.nodes.commands import crust
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places


async def test_driver_that_is_away_is_named_without_grpcs_words(places: Places) -> None:
    async with FakeNode(places, backend=f"{places.root}/nobody.sock") as node:
        result = await crust(node, "drivers")
    assert result.exit_code == 1
    assert "the socket does not exist; start crust-shim" in result.output
    assert "failed to connect" not in result.output


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
async def test_shims_socket_that_is_not_seen_is_not_missing(places: Places, number: int) -> None:
    backend = f"{places.root}/nobody.sock"
    async with FakeNode(places, backend=backend) as node:
        hidden = lies.Concerns(frozenset({backend}), ())
        with lies.failing(hidden, lies.Failure(0, number)):
            result = await crust(node, "drivers")
    assert f"cannot stat {backend}: {os.strerror(number)}" in result.output


async def test_stopped_driver_is_named_by_its_own_socket(node: FakeNode) -> None:
    await node.stop("driver")
    result = await crust(node, "drivers")
    assert f"the process that serves {node.places.driver} cannot be reached" in result.output
    assert "failed to connect" not in result.output


@pytest.mark.parametrize("rpc", ["Probe", "GetPluginInfo"])
@pytest.mark.parametrize("command", ["drivers", "status"])
async def test_driver_that_answers_unavailable_is_shown_in_its_words(
    node: FakeNode, command: str, rpc: str
) -> None:
    node.driver.failing[rpc] = fake_driver.Failure(grpc.StatusCode.UNAVAILABLE, "no version is set")
    result = await crust(node, command)
    assert "is not ready: it answered UNAVAILABLE: no version is set" in result.output
    assert "listens" not in result.output
