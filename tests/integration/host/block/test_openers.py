"""The processes that have a device open: one look serves many, takes a bounded time, and misses no child."""

import itertools
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from crust.host.answers import NotSeen
from crust.host.block import openers
from crust.host.process import syscalls
from tests.support.drivers import pools
from tests.support.waiting_processes import waiting

pytestmark = pytest.mark.root


def test_look_serves_all_that_began_to_wait_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on = threading.Event(), threading.Event()
    looks: list[int] = []

    def look() -> openers.Openers:
        looks.append(len(looks))
        began.set()
        assert goes_on.wait(30)
        return {(7, len(looks)): ()}

    monkeypatch.setattr(openers, "_openers", look)
    monkeypatch.setattr(openers, "_next", openers._Look())
    results: list[openers.Openers] = []
    first = threading.Thread(target=lambda: results.append(openers.openers()))
    first.start()
    assert began.wait(30)
    later = [threading.Thread(target=lambda: results.append(openers.openers())) for _ in range(4)]
    for thread in later:
        thread.start()
    goes_on.set()
    for thread in (first, *later):
        thread.join(30)
    # the first look began before the others called, so it serves the first caller alone
    assert results[0] == {(7, 1): ()}
    assert len(looks) <= 1 + len(later)
    assert {(7, 1)} not in [set(result) for result in results[1:]]


def test_look_that_takes_too_long_names_the_process(
    disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod with a million descriptors must not delay the others for minutes, and is not skipped."""
    code = "files = [os.dup(0) for _ in range(600)]"
    with waiting(code) as pid:
        monkeypatch.setattr(openers, "_LOOK_S", -1.0)
        with pytest.raises(
            NotSeen, match=r"at process \d+ \(.*\) of user \d+ in .* group \S+, with \d+ open files"
        ):
            openers.openers()
        monkeypatch.setattr(openers, "_LOOK_S", 60.0)
        visits: list[str] = []
        devices_of = openers._devices_of

        def noted(
            of: str, deadline_s: float, *, of_all: bool
        ) -> Iterator[tuple[str, openers.Number]]:
            visits.append(of)
            return devices_of(of, deadline_s, of_all=of_all)

        monkeypatch.setattr(openers, "_devices_of", noted)
        openers.openers()
        assert visits.index(str(pid)) > len(set(visits)) // 2  # those with few files come first


def test_child_of_process_that_ends_during_look_is_seen(
    disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hypervisor that becomes a daemon: it forks, and ends, after the processes were listed."""
    read, write_end = os.pipe()
    child = 0
    held = os.open(disk, os.O_RDWR)
    listdir = os.listdir

    def late(path: str) -> list[str]:
        nonlocal child, held
        names = listdir(path)
        if path == "/proc" and not child:
            child = os.posix_spawn(
                "/bin/cat", ["cat"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, read, 0)]
            )
            os.close(held)
        return names

    os.set_inheritable(held, True)  # noqa: FBT003 - its only form
    monkeypatch.setattr(os, "listdir", late)
    number = os.stat(disk).st_rdev
    found = openers._openers()[os.major(number), os.minor(number)]
    os.close(write_end)
    os.waitpid(child, 0)
    assert [holder.pid for holder in found] == [child]


def test_look_that_a_busy_machine_keeps_waiting_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many others want the CPU: the look takes long by the clock, and little of its own."""
    clock = itertools.count(step=10)
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    openers.openers()


OPEN = "home = sys.argv[1]; files = [os.open(f'{home}/{name}', flags) for name, flags in (%s)]"
PLAIN = "('file', os.O_RDWR), ('', os.O_RDONLY), ('file', os.O_PATH), ('node', os.O_PATH)"
DEVICE = "('node', os.O_RDONLY),"


@pytest.fixture
def failed(disk: str, tmp_path: Path) -> Iterator[Callable[[str], AbstractContextManager[int]]]:
    """An xfs with a file and a node of the disk, which fails once a process has some of them open."""
    home = tmp_path / "home"

    @contextmanager
    def opened(names: str) -> Iterator[int]:
        with waiting(OPEN % names, str(home)) as pid:
            pools.fail(home)
            with pytest.raises(OSError, match="Input/output error"):
                syscalls.block_device_at(f"/proc/{pid}/fd/{max(os.listdir(f'/proc/{pid}/fd'))}")
            yield pid

    with pools.mounted("xfs", tmp_path, home, size=320 << 20):
        (home / "file").touch()
        os.mknod(home / "node", 0o600 | stat.S_IFBLK, os.stat(disk).st_rdev)
        yield opened


def test_files_of_failed_filesystem_are_seen_to_be_no_devices(
    failed: Callable[[str], AbstractContextManager[int]], disk: str
) -> None:
    """xfs answers nothing about its files once its disk has failed; that stops no other volume."""
    number = os.stat(disk).st_rdev
    with failed(PLAIN) as pid:
        assert [*openers._devices_of(str(pid))] == []
        assert openers.openers().get((os.major(number), os.minor(number)), ()) == ()


def test_device_by_node_of_failed_filesystem_is_not_seen(
    failed: Callable[[str], AbstractContextManager[int]],
) -> None:
    with failed(DEVICE) as pid, pytest.raises(OSError, match="Input/output error"):
        [*openers._devices_of(str(pid))]
