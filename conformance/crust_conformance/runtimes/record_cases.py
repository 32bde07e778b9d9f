"""Reading records, and refusing volumes and options that the runtime cannot use or honour."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crust.core import volumes
from crust.host.block import devices
from crust.host.process import commands
from crust_conformance.runtimes.subject import SIZE, RuntimeUnderTest


async def _changed(s: RuntimeUnderTest, change: Callable[[dict[str, Any]], None]) -> str:
    """Publish a volume whose record was changed by hand; returns its target."""
    target = await s.volume()
    path = Path(s.proxy.paths(target).record)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content) + "\n")
    return target


async def _refused_and_free(s: RuntimeUnderTest, target: str) -> None:
    await s.refused("box-1", target)
    assert not s.is_held(target), "the lock is held after the refusal"


async def _refused_with(s: RuntimeUnderTest, **keys: Any) -> None:
    """Refuse a record whose object "crust" has these keys."""
    target = await _changed(s, lambda content: content["crust"].update(keys))
    await _refused_and_free(s, target)


async def test_r201_other_handler(s: RuntimeUnderTest) -> None:
    await _refused_and_free(s, await s.volume(handler="another"))


async def test_r202_other_device(s: RuntimeUnderTest) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"]["identity"]["disk_sequence"] += 1

    await _refused_and_free(s, await _changed(s, change))


async def test_r203_required_key(s: RuntimeUnderTest) -> None:
    await _refused_with(s, future=1, required=["future"])


async def test_r204_unknown_key(s: RuntimeUnderTest) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"]["future"] = content["future"] = 1

    await s.started("box-1", await _changed(s, change))


async def test_r205_newer_schema(s: RuntimeUnderTest) -> None:
    await _refused_with(s, schema=99)


async def test_r206_unreadable(s: RuntimeUnderTest) -> None:
    target = await s.volume()
    path = Path(s.proxy.paths(target).record)
    path.write_text("{")
    await _refused_and_free(s, target)
    assert path.read_text() == "{", "the record was changed"


async def test_r207_other_target(s: RuntimeUnderTest) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"]["target_path"] += "-2"

    await _refused_and_free(s, await _changed(s, change))


async def test_r208_unknown_names(s: RuntimeUnderTest) -> None:
    target = await s.volume()
    directory = Path(s.proxy.paths(target).directory)
    for name in (".hidden", "future.json"):
        (directory / name).write_text("x")
    try:
        await s.started("box-1", target)
        assert "future.json" in os.listdir(directory), "the unknown file was deleted"
    finally:
        for name in (".hidden", "future.json"):
            (directory / name).unlink(missing_ok=True)


async def test_r209_ordinary(s: RuntimeUnderTest) -> None:
    path = f"{s.directory}/targets/plain"
    os.makedirs(path, exist_ok=True)
    answer = await s.start("box-1", path)
    assert answer == "ordinary", f"the answer must be: ordinary; it is {answer!r}"


async def test_r210_sub_path(s: RuntimeUnderTest) -> None:
    answer = await s.start("box-1", f"{await s.volume()}/below")
    assert answer in ("ok", "refused"), (
        f"the answer is {answer!r}: each directory above the source must be looked up as well, or the host's "
        "directory is shared with the sandbox"
    )


async def test_r211_link(s: RuntimeUnderTest) -> None:
    target = await s.volume()
    os.symlink(target, f"{target}.link")
    try:
        await s.started("box-1", f"{target}.link")
        assert s.is_held(target), "the claim's lock is not held"
    finally:
        os.unlink(f"{target}.link")


async def test_r212_read_only(s: RuntimeUnderTest) -> None:
    await _refused_and_free(s, await s.volume(readonly=True))


async def test_r213_limits(s: RuntimeUnderTest) -> None:
    await _refused_and_free(s, await s.volume(io_limits=volumes.IoLimits(read_iops=100)))


async def test_r214_group(s: RuntimeUnderTest) -> None:
    await _refused_and_free(s, await s.volume(group=volumes.GroupChange(4059)))


async def test_r215_guard_group(s: RuntimeUnderTest) -> None:
    target = await s.volume(guard=True)
    os.chown(target, -1, 4059)
    await _refused_and_free(s, target)


async def test_r216_guard_alone(s: RuntimeUnderTest) -> None:
    target = await s.volume(guard=True)
    s.proxy.unpublish(target)
    s.transcript.append("(the entry is removed, the guard mount stays)")
    try:
        await s.refused("box-1", target)
    finally:
        s.remove_guard(target)


async def test_r217_empty(s: RuntimeUnderTest) -> None:
    await _refused_and_free(s, s.publish(s.device(), format=volumes.GuestFormat()))


async def test_r218_blank(s: RuntimeUnderTest) -> None:
    device = s.device()
    await s.refused("box-1", s.publish(device))
    assert devices.reads_zero(device, [(0, SIZE)]), "the device was written to"


async def test_r219_encrypted(s: RuntimeUnderTest) -> None:
    await _refused_and_free(s, await s.volume(encryption=volumes.Encryption.LUKS))


async def test_r220_sub_path_not_offered(s: RuntimeUnderTest) -> None:
    await s.refused("box-1", f"{await s.volume()}/below")


GROUP = 4059
_EXT_MAGIC, _EXT_UUID = (1080, 2), (1128, 16)


def _bytes(device: str, place: tuple[int, int]) -> bytes:
    fd = os.open(device, os.O_RDONLY)
    try:
        return os.pread(fd, place[1], place[0])
    finally:
        os.close(fd)


async def _ran(s: RuntimeUnderTest, device: str, **mount: Any) -> None:
    """Run a sandbox that mounts the device, and stop it."""
    await s.started("box-1", s.publish(device, **mount))
    await s.stop("box-1")


async def test_r221_group(s: RuntimeUnderTest) -> None:
    device = await s.formatted()
    await _ran(s, device, group=volumes.GroupChange(GROUP))
    await commands.run_command(["e2fsck", "-fy", device], timeout_s=60, ok=(0, 1))
    for path in ("/lost+found", "/"):
        ran = await commands.run_command(["debugfs", "-R", f"stat {path}", device], timeout_s=60)
        output = ran.stdout.decode()
        match = re.search(r"Mode: +0*(\d+).*?Group: +(\d+)", output, re.DOTALL)
        assert match is not None, output
        s.transcript.append(f"({path}: mode {match[1]}, group {match[2]})")
        assert int(match[2]) == GROUP, f"the group of {path} is {match[2]}"
        assert int(match[1], 8) & 0o2770 == 0o2770, f"the mode of {path} lacks a bit of 2770"


async def test_r222_format(s: RuntimeUnderTest) -> None:
    device = s.device()
    await _ran(s, device, format=volumes.GuestFormat())
    assert _bytes(device, _EXT_MAGIC) == b"\x53\xef", "the device has no ext4"


async def test_r223_formatted_once(s: RuntimeUnderTest) -> None:
    device = await s.formatted()
    uuid = _bytes(device, _EXT_UUID)
    await _ran(s, device, format=volumes.GuestFormat())
    assert _bytes(device, _EXT_UUID) == uuid, "a device that was not blank has another filesystem"


async def test_r224_luks(s: RuntimeUnderTest) -> None:
    device = s.device()
    luks = volumes.Encryption.LUKS
    target = s.publish(device, format=volumes.GuestFormat(), encryption=luks)
    s.proxy.secrets[target] = {"passphrase": "a passphrase for this case"}
    await s.started("box-1", target)
    await s.stop("box-1")
    header = _bytes(device, (0, 1 << 20))
    assert header.startswith(b"LUKS\xba\xbe"), "the device has no LUKS header"
    s.proxy.secrets[target] = {"passphrase": "another one"}
    await s.refused("box-2", target)
    assert _bytes(device, (0, 1 << 20)) == header, "a wrong passphrase changed the device"
