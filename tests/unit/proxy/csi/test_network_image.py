"""Volumes that are images on the network: no device of the host takes part, and one entry reserves the image."""

import asyncio
from pathlib import Path

import grpc
import pytest

from crust.core import volumes
from crust.core.volumes import DeferredMount, HandlerFeature
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.fake_driver import MIB, Gate
from tests.support.faults.refusals import refused
from tests.support.nodes.node import Node
from tests.support.records.records import IMAGE
from tests.support.runtimes.fake_handler import ALL_FEATURES, FakeHandler

Code = grpc.StatusCode
KEY = "AQCvVJ5nAAAAABAAc2VjcmV0c2VjcmV0c2VjcmV0cw=="


def _answers_image(answer: csi_pb2.DeferredMount) -> None:
    mount = DeferredMount(IMAGE, answer.fs_type, capacity_bytes=64 * MIB, secrets={"userKey": KEY})
    wire = csi.deferred_mount_to_wire(mount)
    answer.network_image.CopyFrom(wire.network_image)
    answer.capacity_bytes = wire.capacity_bytes
    answer.secrets.update(wire.secrets)


@pytest.mark.spec("D-49")
async def test_image_is_refused_if_the_handler_cannot_open_it(node: Node, target: str) -> None:
    node.driver.alter = _answers_image
    async with node.handler(features=ALL_FEATURES - {HandlerFeature.NETWORK_IMAGE}):
        await refused(
            node.co.publish("vol-1", target), Code.FAILED_PRECONDITION, "image", "NETWORK_IMAGE"
        )
        node.check_untouched(target)


@pytest.mark.spec("D-48", "D-39")
async def test_image_is_recorded_without_the_key_of_its_user(kata: Node, target: str) -> None:
    kata.driver.alter = _answers_image
    await kata.co.publish("vol-1", target)
    assert kata.record(target).image == IMAGE
    files = [path for path in Path(kata.places.volumes).rglob("*") if path.is_file()]
    assert files
    assert not any(KEY.encode() in path.read_bytes() for path in files)


async def test_publish_of_an_image_again_changes_nothing(kata: Node, target: str) -> None:
    kata.driver.alter = _answers_image
    await kata.co.publish("vol-1", target)
    before = kata.entry(target)
    await kata.co.publish("vol-1", target)
    assert kata.entry(target) == before
    await kata.co.unpublish("vol-1", target)
    kata.check_untouched(target)


@pytest.mark.spec("D-50")
async def test_image_that_another_volume_has_is_refused_whatever_its_user_is(kata: Node) -> None:
    first, second = kata.places.target("one"), kata.places.target("two")
    kata.driver.alter = _answers_image
    await kata.co.publish("vol-1", first)

    def as_another_user(answer: csi_pb2.DeferredMount) -> None:
        _answers_image(answer)
        answer.network_image.user = "other"
        answer.network_image.monitors[:] = ["v2:192.0.2.9:3300"]

    kata.driver.alter = as_another_user
    await refused(kata.co.publish("vol-2", second), Code.FAILED_PRECONDITION, first)

    def of_another_namespace(answer: csi_pb2.DeferredMount) -> None:
        _answers_image(answer)
        answer.network_image.namespace = "other"

    kata.driver.alter = of_another_namespace
    await kata.co.publish("vol-2", second)


@pytest.mark.spec("D-51")
async def test_expanded_image_is_recorded_before_the_guest_is_asked(node: Node) -> None:
    target, gate = node.places.target("one"), Gate()
    node.driver.alter = _answers_image
    async with node.deferred(target, FakeHandler(gate=gate)):
        with node.sandbox(target):
            expansion = asyncio.create_task(node.co.expand("vol-1", target, 128 * MIB))
            await gate.entered.wait()
            assert _capacity(node, target) == 128 * MIB
            gate.opened.set()
            await expansion


@pytest.mark.spec("D-51")
async def test_expansion_of_an_image_without_a_sandbox_is_recorded(kata: Node, target: str) -> None:
    kata.driver.alter = _answers_image
    await kata.co.publish("vol-1", target)
    await kata.co.expand("vol-1", target, 128 * MIB)
    assert _capacity(kata, target) == 128 * MIB


@pytest.mark.spec("D-45", "D-48")
async def test_handler_whose_sandbox_has_the_image_gets_the_key_of_its_user(node: Node) -> None:
    node.driver.alter = _answers_image
    target = volumes.TargetPath(node.places.target("one"))
    async with node.handler() as session:
        await node.co.publish("vol-1", target.text)
        with node.sandbox(target.text):
            assert await session.secrets_of(target) == {"userKey": KEY}


def _capacity(node: Node, target: str) -> int:
    return node.record(target).mount.capacity_bytes
