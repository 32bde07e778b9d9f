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


async def _changed(
    subject: RuntimeUnderTest, change: Callable[[dict[str, Any]], None], target: str = ""
) -> str:
    """Change the record of a volume, a new one without `target`, by hand; returns its target."""
    target = target or await subject.volume()
    path = Path(subject.proxy.paths(target).record)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content) + "\n")
    return target


async def _refused_and_free(subject: RuntimeUnderTest, target: str, sandbox: str = "box-1") -> None:
    await subject.refused(sandbox, target)
    assert not subject.is_held(target), "the lock is held after the refusal"


async def _refused_with(subject: RuntimeUnderTest, **keys: Any) -> None:
    """Refuse a record whose object "crust" has these keys."""
    target = await _changed(subject, lambda content: content["crust"].update(keys))
    await _refused_and_free(subject, target)


async def test_r201_other_handler(subject: RuntimeUnderTest) -> None:
    await _refused_and_free(subject, await subject.volume(handler="another"))


async def test_r202_other_device(subject: RuntimeUnderTest) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"]["identity"]["disk_sequence"] += 1

    await _refused_and_free(subject, await _changed(subject, change))


async def test_r203_required_key(subject: RuntimeUnderTest) -> None:
    await _refused_with(subject, future=1, required=["future"])


async def test_r204_unknown_key(subject: RuntimeUnderTest) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"]["future"] = content["future"] = 1

    await subject.started("box-1", await _changed(subject, change))


async def test_r205_newer_schema(subject: RuntimeUnderTest) -> None:
    await _refused_with(subject, schema=99)


async def test_r206_unreadable(subject: RuntimeUnderTest) -> None:
    target = await subject.volume()
    path = Path(subject.proxy.paths(target).record)
    path.write_text("{")
    await _refused_and_free(subject, target)
    assert path.read_text() == "{", "the record was changed"


async def test_r207_other_target(subject: RuntimeUnderTest) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"]["target_path"] += "-2"

    await _refused_and_free(subject, await _changed(subject, change))


async def test_r208_unknown_names(subject: RuntimeUnderTest) -> None:
    target = await subject.volume()
    directory = Path(subject.proxy.paths(target).directory)
    for name in (".hidden", "future.json"):
        (directory / name).write_text("x")
    try:
        await subject.started("box-1", target)
        assert "future.json" in os.listdir(directory), "the unknown file was deleted"
    finally:
        for name in (".hidden", "future.json"):
            (directory / name).unlink(missing_ok=True)


async def test_r209_ordinary(subject: RuntimeUnderTest) -> None:
    path = f"{subject.directory}/targets/plain"
    os.makedirs(path, exist_ok=True)
    answer = await subject.start("box-1", path)
    assert answer == "ordinary", f"the answer must be: ordinary; it is {answer!r}"


async def test_r210_sub_path(subject: RuntimeUnderTest) -> None:
    answer = await subject.start("box-1", f"{await subject.volume()}/below")
    assert answer in ("ok", "refused"), (
        f"the answer is {answer!r}: each directory above the source must be looked up as well, or the host's "
        "directory is shared with the sandbox"
    )


async def test_r211_link(subject: RuntimeUnderTest) -> None:
    target = await subject.volume()
    os.symlink(target, f"{target}.link")
    try:
        await subject.started("box-1", f"{target}.link")
        assert subject.is_held(target), "the claim's lock is not held"
    finally:
        os.unlink(f"{target}.link")


async def test_r212_read_only(subject: RuntimeUnderTest) -> None:
    await _refused_and_free(subject, await subject.volume(readonly=True))


async def test_r213_limits(subject: RuntimeUnderTest) -> None:
    await _refused_and_free(
        subject, await subject.volume(io_limits=volumes.IoLimits(read_iops=100))
    )


async def test_r214_group(subject: RuntimeUnderTest) -> None:
    await _refused_and_free(subject, await subject.volume(group=volumes.GroupChange(4059)))


async def test_r215_guard_group(subject: RuntimeUnderTest) -> None:
    target = await subject.volume(guard=True)
    os.chown(target, -1, 4059)
    await _refused_and_free(subject, target)


async def test_r216_guard_alone(subject: RuntimeUnderTest) -> None:
    target = await subject.volume(guard=True)
    subject.proxy.unpublish(target)
    subject.transcript.append("(the entry is removed, the guard mount stays)")
    try:
        await subject.refused("box-1", target)
    finally:
        subject.remove_guard(target)


async def test_r217_empty(subject: RuntimeUnderTest) -> None:
    await _refused_and_free(
        subject, subject.publish(subject.device(), format=volumes.GuestFormat())
    )


async def test_r218_blank(subject: RuntimeUnderTest) -> None:
    device = subject.device()
    await subject.refused("box-1", subject.publish(device))
    assert devices.is_blank(device, [(0, SIZE)]), "the device was written to"


async def test_r219_encrypted(subject: RuntimeUnderTest) -> None:
    await _refused_and_free(subject, await subject.volume(encryption=volumes.Encryption.LUKS))


async def test_r220_sub_path_not_offered(subject: RuntimeUnderTest) -> None:
    await subject.refused("box-1", f"{await subject.volume()}/below")


async def test_r229_text(subject: RuntimeUnderTest) -> None:
    target = await subject.volume()
    path = Path(subject.proxy.paths(target).record)
    good = path.read_bytes()
    texts = {
        "not UTF-8": good.replace(b'"fstype"', b'"x":"\xff","fstype"'),
        "two objects": good + good,
        "65 KiB": good + b" " * 65 * 1024,
        "a key in capitals": good.replace(b'"device"', b'"Device"'),
    }
    for number, (what, text) in enumerate(texts.items()):
        path.write_bytes(text)
        subject.transcript.append(f"(the record: {what})")
        await _refused_and_free(subject, target, f"box-{number}")
    path.write_bytes(good)


async def test_r230_no_record(subject: RuntimeUnderTest) -> None:
    target = await subject.volume()
    path = Path(subject.proxy.paths(target).record)
    text = path.read_bytes()
    path.unlink()
    subject.transcript.append("(an entry without mountInfo.json)")
    answer = await subject.start("box-1", target)
    path.touch(0o600)
    path.write_bytes(text)
    assert answer == "ordinary", f"the answer must be: ordinary; it is {answer!r}"


async def test_r231_sources(subject: RuntimeUnderTest) -> None:
    image = {
        "cluster": "c",
        "pool": "p",
        "image": "i",
        "monitors": ["v2:192.0.2.1:3300"],
        "user": "u",
    }

    def two(content: dict[str, Any]) -> None:
        content["crust"]["image"] = {"namespace": "", **image}

    def none(content: dict[str, Any]) -> None:
        del content["device"], content["crust"]["identity"]

    for number, change in enumerate((two, none)):
        target = await _changed(subject, change, await subject.volume(f"volume-{number}"))
        subject.transcript.append(f"(the record has {change.__name__} sources)")
        await _refused_and_free(subject, target, f"box-{number}")


async def test_r232_guard_missing(subject: RuntimeUnderTest) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"]["request"] = "0" * 64

    await _refused_and_free(subject, await _changed(subject, change))


async def test_r233_relative(subject: RuntimeUnderTest) -> None:
    for number, guard in enumerate((False, True)):
        source = os.path.relpath(await subject.volume(f"volume-{number}", guard=guard))
        assert await subject.start(f"box-{number}", source) != "ok", (
            "the source was looked up in the working directory"
        )


_CREDENTIALS = (
    "x-pass=x1y2",
    "x-Keyfile=/x1y2",
    "x-cred=x1y2",
    "x-token=x1y2",
    "x-secret=x1y2",
    "x-src=a://u:x1y2@h",
)
"""mount(8) keeps such options from the kernel, which would refuse most others."""


async def test_r227_credentials(subject: RuntimeUnderTest) -> None:
    for number, option in enumerate(_CREDENTIALS):

        def change(content: dict[str, Any], option: str = option) -> None:
            content["options"] = [*content["options"], option]

        target = await _changed(subject, change, await subject.volume(f"volume-{number}"))
        subject.transcript.append(f"(options: {option})")
        await _refused_and_free(subject, target, f"box-{number}")
        assert "x1y2" not in subject.transcript[-1], "the answer has the option's value"


async def test_r228_mount_options(subject: RuntimeUnderTest) -> None:
    await subject.started("box-1", await subject.volume("one", mount_options=("noatime",)))
    await _refused_and_free(
        subject, await subject.volume("two", mount_options=("nosuchoption",)), "box-2"
    )


GROUP = 4059
_EXT_MAGIC, _EXT_UUID = (1080, 2), (1128, 16)


def _bytes(device: str, place: tuple[int, int]) -> bytes:
    fd = os.open(device, os.O_RDONLY)
    try:
        return os.pread(fd, place[1], place[0])
    finally:
        os.close(fd)


async def _ran(subject: RuntimeUnderTest, device: str, **mount: Any) -> None:
    """Run a sandbox that mounts the device, and stop it."""
    await subject.started("box-1", subject.publish(device, **mount))
    await subject.stop("box-1")


async def test_r221_group(subject: RuntimeUnderTest) -> None:
    device = await subject.formatted()
    await _ran(subject, device, group=volumes.GroupChange(GROUP))
    await commands.run_command(["e2fsck", "-fy", device], timeout_s=60, ok=(0, 1))
    for path in ("/lost+found", "/"):
        ran = await commands.run_command(["debugfs", "-R", f"stat {path}", device], timeout_s=60)
        output = ran.stdout.decode()
        match = re.search(r"Mode: +0*(\d+).*?Group: +(\d+)", output, re.DOTALL)
        assert match is not None, f"debugfs shows no mode and group of {path}: {output}"
        subject.transcript.append(f"({path}: mode {match[1]}, group {match[2]})")
        assert int(match[2]) == GROUP, f"the group of {path} is {match[2]}"
        assert int(match[1], 8) & 0o2770 == 0o2770, f"the mode of {path} lacks a bit of 2770"


async def test_r222_format(subject: RuntimeUnderTest) -> None:
    device = subject.device()
    await _ran(subject, device, format=volumes.GuestFormat())
    assert _bytes(device, _EXT_MAGIC) == b"\x53\xef", "the device has no ext4"


async def test_r223_formatted_once(subject: RuntimeUnderTest) -> None:
    device = await subject.formatted()
    uuid = _bytes(device, _EXT_UUID)
    await _ran(subject, device, format=volumes.GuestFormat())
    assert _bytes(device, _EXT_UUID) == uuid, "a device that was not blank has another filesystem"


async def test_r224_luks(subject: RuntimeUnderTest) -> None:
    device = subject.device()
    luks = volumes.Encryption.LUKS
    target = subject.publish(device, format=volumes.GuestFormat(), encryption=luks)
    subject.proxy.secrets[target] = {"passphrase": "a passphrase for this case"}
    await subject.started("box-1", target)
    await subject.stop("box-1")
    header = _bytes(device, (0, 1 << 20))
    assert header.startswith(b"LUKS\xba\xbe"), "the device has no LUKS header"
    subject.proxy.secrets[target] = {"passphrase": "another one"}
    await subject.refused("box-2", target)
    assert _bytes(device, (0, 1 << 20)) == header, "a wrong passphrase changed the device"
