"""The choice of a handler for a publish, and what it must offer."""

import asyncio
import os
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.core import volumes
from tests.support.co import NAMED, capability
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places
from tests.support.runtimes.fake_handler import ALL_FEATURES

Code = grpc.StatusCode
HandlerFeature = volumes.HandlerFeature


@pytest.mark.spec("D-20")
async def test_publish_without_any_handler_is_refused(node: FakeNode, target: str) -> None:
    words = ("cannot be deferred", "none is registered", "start the handler")
    await refused(node.co.publish("vol-1", target), Code.FAILED_PRECONDITION, *words)
    assert node.driver.called("NodePublishVolume") == []
    node.check_untouched(target)


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (
            {"crust.dev/runtime-handler": "gvisor"},
            ("[HandlerNotRegistered]", "'gvisor'", "registered are: kata"),
        ),
        ({}, ("[AmbiguousHandler]", "kata, other")),
    ],
    ids=["another", "not said"],
)
async def test_publish_for_no_handler_of_several_is_refused(
    kata: FakeNode, target: str, context: dict[str, str], words: tuple[str, ...]
) -> None:
    async with kata.handler(name="other", endpoint=f"{kata.places.root}/other.sock"):
        publish = kata.co.publish("vol-1", target, volume_context=context)
        await refused(publish, Code.FAILED_PRECONDITION, *words, "crust.dev/runtime-handler")
    assert kata.driver.called("NodePublishVolume") == []
    kata.check_untouched(target)


@pytest.mark.parametrize(
    ("lacks", "answers", "wanted", "words"),
    [
        (None, {}, {"given": capability("btrfs")}, ("'btrfs'", "ext4, xfs")),
        (
            HandlerFeature.GROUP,
            {},
            {"given": capability(volume_supplemental_group="7")},
            ("group 7 (fsGroup)", "does not offer GROUP"),
        ),
        (
            HandlerFeature.READ_ONLY,
            {},
            {"readonly": True},
            ("read-only", "does not offer READ_ONLY"),
        ),
        (
            HandlerFeature.IO_LIMITS,
            {"io_limits": volumes.IoLimits(1, 2, 3, 4)},
            {},
            ("does not offer IO_LIMITS",),
        ),
        (HandlerFeature.LUKS, {"passphrase": "p"}, {}, ("it is encrypted", "LUKS")),
        (
            HandlerFeature.FORMAT,  # nobody but a guest sees the inside of the container
            {"passphrase": "p", "format": volumes.GuestFormat()},
            {},
            ("may have to be made", "FORMAT"),
        ),
    ],
)
@pytest.mark.spec("D-20", "D-32", "D-38", "D-39")
async def test_publish_is_refused_if_the_handler_lacks_a_feature(
    node: FakeNode,
    target: str,
    lacks: HandlerFeature | None,
    answers: dict[str, Any],
    wanted: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    """A volume whose needs the driver's answer alone tells is unpublished again."""
    for name, answer in answers.items():
        setattr(node.driver, name, answer)
    async with node.handler(features=ALL_FEATURES - {lacks}):
        publish = node.co.publish("vol-1", target, **wanted)
        await refused(publish, Code.FAILED_PRECONDITION, "'kata'", *words)
    assert bool(node.driver.called("NodePublishVolume")) == bool(answers)
    node.check_untouched(target)


@pytest.mark.spec("D-20")
async def test_publish_beyond_the_limit_of_a_sandbox_is_refused(node: FakeNode) -> None:
    """A kubelet publishes all volumes of a pod at once; without a limit its container fails to start, much later."""

    def target(pod: str, volume: str) -> str:
        directory = f"{node.places.kubelet}/pods/{pod}/volumes/kubernetes.io~csi/{volume}"
        os.makedirs(directory, exist_ok=True)
        return f"{directory}/mount"

    async with node.handler(max_volumes=2):
        calls = (node.co.publish(f"vol-{n}", target("one", f"vol-{n}")) for n in range(4))
        done = await asyncio.gather(*calls, return_exceptions=True)
        refusals = [answer for answer in done if isinstance(answer, grpc.aio.AioRpcError)]
        assert [refusal.code() for refusal in refusals] == [Code.FAILED_PRECONDITION] * 2
        assert all("at most 2 volumes" in str(refusal.details()) for refusal in refusals)
        assert len(node.driver.called("NodePublishVolume")) == 2
        await node.co.publish("vol-9", target("two", "vol-9"))
        published = [n for n in range(4) if not isinstance(done[n], grpc.aio.AioRpcError)]
        existing = f"vol-{published[0]}"
        await node.co.publish(existing, target("one", existing))
        await node.co.unpublish(existing, target("one", existing))
        await node.co.publish("vol-8", target("one", "vol-8"))


async def test_publish_at_path_too_long_for_runtime_is_refused(node: FakeNode) -> None:
    """Kata's directory has names of 255 bytes, made of the path: without a limit the container would not start."""
    longest, longer = node.places.target("a"), node.places.target("aa")
    async with node.handler(max_path_bytes=len(longest.encode())):
        call = node.co.publish("vol-1", longer)
        await refused(call, Code.FAILED_PRECONDITION, "[PathTooLongForHandler]")
        node.check_untouched(longer)
        await node.co.publish("vol-1", longest)


async def test_unsupported_filesystem_of_the_answer_is_refused(node: FakeNode, target: str) -> None:
    """The CO left fs_type empty, so only the driver's answer names the filesystem; then everything is undone."""
    async with node.handler(filesystems=frozenset({"xfs"})):
        call = node.co.publish("vol-1", target, capability(mount_flags=["noatime"]))
        await refused(call, Code.FAILED_PRECONDITION, "'ext4'", "supports: xfs")
    node.check_untouched(target)


async def test_call_after_a_start_waits_for_its_handler(places: Places, target: str) -> None:
    async with FakeNode(places, grace_s=20) as node:
        publish = asyncio.create_task(
            node.co.publish("vol-1", target, timeout_s=20, volume_context=NAMED)
        )
        async with node.handler():
            await publish
            node.check_published("vol-1", target)


async def test_unnamed_publish_waits_for_all_handlers(places: Places, target: str) -> None:
    """gvisor is back, kata is still registering again: "the only one" is not to be believed yet."""
    async with (
        FakeNode(places, grace_s=20) as node,
        node.handler(name="gvisor", endpoint=f"{places.root}/g.sock"),
    ):
        publish = asyncio.create_task(node.co.publish("vol-1", target, timeout_s=20))
        async with node.handler(name="kata"):
            await refused(publish, Code.FAILED_PRECONDITION, "gvisor, kata")
        node.check_untouched(target)


async def test_unnamed_publish_after_the_grace_takes_the_only(places: Places, target: str) -> None:
    async with FakeNode(places, grace_s=0.3) as node, node.handler():
        await node.co.publish("vol-1", target)
        node.check_published("vol-1", target)
