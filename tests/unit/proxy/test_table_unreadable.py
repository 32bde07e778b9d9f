"""Entries that cannot be read: they block what may be theirs, and are never treated as absent."""

import json
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from crust.core import volumes
from crust.wire.v1 import inspect_pb2
from tests.support.co import NAMED
from tests.support.drivers import fake_driver
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places

Code = grpc.StatusCode


@pytest.mark.spec("H-41")
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", ["damaged", "newer"])
async def test_unreadable_entry_blocks_what_may_be_its(
    places: Places, kind: str, *, known: bool
) -> None:
    """A live sandbox may have it: nobody else gets the volume or its device, deferred or on the host.

    The proxy that published it remembers what it reserves; one that is started finds nothing in the record, or
    another kind of source than it knows.
    """
    one, two, three, four = (places.target(name) for name in ("one", "two", "three", "four"))
    async with AsyncExitStack() as lives:
        node = await lives.enter_async_context(FakeNode(places))
        await lives.enter_async_context(node.handler())
        await node.co.publish("vol-1", one)
        await node.co.publish("vol-4", four, volume_context=NAMED)
        entry = node.entry(one)
        assert entry is not None
        node.driver.identities["vol-3"] = fake_driver.identity_of(fake_driver.device_of("vol-1"))
        plain = json.loads(entry.require().to_bytes())
        plain["crust"] |= {"schema": 2, "identity": None, "nvme": {"nqn": "later"}}
        text = "{" if kind == "damaged" else json.dumps(plain)
        Path(entry.directory, "mountInfo.json").write_text(text)
        await node.inspect.ListDeferredVolumes(inspect_pb2.ListDeferredVolumesRequest(), timeout=10)
        if not known:
            await lives.aclose()
            node = await lives.enter_async_context(FakeNode(places, driver=node.driver))
            await lives.enter_async_context(node.handler())
        refusals: list[Awaitable[object]] = [
            node.co.unstage("vol-1", f"{places.kubelet}/staging"),
            node.co.publish("vol-1", two, volume_context=NAMED),
            node.co.publish("vol-1", two, defer=False),
            node.co.publish("vol-3", two, volume_context=NAMED),
            node.co.expand("vol-1", f"{places.kubelet}/staging", 1),
        ]
        for refusal in refusals:
            await refused(refusal, Code.FAILED_PRECONDITION, "cannot be read", entry.directory)
        assert node.driver.called("NodeUnstageVolume") == []
        await node.co.publish("vol-4", four, volume_context=NAMED)
        other = node.co.publish("vol-2", three, volume_context=NAMED)
        if not known:
            words = "whose it is" if kind == "damaged" else "which device it has"
            await refused(other, Code.FAILED_PRECONDITION, f"does not say {words}")
            return
        await other
        await node.co.unstage("vol-5", f"{places.kubelet}/staging")


def _not_json(path: str) -> None:
    Path(path).write_text("{ this is not JSON")


def _newer(path: str) -> None:
    content = json.loads(Path(path).read_text())
    content["crust"]["schema"] = 99
    Path(path).write_text(json.dumps(content))


def _foreign(path: str) -> None:
    os.chmod(path, 0o666)


SPOILERS = [
    (_not_json, Code.DATA_LOSS, "cannot be read"),
    (_newer, Code.DATA_LOSS, "schema is 99"),
    (_foreign, Code.PERMISSION_DENIED, "not trusted"),
]


@pytest.mark.spec("H-41")
async def test_unpublish_of_later_layout_undoes_what_is_there(places: Places, target: str) -> None:
    """The envelope says whose it is, and which device: nobody may write to it, as for every unpublish."""
    async with FakeNode(places) as node, node.handler():
        await node.co.publish("vol-1", target)
        device = node.record(target).block
        _newer(f"{places.volumes}/{volumes.TargetPath(target).digest}/mountInfo.json")
        await node.restart("proxy", "calls")
        number = os.makedev(device.identity.major, device.identity.minor)
        node.devices.numbers[number] = device
        node.targets.written.add(device.path)
        await refused(
            node.co.unpublish("vol-1", target), Code.FAILED_PRECONDITION, "in use", "qemu"
        )
        assert node.places.entries() != []
        node.targets.written.clear()
        await refused(node.co.unpublish("vol-2", target), Code.NOT_FOUND, "vol-1")
        await node.co.unpublish("vol-1", target)
        node.check_untouched(target)


@pytest.mark.parametrize(
    ("spoil", "code", "words", "call"),
    [
        (*spoiler, call)
        for spoiler in SPOILERS
        for call in ("publish", "host publish", "unpublish", "stats", "expand")
        if (spoiler[0], call) != (_newer, "unpublish")
    ],
)
async def test_unreadable_record_is_never_treated_as_absent(
    places: Places, target: str, spoil: Callable[[str], None], code: Code, words: str, call: str
) -> None:
    """Every call for the target returns the reason, and the file is kept."""
    digest = volumes.TargetPath(target).digest
    path = f"{places.volumes}/{digest}/mountInfo.json"
    async with FakeNode(places) as node, node.handler():
        await node.co.publish("vol-1", target)
    spoil(path)
    before = Path(path).read_bytes()
    async with FakeNode(places) as node, node.handler():
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "publish": lambda: node.co.publish("vol-1", target),
            "host publish": lambda: node.co.publish("vol-1", target, defer=False),
            "unpublish": lambda: node.co.unpublish("vol-1", target),
            "stats": lambda: node.co.stats("vol-1", target),
            "expand": lambda: node.co.expand("vol-1", target, 1),
        }
        is_publish = "publish" in call and call != "unpublish"  # never final: an entry exists
        await refused(calls[call](), Code.UNAVAILABLE if is_publish else code, digest, words)
        assert node.driver.calls == []
        other = node.co.publish("vol-2", node.places.target("two"))
        if spoil is _newer:  # of any version the record says what it reserves
            await other
        else:
            await refused(other, Code.FAILED_PRECONDITION, "does not say whose")
    assert Path(path).read_bytes() == before
