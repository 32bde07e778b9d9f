"""Entries and files that a runtime must not use, and an entry that another one replaces while it is claimed."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from crust.handoff import layout
from crust_conformance.runtimes.file_opens import paused
from crust_conformance.runtimes.subject import RuntimeUnderTest

_NOBODY = 65534

_Change = Callable[[str], object]


def _writable(path: str) -> None:
    os.chmod(path, os.stat(path).st_mode | 0o020)


def _of_nobody(path: str) -> None:
    os.chown(path, _NOBODY, -1)


def _link(path: str) -> None:
    """Another file, outside of the entry, in its place: behind a symbolic link."""
    os.rename(path, f"{path}.moved")
    os.symlink(f"{path}.moved", path)


def _pipe(path: str) -> None:
    os.unlink(path)
    os.mkfifo(path, 0o600)


_CHANGES: dict[str, tuple[Callable[[layout.EntryPaths], str], _Change]] = {
    "the group can write to the entry": (lambda paths: paths.directory, _writable),
    "another user owns the entry": (lambda paths: paths.directory, _of_nobody),
    "the group can write to the record": (lambda paths: paths.record, _writable),
    "another user owns the record": (lambda paths: paths.record, _of_nobody),
    "the record is a symbolic link": (lambda paths: paths.record, _link),
    "the record is a pipe": (lambda paths: paths.record, _pipe),
    "the group can write to claim.lock": (lambda paths: paths.claim_lock, _writable),
    "another user owns claim.lock": (lambda paths: paths.claim_lock, _of_nobody),
}


async def test_r225_not_roots_alone(subject: RuntimeUnderTest) -> None:
    for number, (what, (path, change)) in enumerate(_CHANGES.items()):
        target = await subject.volume(f"volume-{number}")
        paths = subject.proxy.paths(target)
        change(path(paths))
        subject.transcript.append(f"({what})")
        with _mended(subject, target):
            await subject.refused(f"box-{number}", target)
    target = await subject.volume("below-the-root")
    os.chmod(subject.proxy.root, 0o770)
    subject.transcript.append("(the group can write to the root)")
    try:
        await subject.refused("box-root", target)
    finally:
        os.chmod(subject.proxy.root, 0o700)


@contextlib.contextmanager
def _mended(subject: RuntimeUnderTest, target: str) -> Iterator[None]:
    """At the end make the entry one that can be unpublished."""
    paths = subject.proxy.paths(target)
    try:
        yield
    finally:
        for path, mode in ((paths.directory, 0o700), (paths.claim_lock, 0o600)):
            os.chown(path, 0, 0)
            os.chmod(path, mode)
        for path in (paths.record, f"{paths.record}.moved"):
            Path(path).unlink(missing_ok=True)
        Path(paths.record).touch(0o600)


async def test_r226_second_link(subject: RuntimeUnderTest) -> None:
    target = await subject.volume()
    lock = subject.proxy.paths(target).claim_lock
    other = f"{subject.directory}/second-link"
    os.link(lock, other)
    try:
        await subject.refused("box-1", target)
    finally:
        os.unlink(other)
    assert not subject.is_held(target), "the lock is held after the refusal"


async def test_r119_replaced(subject: RuntimeUnderTest) -> None:
    target = await subject.volume()
    paths = subject.proxy.paths(target)
    root, name = os.path.split(paths.directory)
    gone, new = f"{root}/.gone-{name}.case", f"{root}/.new-{name}.case"
    os.mkdir(new, 0o700)
    shutil.copy2(paths.record, new)
    Path(f"{new}/{layout.CLAIM_LOCK}").touch(0o600)

    replaced: list[str] = []

    def replace(opened: str) -> float:
        if os.path.basename(opened) == layout.CLAIM_LOCK and not replaced:
            os.rename(paths.directory, gone)
            os.rename(new, paths.directory)
            replaced.append(opened)
            subject.transcript.append(
                "(unpublished and published again, after claim.lock was opened)"
            )
        return 0.0

    try:
        with paused(paths.directory, replace):
            await subject.started("box-1", target)
        assert replaced, "claim.lock was not opened"
        assert subject.is_held(target), (
            "the sandbox runs, and its lock is on the file that was replaced"
        )
    finally:
        for directory in (gone, new):
            shutil.rmtree(directory, ignore_errors=True)
