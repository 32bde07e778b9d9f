"""Refused publishes: a typed error with reason and hint, the right code, and nothing half-done."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.core import volumes
from crust.proxy.handlers import Feature
from crust.runtime_handler import registration
from crust.wire.v1 import inspect_pb2
from tests.support.co import capability, publish_request
from tests.support.drivers import fake_driver
from tests.support.faults.refusals import refused
from tests.support.nodes import node as nodes
from tests.support.nodes.node import NAMED, Node, Places
from tests.unit.proxy.csi.test_unpublish import unstage

Code = grpc.StatusCode


async def never_reached_the_driver(node: Node, target: str) -> None:
    assert node.driver.called("NodePublishVolume") == []
    node.check_untouched(target)


@pytest.mark.spec("D-20")
async def test_no_handler_at_all(node: Node, target: str) -> None:
    await refused(
        node.co.publish("vol-1", target),
        Code.FAILED_PRECONDITION,
        "cannot be deferred",
        "none is registered",
        "start the handler",
    )
    await never_reached_the_driver(node, target)


async def test_another_handler_than_the_one_that_is_named(kata: Node, target: str) -> None:
    context = {"crust.dev/defer": "always", "crust.dev/runtime-handler": "gvisor"}
    await refused(
        kata.co.publish("vol-1", target, volume_context=context),
        Code.FAILED_PRECONDITION,
        "'gvisor'",
        "registered are: kata",
        "crust.dev/runtime-handler",
    )
    await never_reached_the_driver(kata, target)


async def test_unnamed_handler_is_refused_if_two_are_registered(kata: Node, target: str) -> None:
    async with kata.handler(name="other", endpoint=f"{kata.places.root}/other.sock"):
        await refused(
            kata.co.publish("vol-1", target),
            Code.FAILED_PRECONDITION,
            "kata, other",
            "crust.dev/runtime-handler",
        )
    await never_reached_the_driver(kata, target)


GROUP = {"fs_type": "ext4", "volume_supplemental_group": "7"}


@pytest.mark.parametrize(
    ("lacks", "mount", "readonly", "words"),
    [
        (None, {"fs_type": "btrfs"}, False, ("'btrfs'", "ext4, xfs")),
        (Feature.GROUP, GROUP, False, ("group 7 (fsGroup)", "does not offer GROUP")),
        (Feature.READ_ONLY, {"fs_type": "ext4"}, True, ("read-only", "does not offer READ_ONLY")),
    ],
)
@pytest.mark.spec("D-20")
async def test_publish_is_refused_if_the_handler_lacks_a_feature(
    node: Node,
    target: str,
    lacks: Feature | None,
    mount: dict[str, Any],
    readonly: object,
    words: tuple[str, ...],
) -> None:
    features = frozenset(
        each for each in registration.Feature if lacks is None or each.value != lacks.value
    )
    async with node.handler(features=features):
        await refused(
            node.co.publish("vol-1", target, capability(**mount), readonly=bool(readonly)),
            Code.FAILED_PRECONDITION,
            "'kata'",
            *words,
        )
    await never_reached_the_driver(node, target)


@pytest.mark.spec("D-20")
async def test_publish_beyond_the_limit_of_a_sandbox_is_refused(node: Node) -> None:
    """A kubelet publishes all volumes of a pod at once; without a limit its container fails to start, much later."""

    def target(pod: str, volume: str) -> str:
        directory = f"{node.places.kubelet}/pods/{pod}/volumes/kubernetes.io~csi/{volume}"
        os.makedirs(directory, exist_ok=True)
        return f"{directory}/mount"

    async with node.handler(max_volumes=2):
        calls = (node.co.publish(f"vol-{n}", target("one", f"vol-{n}")) for n in range(4))
        done = await asyncio.gather(*calls, return_exceptions=True)
        refusals = [each for each in done if isinstance(each, grpc.aio.AioRpcError)]
        assert [each.code() for each in refusals] == [Code.FAILED_PRECONDITION] * 2
        assert all("at most 2 volumes" in str(each.details()) for each in refusals)
        assert len(node.driver.called("NodePublishVolume")) == 2
        await node.co.publish("vol-9", target("two", "vol-9"))
        published = [n for n in range(4) if not isinstance(done[n], grpc.aio.AioRpcError)]
        existing = f"vol-{published[0]}"
        await node.co.publish(existing, target("one", existing))
        await node.co.unpublish(existing, target("one", existing))
        await node.co.publish("vol-8", target("one", "vol-8"))


async def test_publish_at_a_path_that_is_too_long_for_the_runtime_is_refused(node: Node) -> None:
    """Kata's directory has names of 255 bytes, made of the path: without a limit the container would not start."""
    longest, longer = node.places.target("a"), node.places.target("aa")
    async with node.handler(max_path_bytes=len(longest.encode())):
        call = node.co.publish("vol-1", longer)
        await refused(call, Code.FAILED_PRECONDITION, "[PathTooLongForHandler]")
        node.check_untouched(longer)
        await node.co.publish("vol-1", longest)


async def test_unsupported_filesystem_of_the_answer_is_refused(node: Node, target: str) -> None:
    """The CO left fs_type empty, so only the driver's answer names the filesystem; then everything is undone."""
    async with node.handler(filesystems=frozenset({"xfs"})):
        call = node.co.publish("vol-1", target, capability(mount_flags=["noatime"]))
        await refused(call, Code.FAILED_PRECONDITION, "'ext4'", "supports: xfs")
    node.check_untouched(target)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "empty"),
        ("pods/one/mount", "relative"),
        ("{kubelet}/../etc/mount", "'..'"),
        ("{kubelet}/./mount", "'.'"),
        ("{kubelet}//mount", "empty component"),
        ("{kubelet}/mount/", "trailing slash"),
        ("{kubelet}/" + "n" * 256, "longer than 255 bytes"),
        ("{kubelet}/" + "name/" * 900 + "mount", "longer than 4095 bytes"),
        ("{kubelet}/a\0b", "NUL"),
    ],
)
async def test_invalid_target_path_is_refused(kata: Node, path: str, words: str) -> None:
    target = path.replace("{kubelet}", kata.places.kubelet)
    await refused(
        kata.co.publish("vol-1", target),
        Code.INVALID_ARGUMENT,
        "target_path",
        words,
        "absolute, normalised path",
    )
    assert kata.driver.called("NodePublishVolume") == []
    assert kata.places.entries() == []


@pytest.mark.parametrize("known", [True, False])
async def test_unreadable_entry_blocks_what_may_be_its(places: Places, *, known: bool) -> None:
    """A live sandbox may have it: nobody else gets the volume or its device, deferred or on the host.

    The proxy that published it remembers what it reserves; one that is started finds nothing in the record.
    """
    one, two, three = (places.target(name) for name in ("one", "two", "three"))
    async with AsyncExitStack() as lives:
        node = await lives.enter_async_context(nodes.running(places))
        await lives.enter_async_context(node.handler())
        await node.co.publish("vol-1", one)
        entry = node.entry(one)
        assert entry is not None
        node.driver.identities["vol-3"] = fake_driver.identity_of(fake_driver.device_of("vol-1"))
        Path(entry.directory, "mountInfo.json").write_text("{")
        await node.inspect.ListDeferredVolumes(inspect_pb2.ListDeferredVolumesRequest(), timeout=10)
        if not known:
            await lives.aclose()
            node = await lives.enter_async_context(nodes.running(places, driver=node.driver))
            await lives.enter_async_context(node.handler())
        refusals: list[Awaitable[object]] = [
            node.co.node.NodeUnstageVolume(unstage(node, "vol-1"), timeout=10),
            node.co.publish("vol-1", two, volume_context=NAMED),
            node.co.publish("vol-1", two, defer=False),
            node.co.publish("vol-3", two, volume_context=NAMED),
            node.co.expand("vol-1", f"{places.kubelet}/staging", 1),
        ]
        for refusal in refusals:
            await refused(refusal, Code.FAILED_PRECONDITION, "cannot be read", entry.directory)
        assert node.driver.called("NodeUnstageVolume") == []
        other = node.co.publish("vol-2", three, volume_context=NAMED)
        if not known:
            await refused(other, Code.FAILED_PRECONDITION, "does not say whose it is")
            return
        await other
        await node.co.node.NodeUnstageVolume(unstage(node, "vol-4"), timeout=10)


async def test_a_target_outside_the_kubelets_root(kata: Node) -> None:
    target = f"{kata.places.root}/elsewhere/mount"
    await refused(
        kata.co.publish("vol-1", target),
        Code.PERMISSION_DENIED,
        target,
        kata.places.kubelet,
        "allowed roots",
    )
    await never_reached_the_driver(kata, target)


async def test_a_target_behind_a_symbolic_link(kata: Node) -> None:
    os.mkdir(f"{kata.places.root}/elsewhere")
    os.symlink(f"{kata.places.root}/elsewhere", f"{kata.places.kubelet}/link")
    target = f"{kata.places.kubelet}/link/mount"
    await refused(
        kata.co.publish("vol-1", target), Code.PERMISSION_DENIED, "symbolic link", "'link'"
    )
    assert os.listdir(f"{kata.places.root}/elsewhere") == []
    await never_reached_the_driver(kata, target)


async def test_a_target_that_is_a_symbolic_link_itself(kata: Node, target: str) -> None:
    os.mkdir(f"{kata.places.root}/elsewhere")
    os.symlink(f"{kata.places.root}/elsewhere", target)
    await refused(kata.co.publish("vol-1", target), Code.PERMISSION_DENIED, target, "symbolic link")
    assert os.listdir(f"{kata.places.root}/elsewhere") == []
    assert os.path.islink(target)
    assert kata.entry(target) is None
    assert kata.driver.published == {}


async def test_a_target_whose_parent_is_missing(kata: Node) -> None:
    target = f"{kata.places.kubelet}/pods/none/mount"
    await refused(kata.co.publish("vol-1", target), Code.INTERNAL, target, "FileMissing")
    await never_reached_the_driver(kata, target)


async def test_a_target_on_which_something_else_is_mounted(kata: Node, target: str) -> None:
    kata.targets.foreign.add(target)
    await refused(
        kata.co.publish("vol-1", target), Code.UNAVAILABLE, target, "/dev/sdb1", "unpublish"
    )
    await never_reached_the_driver(kata, target)


async def test_a_target_directory_that_holds_somebodys_files(kata: Node, target: str) -> None:
    os.makedirs(f"{target}/data")
    await refused(kata.co.publish("vol-1", target), Code.ALREADY_EXISTS, target)
    assert os.listdir(target) == ["data"]
    assert kata.entry(target) is None
    assert kata.driver.published == {}


@pytest.mark.spec("D-21")
async def test_a_device_that_the_host_has_mounted(kata: Node, target: str) -> None:
    kata.targets.mounted_devices["/dev/fake-vol-1"] = False
    await refused(
        kata.co.publish("vol-1", target),
        Code.FAILED_PRECONDITION,
        "/dev/fake-vol-1",
        "mounted at /mnt",
        "unmount it",
    )
    kata.check_untouched(target)


@pytest.mark.parametrize("is_retry", [False, True])
async def test_host_mount_by_another_volume_id_is_refused(kata: Node, *, is_retry: bool) -> None:
    """Two PersistentVolumes of one disk. What stood before the call is not undone by it."""
    deferred, host = kata.places.target("deferred"), kata.places.target("host")
    device = fake_driver.device_of("vol-1")
    await kata.co.publish("vol-1", deferred)
    if is_retry:
        kata.targets.host_mounts[host] = device
    kata.driver.after_publish = lambda: kata.targets.host_mounts.update({host: device})
    code = Code.UNAVAILABLE if is_retry else Code.FAILED_PRECONDITION
    await refused(kata.co.publish("vol-2", host, defer=False), code, "DeviceReserved")
    assert (host in kata.driver.published) == is_retry
    kata.check_published("vol-1", deferred)


@pytest.mark.parametrize("volume_id", ["", "v" * 513, "vol\n1"])
async def test_invalid_volume_id_is_refused(kata: Node, target: str, volume_id: str) -> None:
    if volume_id == "vol\n1":
        volume_id = "vol\x01"
    await refused(kata.co.publish(volume_id, target), Code.INVALID_ARGUMENT, "volume_id")
    await never_reached_the_driver(kata, target)


async def test_a_publish_without_a_capability(kata: Node, target: str) -> None:
    request = publish_request("vol-1", target)
    request.ClearField("volume_capability")
    await refused(
        kata.co.node.NodePublishVolume(request, timeout=10),
        Code.INVALID_ARGUMENT,
        "access_type is missing",
    )
    await never_reached_the_driver(kata, target)


def _not_json(path: str) -> None:
    _write(path, b"{ this is not JSON")


def _newer(path: str) -> None:
    with open(path, "rb") as file:
        content = json.load(file)
    content["crust"]["schema"] = 99
    _write(path, json.dumps(content).encode())


def _foreign(path: str) -> None:
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        os.chmod(path, 0o666)


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


SPOILERS = [
    (_not_json, Code.DATA_LOSS, "cannot be read"),
    (_newer, Code.DATA_LOSS, "schema is 99"),
    (_foreign, Code.PERMISSION_DENIED, "not trusted"),
]


@pytest.mark.parametrize(("spoil", "code", "words"), SPOILERS)
@pytest.mark.parametrize("call", ["publish", "host publish", "unpublish", "stats", "expand"])
async def test_unreadable_record_is_never_treated_as_absent(
    places: Places, target: str, spoil: Callable[[str], None], code: Code, words: str, call: str
) -> None:
    """Every call for the target returns the reason, and the file is kept."""
    digest = volumes.TargetPath(target).digest
    path = f"{places.volumes}/{digest}/mountInfo.json"
    async with nodes.running(places) as node, node.handler():
        await node.co.publish("vol-1", target)
    spoil(path)
    with open(path, "rb") as file:
        before = file.read()
    async with nodes.running(places) as node, node.handler():
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
        other = node.places.target("two")
        if spoil is _newer:  # of any version the record says what it reserves
            await node.co.publish("vol-2", other)
            node.check_published("vol-2", other)
        else:
            await refused(
                node.co.publish("vol-2", other), Code.FAILED_PRECONDITION, "does not say whose"
            )
    with open(path, "rb") as file:
        assert file.read() == before
