"""Reading records, and refusing what cannot be used or honoured."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crust.conformance.runtimes.subject import SIZE, Subject
from crust.core import volumes
from crust.host.block import devices


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
    assert not s.is_held(target), "the lock is held after the refusal"


async def test_r201_other_handler(s: Subject) -> None:
    await _refused_and_free(s, await s.volume(handler="another"))


async def test_r202_other_device(s: Subject) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"]["identity"]["disk_sequence"] += 1

    await _refused_and_free(s, await _changed(s, change))


async def test_r203_required_key(s: Subject) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"] |= {"future": 1, "required": ["future"]}

    await _refused_and_free(s, await _changed(s, change))


async def test_r204_unknown_key(s: Subject) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"]["future"] = content["future"] = 1

    await s.started("box-1", await _changed(s, change))


async def test_r205_newer_schema(s: Subject) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"]["schema"] = 99

    await _refused_and_free(s, await _changed(s, change))


async def test_r206_unreadable(s: Subject) -> None:
    target = await s.volume()
    path = Path(s.proxy.paths(target).record)
    path.write_text("{")
    await _refused_and_free(s, target)
    assert path.read_text() == "{", "the record was changed"


async def test_r207_other_target(s: Subject) -> None:
    def change(content: dict[str, Any]) -> None:
        content["crust"]["target_path"] += "-2"

    await _refused_and_free(s, await _changed(s, change))


async def test_r208_unknown_names(s: Subject) -> None:
    target = await s.volume()
    directory = Path(s.proxy.paths(target).directory)
    for name in (".hidden", "future.json"):
        (directory / name).write_text("x")
    try:
        await s.started("box-1", target)
        assert (directory / "future.json").exists(), "the unknown file was deleted"
    finally:
        for name in (".hidden", "future.json"):
            (directory / name).unlink(missing_ok=True)


async def test_r209_ordinary(s: Subject) -> None:
    path = f"{s.directory}/targets/plain"
    os.makedirs(path, exist_ok=True)
    answer = await s.start("box-1", path)
    assert answer == "ordinary", f"the answer must be: ordinary; it is {answer!r}"


async def test_r210_sub_path(s: Subject) -> None:
    answer = await s.start("box-1", f"{await s.volume()}/below")
    assert answer in ("ok", "refused"), "the host's directory would be shared with the sandbox"


async def test_r211_link(s: Subject) -> None:
    target = await s.volume()
    os.symlink(target, f"{target}.link")
    try:
        await s.started("box-1", f"{target}.link")
        assert s.is_held(target), "the claim's lock is not held"
    finally:
        os.unlink(f"{target}.link")


async def test_r212_read_only(s: Subject) -> None:
    await _refused_and_free(s, await s.volume(readonly=True))


async def test_r213_limits(s: Subject) -> None:
    await _refused_and_free(s, await s.volume(io_limits=volumes.IoLimits(read_iops=100)))


async def test_r214_group(s: Subject) -> None:
    await _refused_and_free(s, await s.volume(group=volumes.GroupChange(4059)))


async def test_r215_guard_group(s: Subject) -> None:
    target = await s.volume(guard=True)
    os.chown(target, -1, 4059)
    await _refused_and_free(s, target)


async def test_r216_guard_alone(s: Subject) -> None:
    target = await s.volume(guard=True)
    s.proxy.unpublish(target)
    s.transcript.append("(the entry is removed, the guard mount stays)")
    try:
        await s.refused("box-1", target)
    finally:
        s.remove_guard(target)


async def test_r217_empty(s: Subject) -> None:
    await _refused_and_free(s, s.publish(s.device(), format=volumes.GuestFormat()))


async def test_r218_blank(s: Subject) -> None:
    device = s.device()
    await s.refused("box-1", s.publish(device))
    assert devices.reads_zero(device, [(0, SIZE)]), "the device was written to"


async def test_r219_encrypted(s: Subject) -> None:
    await _refused_and_free(s, await s.volume(encryption=volumes.Encryption.LUKS))


async def test_r220_sub_path_not_offered(s: Subject) -> None:
    await s.refused("box-1", f"{await s.volume()}/below")
