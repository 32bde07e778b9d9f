"""Filesystems that the proxy makes, on loop devices and by the real programs; and what a killed proxy leaves."""

import asyncio
import fcntl
import hashlib
import os
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from crust.core import volumes
from crust.core.volumes import HandlerFeature
from crust.host.block import devices, loop, signatures
from crust.host.files.locks import ToolLocks
from crust.host.filesystems import superblocks
from crust.host.mounts import growth, mount_api
from crust.host.process import commands
from crust.proxy.filesystems import Filesystems
from tests.integration.conftest import MakeDevice
from tests.support.co import capability
from tests.support.drivers.fake_driver import MIB
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode, node_on
from tests.support.nodes.places import Places
from tests.support.probes import probed
from tests.support.raised import raised
from tests.support.records import zfs_bytes
from tests.support.runtimes.fake_handler import ALL_FEATURES

pytestmark = pytest.mark.root
Code = grpc.StatusCode
KEY = volumes.VolumeKey(volumes.DriverName("csi.example.com"), volumes.VolumeId("vol-1"))
FILESYSTEMS = ("ext4", "xfs", "btrfs")
SIZE = 304 * MIB
FEATURES = ALL_FEATURES - {HandlerFeature.FORMAT, HandlerFeature.GROW}
F_OFD_SETLKW = 38  # fcntl(2)
CHANGING = {"NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"}


@pytest.fixture
def device(device: MakeDevice) -> loop.LoopDevice:
    """A blank one."""
    return device(size_bytes=SIZE)


@pytest.fixture
def filesystems(places: Places) -> Filesystems:
    os.makedirs(places.run)
    return Filesystems(ToolLocks(Path(places.run, "tools.lock")))


@pytest.fixture
async def node(
    places: Places, device: loop.LoopDevice, filesystems: Filesystems
) -> AsyncIterator[FakeNode]:
    """A node whose driver has one volume that was created empty, and whose handler offers no FORMAT and no GROW."""
    async with (
        node_on(device.path, places, filesystems=filesystems) as running,
        running.handler(features=FEATURES, filesystems=frozenset(FILESYSTEMS)),
    ):
        running.driver.format = volumes.GuestFormat(ext4_reserved_percent=1)
        yield running


@contextmanager
def mounted(device: str, fs_type: str, directory: str) -> Iterator[Path]:
    """The filesystem, as the sandbox has it."""
    os.makedirs(directory, exist_ok=True)
    mount_api.mount_device(device, directory, fs_type)
    try:
        yield Path(directory)
    finally:
        mount_api.unmount(directory)


def digest(device: str) -> str:
    with open(device, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def make(filesystems: Filesystems, device: str, fs_type: str = "ext4") -> None:
    """As a publish does for a handler without FORMAT."""
    source = volumes.BlockSource(device, devices.identify(device))
    mount = volumes.DeferredMount(source, fs_type)
    await filesystems.make_if_blank(KEY, source, mount, volumes.GuestFormat(), "")


@pytest.mark.spec("D-38")
@pytest.mark.parametrize("fs_type", FILESYSTEMS)
async def test_blank_volume_is_formatted_once_and_its_files_stay(
    node: FakeNode, device: loop.LoopDevice, fs_type: str
) -> None:
    for pod in ("one", "two", "three"):
        target = node.places.target(pod)
        await node.co.publish("vol-1", target, capability(fs_type))
        assert node.record(target).mount.format is None
        with mounted(device.path, fs_type, f"{node.places.root}/guest") as volume:
            (volume / pod).write_text(pod)
        await node.co.publish("vol-1", target, capability(fs_type))
        await node.co.unpublish("vol-1", target)
        node.check_untouched(target)
    with mounted(device.path, fs_type, f"{node.places.root}/guest") as volume:
        assert {"one", "two", "three"} <= set(os.listdir(volume))


@pytest.mark.spec("D-38")
@pytest.mark.parametrize("fs_type", ["ext4", "xfs"])
async def test_filesystem_with_another_formats_bytes_is_published_again(
    node: FakeNode, device: loop.LoopDevice, fs_type: str
) -> None:
    """A pod kept a disk image on it (util-linux #4031): the next publish was refused for ever."""
    target = node.places.target("one")
    await node.co.publish("vol-1", target, capability(fs_type))
    await node.co.unpublish("vol-1", target)
    zfs_bytes.write(device.path)
    assert probed(device.path) == signatures.Ambiguous()
    before = digest(device.path)
    await node.co.publish("vol-1", target, capability(fs_type))
    assert digest(device.path) == before


GROWN = {"crust.dev/grow-in": "host"}


@pytest.mark.spec("D-26")
@pytest.mark.parametrize("fs_type", FILESYSTEMS)
async def test_expanded_volume_grows_at_next_publish_and_stays_usable(
    node: FakeNode, device: loop.LoopDevice, fs_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If its class consents; ext4 keeps its size without CAP_SYS_RESOURCE."""
    target = node.places.target("one")
    await node.co.publish("vol-1", target, capability(fs_type), volume_context=GROWN)
    with mounted(device.path, fs_type, f"{node.places.root}/guest") as volume:
        (volume / "file").write_text("kept")
    await node.co.unpublish("vol-1", target)
    os.truncate(device.backing, 400 * MIB)
    loop.refresh_size(device)
    await node.co.publish("vol-1", target, capability(fs_type), volume_context=GROWN)
    grown = superblocks.read(device.path, fs_type).size_bytes
    assert (grown < 396 * MIB) is bool(growth.obstacle(fs_type))
    assert ("keeps its old size" in caplog.text) is bool(growth.obstacle(fs_type))
    with mounted(device.path, fs_type, f"{node.places.root}/guest") as volume:
        assert (volume / "file").read_text() == "kept"


async def test_options_of_the_storage_class_reach_mkfs(
    node: FakeNode, device: loop.LoopDevice
) -> None:
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    await node.co.unpublish("vol-1", target)
    shown = await commands.run_command(["dumpe2fs", "-h", device.path], timeout_s=60)
    lines = dict(line.split(b":", 1) for line in shown.stdout.splitlines() if b":" in line)
    blocks, reserved = int(lines[b"Block count"]), int(lines[b"Reserved block count"])
    assert reserved == blocks // 100


def _xfs(device: str) -> None:
    subprocess.run(["mkfs.xfs", "-q", device], check=True)


def _unfinished_xfs(device: str) -> None:
    _xfs(device)
    with open(device, "r+b") as file:
        file.seek(126)
        file.write(b"\1")


def _luks(device: str) -> None:
    with open(device, "r+b") as file:
        file.write(b"LUKS\xba\xbe\x00\x02")


def _data(device: str) -> None:
    with open(device, "r+b") as file:
        file.seek(MIB - 512)
        file.write(b"somebody's")


@pytest.mark.spec("H-47")
@pytest.mark.parametrize(
    ("fill", "fs_type", "error"),
    [
        (_xfs, "ext4", "FormattedDifferently"),
        (_unfinished_xfs, "xfs", "ContentInDoubt"),
        (_luks, "ext4", "ContentInDoubt"),
        (_data, "ext4", "ContentInDoubt"),
    ],
)
async def test_content_of_another_kind_is_refused_and_stays(
    node: FakeNode, device: loop.LoopDevice, fill: Callable[[str], None], fs_type: str, error: str
) -> None:
    fill(device.path)
    before, target = digest(device.path), node.places.target("one")
    with pytest.raises(grpc.aio.AioRpcError, match=error):
        await node.co.publish("vol-1", target, capability(fs_type))
    node.check_untouched(target)
    assert digest(device.path) == before


@contextmanager
def _opened(device: str, flags: int) -> Iterator[int]:
    """A process that has the device open."""
    program = (
        f"import os, sys; os.open({device!r}, {flags}); print(1, flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", program]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate()


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
async def test_device_that_a_process_has_open_is_not_formatted(
    node: FakeNode, device: loop.LoopDevice, flags: int
) -> None:
    target = node.places.target("one")
    with _opened(device.path, flags) as pid:
        refusal = node.co.publish("vol-1", target)
        await refused(refusal, Code.FAILED_PRECONDITION, "DeviceInUse", f"[{pid}]")
    assert devices.is_blank(device.path)
    node.check_untouched(target)


CHILD = """
import asyncio, os, signal, sys
from pathlib import Path
from crust.host.block import devices, users
from crust.host.filesystems import mkfs
from crust.host.files.locks import ToolLocks
from crust.host.process import commands
from crust.proxy import filesystems
from tests.integration.proxy import test_filesystems as here

run, device, fs_type, path, step = sys.argv[1:]
commands._ENVIRONMENT["PATH"] = path

def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def after(function):
    async def call(*arguments, **options):
        await function(*arguments, **options)
        killed()
    return call

match step:
    case "the lock": ToolLocks.taking = killed
    case "the open": devices.open_shared = killed
    case "the look": filesystems._judge = killed
    case "the search": users.check = killed
    case "mkfs": mkfs.make = killed
    case "after mkfs": mkfs.make = after(mkfs.make)
asyncio.run(here.make(filesystems.Filesystems(ToolLocks(Path(run, "tools.lock"))), device, fs_type))
"""


def _child(
    places: Places, device: str, *, fs_type: str = "ext4", path: str = "", step: str = ""
) -> "subprocess.Popen[bytes]":
    """A process that makes the filesystem as the proxy does, and is killed before a step."""
    path = path or commands._ENVIRONMENT["PATH"]
    argv = [sys.executable, "-c", CHILD, places.run, device, fs_type, path, step]
    return subprocess.Popen(argv)


@pytest.mark.parametrize(
    "step", ["the lock", "the open", "the look", "the search", "mkfs", "after mkfs"]
)
async def test_proxy_killed_at_step_leaves_volume_that_is_formatted_once(
    places: Places, device: loop.LoopDevice, filesystems: Filesystems, step: str
) -> None:
    child = _child(places, device.path, step=step)
    assert await asyncio.to_thread(child.wait) == -signal.SIGKILL
    filesystems.locks.check_free(str(KEY))
    left = probed(device.path)
    assert isinstance(left, signatures.Filesystem) is (step == "after mkfs")
    await make(filesystems, device.path)
    made = probed(device.path)
    assert isinstance(made, signatures.Filesystem)
    assert made.type == "ext4"
    assert left in (made, signatures.Blank())


@pytest.fixture
def waiting_tool(tmp_path: Path) -> Iterator[Callable[[str], tuple[str, Path, Path]]]:
    """Makes an mkfs wait before it does anything: the PATH for it, a fifo that tells of it, one that lets it go."""
    started, go = tmp_path / "started", tmp_path / "go"
    pid = tmp_path / "pid"

    def make_waiting(program: str) -> tuple[str, Path, Path]:
        path = commands._ENVIRONMENT["PATH"]
        for fifo in (started, go):
            os.mkfifo(fifo)
        lines = (
            *("#!/bin/sh", f"PATH={path}", f'[ "$1" != -V ] || exec {program} -V'),
            *(f"echo $$ > {pid}", f"echo > {started}"),
            *(f"read line < {go}", f'exec {program} "$@"', ""),
        )
        (tmp_path / program).write_text("\n".join(lines))
        (tmp_path / program).chmod(0o700)
        return f"{tmp_path}:{path}", started, go

    yield make_waiting
    with suppress(FileNotFoundError, ProcessLookupError):  # of a failed test
        os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.spec("D-23")
@pytest.mark.parametrize("fs_type", FILESYSTEMS)
async def test_mkfs_of_killed_proxy_blocks_volume_until_it_ends(
    node: FakeNode,
    device: loop.LoopDevice,
    waiting_tool: Callable[[str], tuple[str, Path, Path]],
    fs_type: str,
) -> None:
    """It has not opened the device by itself yet: nothing but the lock says that it will."""
    target, wanted = node.places.target("one"), capability(fs_type)
    path, started, go = waiting_tool(f"mkfs.{fs_type}")
    child = _child(node.places, device.path, fs_type=fs_type, path=path)
    await asyncio.to_thread(started.read_text)
    child.kill()
    await asyncio.to_thread(child.wait)

    for call in (
        node.co.publish("vol-1", target, wanted),
        node.co.publish("vol-1", target, wanted, defer=False),
        node.co.unpublish("vol-1", target),
        node.co.unstage("vol-1", f"{node.places.kubelet}/staging"),
    ):
        await refused(call, Code.UNAVAILABLE, "VolumeInUseByTool")
    assert not {call.method for call in node.driver.calls} & CHANGING
    assert devices.is_blank(device.path)

    await asyncio.to_thread(go.write_text, "\n")
    await asyncio.to_thread(_until_no_tool_runs, node.places)
    made = probed(device.path)
    assert isinstance(made, signatures.Filesystem)
    assert made.type == fs_type
    await node.co.publish("vol-1", target, wanted)
    assert probed(device.path) == made
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)


def _until_no_tool_runs(places: Places) -> None:
    """Wait for the lock of every volume, as the kernel grants it."""
    whole = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with open(f"{places.run}/tools.lock", "r+b") as file:
        fcntl.fcntl(file, F_OFD_SETLKW, whole)


async def test_filesystem_that_the_guests_kernel_cannot_mount_is_not_made(
    device: loop.LoopDevice, filesystems: Filesystems
) -> None:
    """One that exists is kept: another kernel made it, whose features are not known here."""
    source = volumes.BlockSource(device.path, devices.identify(device.path))
    mount = volumes.DeferredMount(source, "xfs")
    with raised("GuestKernelTooOld", match="5.4.0"):
        await filesystems.make_if_blank(KEY, source, mount, volumes.GuestFormat(), "5.4.0")
    assert devices.is_blank(device.path)
    for kernel in ("5.10", "5.4.0"):
        await filesystems.make_if_blank(KEY, source, mount, volumes.GuestFormat(), kernel)
    assert isinstance(probed(device.path), signatures.Filesystem)


async def test_device_that_is_another_one_now_is_not_formatted(
    device: loop.LoopDevice, filesystems: Filesystems
) -> None:
    identity = devices.identify(device.path)
    other = volumes.DeviceIdentity(identity.major, identity.minor, identity.disk_sequence + 1)
    source = volumes.BlockSource(device.path, other)
    mount = volumes.DeferredMount(source, "ext4")
    with raised("DeviceNotAsReported"):
        await filesystems.make_if_blank(KEY, source, mount, volumes.GuestFormat(), "")
    assert devices.is_blank(device.path)
