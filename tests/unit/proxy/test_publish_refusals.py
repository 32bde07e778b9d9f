"""Refused publishes: a typed error with reason and hint, the right code, and nothing half-done."""

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.core import volumes
from crust.host.block import users
from crust.host.mounts import mountinfo
from crust.wire.v1 import inspect_pb2
from tests.support.co import NAMED, capability, publish_request
from tests.support.drivers import fake_driver
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places
from tests.support.runtimes.fake_handler import ALL_FEATURES

Code = grpc.StatusCode
Feature = volumes.HandlerFeature


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
            Feature.GROUP,
            {},
            {"given": capability(volume_supplemental_group="7")},
            ("group 7 (fsGroup)", "does not offer GROUP"),
        ),
        (Feature.READ_ONLY, {}, {"readonly": True}, ("read-only", "does not offer READ_ONLY")),
        (
            Feature.IO_LIMITS,
            {"io_limits": volumes.IoLimits(1, 2, 3, 4)},
            {},
            ("does not offer IO_LIMITS",),
        ),
        (Feature.LUKS, {"passphrase": "p"}, {}, ("it is encrypted", "LUKS")),
        (
            Feature.FORMAT,  # nobody but a guest sees the inside of the container
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
    lacks: Feature | None,
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
        ("{kubelet}/a\0b", "control character"),
        ("{kubelet}/a\x1b[2J", "control character"),
        ("{kubelet}/a\nb", "control character"),
        ("{kubelet}/a\x9bb", "control character"),  # CSI of C1
    ],
)
async def test_invalid_target_path_is_refused(kata: FakeNode, path: str, words: str) -> None:
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


def _outside(node: FakeNode) -> str:
    """A target that is not below a root of the kubelet's."""
    os.mkdir(f"{node.places.root}/elsewhere")
    return f"{node.places.root}/elsewhere/mount"


def _behind_a_link(node: FakeNode) -> str:
    os.symlink(os.path.dirname(_outside(node)), f"{node.places.kubelet}/link")
    return f"{node.places.kubelet}/link/mount"


def _a_link(node: FakeNode) -> str:
    os.symlink(os.path.dirname(_outside(node)), node.places.target("one"))
    return node.places.target("one")


def _without_a_parent(node: FakeNode) -> str:
    return f"{node.places.kubelet}/pods/none/mount"


def _mounted(node: FakeNode) -> str:
    node.targets.foreign.add(node.places.target("one"))
    return node.places.target("one")


def _with_files(node: FakeNode) -> str:
    os.makedirs(f"{node.places.target('one')}/data")
    return node.places.target("one")


@pytest.mark.parametrize(
    ("prepare", "code", "words"),
    [
        (_outside, Code.PERMISSION_DENIED, ("{target}", "{kubelet}", "allowed roots")),
        (_behind_a_link, Code.PERMISSION_DENIED, ("symbolic link", "'link'")),
        (_a_link, Code.PERMISSION_DENIED, ("{target}", "symbolic link")),
        (_without_a_parent, Code.INTERNAL, ("{target}", "FileMissing")),
        (_mounted, Code.UNAVAILABLE, ("{target}", "/dev/sdb1", "unpublish")),
        (_with_files, Code.ALREADY_EXISTS, ("{target}",)),
    ],
)
async def test_publish_at_foreign_or_used_target_changes_nothing(
    kata: FakeNode, prepare: Callable[[FakeNode], str], code: Code, words: tuple[str, ...]
) -> None:
    target, root = prepare(kata), Path(kata.places.root)
    names = {"target": target, "kubelet": kata.places.kubelet}
    before = set(root.rglob("*"))
    publish = kata.co.publish("vol-1", target)
    await refused(publish, code, *(word.format(**names) for word in words))
    assert set(root.rglob("*")) == before
    assert kata.driver.called("NodePublishVolume") == []
    assert kata.entry(target) is None


@pytest.mark.spec("D-21")
async def test_publish_of_device_mounted_on_host_is_refused(kata: FakeNode, target: str) -> None:
    kata.targets.mounted_devices["/dev/fake-vol-1"] = False
    words = ("/dev/fake-vol-1", "mounted at /mnt", "unmount it")
    await refused(kata.co.publish("vol-1", target), Code.FAILED_PRECONDITION, *words)
    kata.check_untouched(target)


def test_busy_device_names_few_own_mount_points_alone() -> None:
    def mount(target: str) -> mountinfo.Mount:
        return mountinfo.Mount(1, 1, 8, 1, "/", target, ("rw",), "ext4", "/dev/sda1", ("rw",))

    own = [("self", mount(f"/a{number}\n\x1b")) for number in range(10)]
    others = [(str(pid), mount(f"/tenant/{pid}")) for pid in (50, 51)]
    text = str(users.mounted_on_host("/dev/sda", [("1", mount("/host")), *own, *others]))
    shown = r"mounted at a path of 2 other mount namespaces \(see /proc/\*/mountinfo\), /a0\\n\\x1b, .* and 7 more;"
    assert re.search(shown, text)
    assert "tenant" not in text


@pytest.mark.parametrize("is_retry", [False, True])
async def test_host_mount_by_another_volume_id_is_refused(
    kata: FakeNode, *, is_retry: bool
) -> None:
    """Two PersistentVolumes of one disk. What stood before the call is not undone by it."""
    deferred, host = kata.places.target("deferred"), kata.places.target("host")
    device = fake_driver.device_of("vol-1")
    await kata.co.publish("vol-1", deferred)
    if is_retry:
        kata.targets.host_mounts[host] = device
    kata.driver.after["NodePublishVolume"] = lambda: kata.targets.host_mounts.update({host: device})
    code = Code.UNAVAILABLE if is_retry else Code.FAILED_PRECONDITION
    await refused(kata.co.publish("vol-2", host, defer=False), code, "DeviceReserved")
    assert (host in kata.driver.published) == is_retry
    kata.check_published("vol-1", deferred)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("volume_id", "", "volume_id"),
        ("volume_id", "v" * 513, "volume_id"),
        ("volume_id", "vol\x01", "volume_id"),
        ("volume_capability", None, "access_type is missing"),
    ],
)
async def test_publish_with_an_invalid_field_is_refused(
    kata: FakeNode, target: str, field: Any, value: str | None, words: str
) -> None:
    request = publish_request("vol-1", target)
    request.ClearField(field)
    if value is not None:
        setattr(request, field, value)
    publish = kata.co.node.NodePublishVolume(request, timeout=10)
    await refused(publish, Code.INVALID_ARGUMENT, words)
    assert kata.driver.called("NodePublishVolume") == []
    kata.check_untouched(target)


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
