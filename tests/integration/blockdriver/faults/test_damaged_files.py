"""One damaged file of the pool or of the node state harms what it belongs to, and nothing beside it.

Two volumes, two snapshots and two groups; one file of the first ones is damaged in every way, one after the other,
and the driver starts on it. The second ones work as ever, and the damage is told and kept.
"""

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from crust.host.process import sysfs
from tests.support.drivers.block_driver import MIB, Bench
from tests.support.records import pool_layout

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

Damage = Callable[[Path, pytest.MonkeyPatch], AbstractContextManager[None]]


@contextmanager
def gone(path: Path, _: pytest.MonkeyPatch) -> Iterator[None]:
    aside = path.parent.parent / "aside"
    path.rename(aside)
    yield
    aside.rename(path)


@contextmanager
def a_directory(path: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    with gone(path, patch):
        path.mkdir()
        yield
        path.rmdir()


@contextmanager
def a_link(path: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    with gone(path, patch):
        path.symlink_to(path.parent.parent / "aside")
        yield
        path.unlink()


def holding(change: Callable[[bytes], bytes]) -> Damage:
    @contextmanager
    def damage(path: Path, _: pytest.MonkeyPatch) -> Iterator[None]:
        before = path.read_bytes()
        path.write_bytes(change(before))
        yield
        path.write_bytes(before)

    return damage


def answered_by(code: int) -> Damage:
    """Every look at the file fails, as on a damaged inode or a bad sector."""

    @contextmanager
    def damage(path: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
        with patch.context() as patched:
            for name in ("open", "stat", "lstat", "unlink"):
                patched.setattr(os, name, _failing(getattr(os, name), _own_name(path), code))
            yield

    return damage


def _own_name(path: Path) -> str:
    """The end of the path that no other file of the pool has; the driver reaches it below a descriptor."""
    is_record = path.name in ("volume.json", "content.json", "set.json")
    return f"{path.parent.name}/{path.name}" if is_record else path.name


def _failing(real: Callable[..., Any], name: str, code: int) -> Callable[..., Any]:
    def call(path: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(path, int) and os.fsdecode(path).endswith(name):
            raise OSError(code, os.strerror(code), path)
        return real(path, *args, **options)

    return call


DAMAGES: dict[str, Damage] = {
    "gone": gone,
    "a directory": a_directory,
    "a link": a_link,
    "empty": holding(lambda _: b""),
    "halved": holding(lambda data: data[: len(data.rstrip()) // 2]),
    "zeros": holding(lambda data: bytes(min(len(data), MIB))),
    "of a later schema": holding(lambda data: data.replace(b'"schema":1', b'"schema":9')),
    "EUCLEAN": answered_by(errno.EUCLEAN),
    "EIO": answered_by(errno.EIO),
}


@dataclass(frozen=True, slots=True)
class Owned:
    """A volume that is published, its snapshot, and a group of it."""

    volume_id: str
    target: str
    snapshot_id: str
    group_id: str


async def owned(bench: Bench, name: str) -> Owned:
    volume_id = (await bench.create(name, size=16 * MIB)).volume_id
    taken = await bench.co.snapshot(volume_id, f"{name}-snapshot")
    members = await bench.co.group(volume_id, name=f"{name}-group")
    target = bench.target(name)
    await bench.up(volume_id, target)
    Path(target, "file").write_text("precious")
    return Owned(volume_id, target, taken.snapshot_id, members.group_snapshot_id)


def path_of(bench: Bench, what: str, of: Owned) -> Path:
    state, run = bench.root / "state", bench.root / "run" / sysfs.boot_id()
    return {
        "volume record": pool_layout.volume_record(state, of.volume_id),
        "content record": pool_layout.content_record(state, of.volume_id),
        "snapshot record": pool_layout.snapshot_set(state, of.snapshot_id),
        "group record": pool_layout.snapshot_set(state, of.group_id),
        "image": pool_layout.image(state, of.volume_id),
        "image of a snapshot": pool_layout.snapshot_image(state, of.snapshot_id),
        "node state": run / f"{of.volume_id}.json",
    }[what]


TOLD_BY_THE_VOLUME = ("volume record", "content record", "image")
TOLD_BY_THE_POOL = ("snapshot record", "group record")


async def check_others(bench: Bench, other: Owned) -> None:
    """Every call that looks at all volumes answers, and the other volume can do what it always can."""
    listed = await bench.co.volumes()
    assert not listed[other.volume_id].status.volume_condition.abnormal
    assert other.snapshot_id in await bench.co.snapshots()
    assert await bench.co.capacity() > 0
    await bench.driver.collect_garbage()
    await bench.driver.finish_changes()
    assert (await bench.stats(other.volume_id, other.target)).usage
    again = bench.target("again")
    await bench.publish(other.volume_id, again)
    assert Path(again, "file").read_text() == "precious"
    await bench.unpublish(other.volume_id, again)
    new = (await bench.create("new", size=16 * MIB)).volume_id
    await bench.delete(new)


async def check_told(bench: Bench, what: str, damaged: Owned) -> None:
    rules = bench.driver.controller
    pool = rules.health_check.pool()
    assert all(each.reachable for each in pool), pool
    if what in TOLD_BY_THE_POOL:
        told = any(each.reason.startswith("Snapshot") for each in pool)
    else:
        entries, _ = rules.lister.health_page(0, "")
        findings = [entry.findings for entry in entries if entry.volume_id == damaged.volume_id]
        told = any(findings)
        if what == "volume record":
            assert f"the {16 * MIB} bytes of its size stay reserved" in findings[0][0].message
    assert told


@pytest.mark.parametrize(
    "what",
    [
        "volume record",
        "content record",
        "snapshot record",
        "group record",
        "image",
        "image of a snapshot",
        "node state",
    ],
)
async def test_damaged_file_affects_only_its_own_volume(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    damaged, other = await owned(bench, "damaged"), await owned(bench, "other")
    path = path_of(bench, what, damaged)
    for name, damage in DAMAGES.items():
        if what.startswith("image") and name == "of a later schema":
            continue
        with damage(path, monkeypatch):
            before = os.path.lexists(path)
            await asyncio.to_thread(bench.restart)
            await check_others(bench, other)
            assert os.path.lexists(path) == before, f"{name}: something else is there now"
            if what in TOLD_BY_THE_VOLUME or (what in TOLD_BY_THE_POOL and name != "gone"):
                await check_told(bench, what, damaged)
    await asyncio.to_thread(bench.restart)
    assert Path(damaged.target, "file").read_text() == "precious"
    for each in (damaged, other):
        await bench.down(each.volume_id, each.target)
        await bench.delete(each.volume_id)
