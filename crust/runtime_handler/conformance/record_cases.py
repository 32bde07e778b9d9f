"""Reading records, and refusing what cannot be used or honoured."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crust import volumes
from crust.host.block import devices
from crust.runtime_handler.conformance.case import case, expect
from crust.runtime_handler.conformance.subject import SIZE, Subject

Feature = volumes.HandlerFeature


async def _changed(s: Subject, change: Callable[[dict[str, Any]], None]) -> str:
    """Publish a volume whose record was changed by hand; returns its target."""
    target = await s.volume()
    path = Path(s.proxy.paths(target).record)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content) + "\n")
    return target


async def _refused_and_free(s: Subject, target: str) -> None:
    await s.refused("box-1", target)
    expect(not s.is_held(target), "the lock is held after the refusal")


@case("R-201", "a record for another handler is refused", "H-23")
async def other_handler(s: Subject) -> None:
    await _refused_and_free(s, await s.volume(handler="another"))


@case("R-202", "a device with another identity than the record's is refused", "H-23")
async def other_device(s: Subject) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"]["identity"]["disk_sequence"] += 1

    await _refused_and_free(s, await _changed(s, change))


@case("R-203", "a record with a required key that the runtime does not know is refused", "H-5")
async def required_key(s: Subject) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"] |= {"future": 1, "required": ["future"]}

    await _refused_and_free(s, await _changed(s, change))


@case("R-204", "a key that the runtime does not know, and that is not required, is ignored", "H-5")
async def unknown_key(s: Subject) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"]["future"] = content["future"] = 1

    await s.started("box-1", await _changed(s, change))


@case("R-205", "a record of a newer schema is refused", "H-6")
async def newer_schema(s: Subject) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"]["schema"] = 99

    await _refused_and_free(s, await _changed(s, change))


@case(
    "R-206", "a record that cannot be read is an error, not an ordinary mount, and is kept", "H-10"
)
async def unreadable(s: Subject) -> None:
    target = await s.volume()
    path = Path(s.proxy.paths(target).record)
    path.write_text("{")
    await _refused_and_free(s, target)
    expect(path.read_text() == "{", "the record was changed")


@case("R-207", "a record for another target than its entry's is refused", "H-1", "H-7")
async def other_target(s: Subject) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"]["target_path"] += "-2"

    await _refused_and_free(s, await _changed(s, change))


@case("R-208", "unknown names in the entry do not make it invalid", "H-2", "H-3")
async def unknown_names(s: Subject) -> None:
    target = await s.volume()
    directory = Path(s.proxy.paths(target).directory)
    for name in (".hidden", "future.json"):
        (directory / name).write_text("x")
    try:
        await s.started("box-1", target)
        expect((directory / "future.json").exists(), "the unknown file was deleted")
    finally:
        for name in (".hidden", "future.json"):
            (directory / name).unlink(missing_ok=True)


@case("R-209", "a source that is no volume is an ordinary mount", "H-32")
async def ordinary(s: Subject) -> None:
    path = f"{s.directory}/targets/plain"
    os.makedirs(path, exist_ok=True)
    answer = await s.start("box-1", path)
    expect(answer == "ordinary", f"the answer must be: ordinary; it is {answer!r}")


@case("R-210", "a path below the target (subPath) is the volume's, or refused", "H-32")
async def sub_path(s: Subject) -> None:
    answer = await s.start("box-1", f"{await s.volume()}/below")
    expect(answer in ("ok", "refused"), "the host's directory would be shared with the sandbox")


@case("R-211", "a source behind a symbolic link is resolved", "H-32")
async def link(s: Subject) -> None:
    target = await s.volume()
    os.symlink(target, f"{target}.link")
    try:
        await s.started("box-1", f"{target}.link")
        expect(s.is_held(target), "the claim's lock is not held")
    finally:
        os.unlink(f"{target}.link")


@case("R-212", "a read-only volume is refused without READ_ONLY", "H-28", lacks=Feature.READ_ONLY)
async def read_only(s: Subject) -> None:
    await _refused_and_free(s, await s.volume(readonly=True))


@case(
    "R-213",
    "a volume with I/O limits is refused without IO_LIMITS",
    "H-36",
    lacks=Feature.IO_LIMITS,
)
async def limits(s: Subject) -> None:
    await _refused_and_free(s, await s.volume(io_limits=volumes.IoLimits(read_iops=100)))


@case(
    "R-214", "a volume with fsGroup is refused without GROUP", "H-12", "H-40", lacks=Feature.GROUP
)
async def group(s: Subject) -> None:
    await _refused_and_free(s, await s.volume(group=volumes.GroupChange(4059)))


@case("R-215", "a group on the guard mount counts as fsGroup", "H-38", lacks=Feature.GROUP)
async def guard_group(s: Subject) -> None:
    target = await s.volume(guard=True)
    os.chown(target, -1, 4059)
    await _refused_and_free(s, target)


@case("R-216", "a guard mount without an entry is refused", "H-33")
async def guard_alone(s: Subject) -> None:
    target = await s.volume(guard=True)
    s.proxy.unpublish(target)
    s.transcript.append("(the entry is removed, the guard mount stays)")
    try:
        await s.refused("box-1", target)
    finally:
        s.remove_guard(target)


@case(
    "R-217",
    "a volume that was created empty is refused without FORMAT",
    "H-47",
    lacks=Feature.FORMAT,
)
async def empty(s: Subject) -> None:
    await _refused_and_free(s, s.publish(s.device(), format=volumes.GuestFormat()))


@case("R-218", "a blank device without crust.format is an error, and stays blank", "H-47")
async def blank(s: Subject) -> None:
    device = s.device()
    await s.refused("box-1", s.publish(device))
    expect(devices.reads_zero(device, [(0, SIZE)]), "the device was written to")


@case("R-219", "an encrypted volume is refused without LUKS", "H-49", lacks=Feature.LUKS)
async def encrypted(s: Subject) -> None:
    await _refused_and_free(s, await s.volume(encryption=volumes.Encryption.LUKS))
