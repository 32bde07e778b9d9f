"""Deferred publishes of images that only a hypervisor opens."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.core.volumes import DeferredMount, HandlerFeature
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.fake_driver import MIB
from tests.support.faults.refusals import refused, until
from tests.support.nodes.fake_node import FakeNode
from tests.support.records.records import IMAGE
from tests.support.runtimes.fake_handler import ALL_FEATURES

Code = grpc.StatusCode
KEY = "AQCvVJ5nAAAAABAAc2VjcmV0c2VjcmV0c2VjcmV0cw=="


def _answers_image(answer: csi_pb2.DeferredMount) -> None:
    mount = DeferredMount(IMAGE, answer.fs_type, capacity_bytes=64 * MIB, secrets={"userKey": KEY})
    wire = csi.deferred_mount_to_wire(mount)
    answer.network_image.CopyFrom(wire.network_image)
    answer.capacity_bytes = wire.capacity_bytes
    answer.secrets.update(wire.secrets)


@pytest.mark.spec("D-49")
async def test_image_is_refused_if_the_handler_cannot_open_it(node: FakeNode, target: str) -> None:
    node.driver.alter = _answers_image
    async with node.handler(features=ALL_FEATURES - {HandlerFeature.NETWORK_IMAGE}):
        await refused(
            node.co.publish("vol-1", target), Code.FAILED_PRECONDITION, "image", "NETWORK_IMAGE"
        )
        node.check_untouched(target)


@pytest.mark.spec("D-48", "D-39")
async def test_image_is_recorded_without_the_key_of_its_user(kata: FakeNode, target: str) -> None:
    kata.driver.alter = _answers_image
    await kata.co.publish("vol-1", target)
    assert kata.record(target).image == IMAGE
    files = [path for path in Path(kata.places.volumes).rglob("*") if path.is_file()]
    assert files
    assert not any(KEY.encode() in path.read_bytes() for path in files)


async def test_publish_of_an_image_again_changes_nothing(kata: FakeNode, target: str) -> None:
    kata.driver.alter = _answers_image
    await kata.co.publish("vol-1", target)
    before = kata.entry(target)
    await kata.co.publish("vol-1", target)
    assert kata.entry(target) == before
    await kata.co.unpublish("vol-1", target)
    kata.check_untouched(target)


@pytest.mark.spec("D-50")
async def test_image_of_another_volume_is_refused_whatever_its_user(kata: FakeNode) -> None:
    first, second = kata.places.target("one"), kata.places.target("two")
    differing: dict[Any, Any] = {}

    def answer_image(answer: csi_pb2.DeferredMount) -> None:
        _answers_image(answer)
        for name, value in differing.items():
            answer.network_image.ClearField(name)
            answer.network_image.MergeFrom(csi_pb2.DeferredMount.NetworkImage(**{name: value}))

    kata.driver.alter = answer_image
    await kata.co.publish("vol-1", first)
    differing = {"user": "other", "monitors": ["v2:192.0.2.9:3300"]}
    await refused(kata.co.publish("vol-2", second), Code.FAILED_PRECONDITION, first)
    differing = {"namespace": "other"}
    await kata.co.publish("vol-2", second)


@pytest.mark.spec("D-51")
async def test_expanded_image_is_recorded_before_the_guest_is_asked(
    node: FakeNode, target: str
) -> None:
    node.driver.alter = _answers_image
    async with node.gated_handler(target) as (_, gate):
        await node.co.expand("vol-1", target, 96 * MIB)
        assert node.record(target).mount.capacity_bytes == 96 * MIB, "without a sandbox too"
        with node.sandbox(target):
            expansion = asyncio.create_task(node.co.expand("vol-1", target, 128 * MIB))
            await until(gate.entered)
            assert node.record(target).mount.capacity_bytes == 128 * MIB
            gate.opened.set()
            await expansion
