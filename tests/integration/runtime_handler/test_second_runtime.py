"""The runtime without code of crust on real devices: who holds a claim, who is in a reader's way, guard mounts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from crust.core import volumes
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.host.block import devices, loop
from crust.host.mounts import mount_api
from crust.host.process import open_files
from examples import second_runtime
from examples.second_runtime import Refused

pytestmark = pytest.mark.root
NAME = volumes.HandlerName(second_runtime.NAME)
KEY = volumes.VolumeKey(volumes.DriverName("d.example"), volumes.VolumeId("one"))


@pytest.fixture
def kubelet(short_dir: Path) -> Path:
    """The directory of a target, `mount`, and of a sandbox's own mount, `inside`."""
    for name in ("mount", "inside"):
        (short_dir / name).mkdir()
    return short_dir


def _publish(
    store: Store, device: str, target: Path, *, readonly: bool = False, **record: Any
) -> Path:
    """The entry of a new record."""
    mount = volumes.DeferredMount(
        devices.source(device), "ext4", capacity_bytes=64 << 20, readonly=readonly
    )
    where = volumes.TargetPath.parse(str(target))
    store.write(Record.of(mount, KEY, where, NAME, **record))
    return Path(store.layout.entry(where).record).parent


@contextmanager
def _stopped(boxes: second_runtime.Boxes, box: str) -> Iterator[None]:
    try:
        yield
    finally:
        boxes.stop(box)


@pytest.mark.spec("H-24")
def test_claim_names_its_holder_and_keeps_its_time(
    store: Store, ext4_device: loop.LoopDevice, kubelet: Path
) -> None:
    entry = _publish(store, ext4_device.path, kubelet / "mount")
    boxes = second_runtime.Boxes(Path(store.root), str(kubelet / "inside"))
    boot, claims = boxes.boot, []

    def booted(record: dict[str, Any], fds: list[int]) -> "subprocess.Popen[str]":
        claims.append(json.loads((entry / "claim.json").read_text()))
        return boot(record, fds)

    boxes.boot = booted  # type: ignore[method-assign]
    assert boxes.start("box-1", str(kubelet / "mount")) == "ok"
    with _stopped(boxes, "box-1"):
        claims.append(json.loads((entry / "claim.json").read_text()))
        assert [claim["state"] for claim in claims] == ["claimed", "mounted"]
        assert claims[0]["claimed_at"] == claims[1]["claimed_at"]
        assert claims[0]["pid"] == os.getpid(), "of the process that took the claim"
        assert open_files.locked(claims[1]["pid"], (str(entry / "claim.lock"),))
    assert sorted(path.name for path in entry.iterdir()) == ["claim.lock", "mountInfo.json"]


@pytest.mark.spec("H-24")
def test_failed_start_leaves_its_reason_and_no_process(
    store: Store, ext4_device: loop.LoopDevice, kubelet: Path
) -> None:
    entry = _publish(store, ext4_device.path, kubelet / "mount")
    boxes = second_runtime.Boxes(Path(store.root), str(kubelet / "nowhere"))
    with pytest.raises(Refused):
        boxes.start("box-1", str(kubelet / "mount"))
    claim = json.loads((entry / "claim.json").read_text())
    assert (claim["state"], claim["pid"]) == ("error", os.getpid())
    assert not boxes.running


@contextmanager
def _mounted(path: str, at: Path, *options: str) -> Iterator[None]:
    subprocess.run(["mount", *options, path, str(at)], check=True, timeout=60)
    try:
        yield
    finally:
        mount_api.unmount(str(at))


@contextmanager
def _read_only_bind(path: str, at: Path) -> Iterator[None]:
    """The filesystem can write, and the one mount that shows it cannot."""
    with _mounted(path, at):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(at)], check=True, timeout=60)
        yield


@contextmanager
def _other_process(*argv: str) -> Iterator[None]:
    """It prints a line when it is ready, and ends with its input."""
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        process.communicate(timeout=60)


@contextmanager
def _mounted_elsewhere(path: str, at: Path) -> Iterator[None]:
    """In another mount namespace."""
    mount = 'mount "$0" "$1" && echo ready && exec cat'
    with _other_process("unshare", "--mount", "sh", "-c", mount, path, str(at)):
        yield


@contextmanager
def _held(path: str, at: Path) -> Iterator[None]:
    """By another program, exclusively."""
    hold = "os.open(sys.argv[1], os.O_EXCL); print('ready', flush=True); sys.stdin.read()"
    with _other_process(sys.executable, "-c", f"import os, sys; {hold}", path):
        yield


@pytest.mark.spec("H-28")
@pytest.mark.parametrize("user", [_mounted, _read_only_bind, _mounted_elsewhere, _held])
def test_reader_refuses_a_device_that_somebody_may_write_to(
    store: Store, ext4_device: loop.LoopDevice, kubelet: Path, user: Any
) -> None:
    entry = _publish(store, ext4_device.path, kubelet / "mount", readonly=True)
    boxes = second_runtime.Boxes(Path(store.root), str(kubelet / "inside"))
    (kubelet / "host").mkdir()
    with user(ext4_device.path, kubelet / "host"), pytest.raises(Refused, match=r"write|held"):
        boxes.start("box-1", str(kubelet / "mount"))
    assert not (entry / "claim.json").exists()
    assert boxes.start("box-1", str(kubelet / "mount")) == "ok"
    boxes.stop("box-1")


@pytest.mark.spec("H-28")
def test_readers_share_a_device_that_is_mounted_read_only(
    store: Store, ext4_device: loop.LoopDevice, kubelet: Path
) -> None:
    _publish(store, ext4_device.path, kubelet / "mount", readonly=True)
    boxes = second_runtime.Boxes(Path(store.root), str(kubelet / "inside"))
    (kubelet / "host").mkdir()
    with _mounted(ext4_device.path, kubelet / "host", "-o", "ro"):
        assert boxes.start("box-1", str(kubelet / "mount")) == "ok"
        boxes.stop("box-1")


@pytest.fixture
def disk(short_dir: Path) -> Iterator[str]:
    """A disk with a partition, which has an ext4. The kernel is told, because one may know no partition tables."""
    (short_dir / "disk.img").touch()
    os.truncate(short_dir / "disk.img", 64 << 20)
    attach = ["losetup", "--find", "--show", "--partscan", str(short_dir / "disk.img")]
    attached = subprocess.run(attach, check=True, capture_output=True, text=True, timeout=60)
    path = attached.stdout.strip()
    subprocess.run(["addpart", path, "1", "2048", "65536"], check=True, timeout=60)
    name = Path(path).name
    major, _, minor = Path(f"/sys/block/{name}/{name}p1/dev").read_text().partition(":")
    is_made = not os.path.exists(f"{path}p1")  # without udev or devtmpfs nobody makes it
    if is_made:
        os.mknod(f"{path}p1", 0o60600, os.makedev(int(major), int(minor)))
    subprocess.run(["mkfs.ext4", "-q", f"{path}p1"], check=True, timeout=60)
    yield path
    subprocess.run(["delpart", path, "1"], check=True, timeout=60)
    subprocess.run(["losetup", "--detach", path], check=True, timeout=60)
    if is_made:
        os.unlink(f"{path}p1")


@pytest.mark.spec("H-28")
def test_reader_of_a_disk_refuses_while_its_partition_is_mounted(
    store: Store, disk: str, kubelet: Path
) -> None:
    entry = _publish(store, disk, kubelet / "mount", readonly=True)
    boxes = second_runtime.Boxes(Path(store.root), str(kubelet / "inside"))
    (kubelet / "host").mkdir()
    with _mounted(f"{disk}p1", kubelet / "host"), pytest.raises(Refused, match="shares bytes"):
        boxes.start("box-1", str(kubelet / "mount"))
    assert not (entry / "claim.json").exists()


@pytest.mark.spec("H-28")
def test_reader_of_a_partition_refuses_while_its_disk_is_held(
    store: Store, disk: str, kubelet: Path
) -> None:
    _publish(store, f"{disk}p1", kubelet / "mount", readonly=True)
    boxes = second_runtime.Boxes(Path(store.root), str(kubelet / "inside"))
    with _held(disk, kubelet), pytest.raises(Refused, match="shares bytes"):
        boxes.start("box-1", str(kubelet / "mount"))


@pytest.mark.spec("H-23")
def test_partition_has_the_sequence_of_its_disk(store: Store, disk: str, kubelet: Path) -> None:
    entry = _publish(store, f"{disk}p1", kubelet / "mount")
    record = second_runtime.parse((entry / "mountInfo.json").read_bytes(), entry.name)
    os.close(second_runtime.open_device(record))


@pytest.fixture
def guarded(kubelet: Path) -> Iterator[Path]:
    """A target with its guard mount, which a bind shows at `bind`."""
    target, bind = kubelet / "mount", kubelet / "bind"
    bind.mkdir()
    mount_api.mount_guard(str(target), names=True)
    subprocess.run(["mount", "--bind", str(target), str(bind)], check=True, timeout=60)
    yield target
    for mounted in (bind, target):
        mount_api.unmount(str(mounted))


@pytest.mark.spec("H-33")
def test_bind_of_a_guard_mount_is_its_entry(
    store: Store, ext4_device: loop.LoopDevice, guarded: Path
) -> None:
    root, bind = Path(store.root), guarded.parent / "bind"
    with pytest.raises(Refused, match="without an entry"):
        second_runtime.resolve(root, str(bind))
    entry = _publish(store, ext4_device.path, guarded)
    assert second_runtime.resolve(root, str(bind)) == entry
    (guarded / "sub").mkdir()
    with pytest.raises(Refused, match="inside the volume"):
        second_runtime.resolve(root, str(bind / "sub"))


@pytest.mark.spec("H-38")
def test_record_of_a_co_needs_its_guard_mount(
    store: Store, ext4_device: loop.LoopDevice, guarded: Path
) -> None:
    entry = _publish(store, ext4_device.path, guarded, request="0" * 64)
    record = second_runtime.parse((entry / "mountInfo.json").read_bytes(), entry.name)
    second_runtime.check_offered(record)
    elsewhere = {**record, "crust": {**record["crust"], "target_path": str(guarded.parent)}}
    with pytest.raises(Refused, match="no guard mount"):
        second_runtime.check_offered(elsewhere)
