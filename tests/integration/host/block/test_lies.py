"""A question about a device, while each call by which it is asked fails once: no answer is never "free".

A row of `QUESTIONS` is asked on a real loop device in two states. A hidden user, another process, has the device
open: each failed call must end in a refusal. Nobody has it: the answer is "free", or `NotSeen`. After each failure
the question without it gets the true answer.

Each call fails with one errno, and the calls take the list in turn; `make lies` gives each call each errno.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from crust.core import errors, volumes
from crust.handoff.record import Record
from crust.host.answers import NotSeen
from crust.host.block import device_sets, devices, openers, users
from crust.host.block.users import Purpose
from tests.integration.host.conftest import Attach, partition_table, run, write
from tests.support.faults import lies
from tests.support.faults.lies import Asked, Concerns
from tests.support.records import records

pytestmark = pytest.mark.root

SECTORS = 32 * 1024
"""Of the partition."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device that is asked about, and the process that has it open, or another one."""

    source: volumes.BlockSource
    pid: int

    @property
    def record(self) -> Record:
        """A record of a publish of it."""
        return records.a_record(source=self.source)


Hidden = Callable[[volumes.BlockSource, Path], AbstractContextManager[int]]


@contextmanager
def _process(code: str, *arguments: str) -> Iterator[int]:
    """Another process, which has run `code`."""
    program = f"import os, sys\n{code}\nprint('ok', flush=True)\nsys.stdin.read()"
    argv = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ok\n"
        yield process.pid
        process.communicate()


def idle(_source: volumes.BlockSource, _directory: Path) -> AbstractContextManager[int]:
    """A process without the device."""
    return _process("")


def writer(source: volumes.BlockSource, _directory: Path) -> AbstractContextManager[int]:
    """A process that has it open plainly, as a virtual machine has."""
    return _process("held = os.open(sys.argv[1], os.O_RDWR)", source.path)


def holder(source: volumes.BlockSource, _directory: Path) -> AbstractContextManager[int]:
    """A process that holds it exclusively."""
    return _process("held = os.open(sys.argv[1], os.O_RDONLY | os.O_EXCL)", source.path)


@contextmanager
def partition(source: volumes.BlockSource, directory: Path) -> Iterator[str]:
    """A partition of it, and its node."""
    write(source.path, 0, partition_table(sectors=SECTORS))
    run("addpart", source.path, "1", "2048", str(SECTORS))
    name = os.path.basename(source.path)
    major, minor = map(int, Path(f"/sys/block/{name}/{name}p1/dev").read_text().split(":"))
    node = str(directory / "p1")
    os.mknod(node, 0o600 | 0o060000, os.makedev(major, minor))
    try:
        yield node
    finally:
        run("delpart", source.path, "1")
        os.unlink(node)


@contextmanager
def partition_writer(source: volumes.BlockSource, directory: Path) -> Iterator[int]:
    """A process that writes to a partition of it."""
    code = "held = os.open(sys.argv[1], os.O_RDWR)"
    with partition(source, directory) as node, _process(code, node) as pid:
        yield pid


@dataclass(frozen=True, slots=True)
class Question:
    """A question: whether the device is free for a purpose."""

    is_free: Callable[[Device], bool]
    """May also raise the refusal."""
    hidden: Hidden = writer
    """The user who is in the way."""


def _passes(check: Callable[[Device], None]) -> Callable[[Device], bool]:
    """Of a check that raises: whether it returns."""

    def is_free(device: Device) -> bool:
        check(device)
        return True

    return is_free


def _has_no_partition(device: Device) -> bool:
    identity = device.source.identity
    return device_sets.device_set(identity).related == {identity}


def _check(purpose: Purpose) -> Callable[[Device], bool]:
    return _passes(lambda device: users.check(device.source, purpose))


QUESTIONS = {
    **{f"users.check, {purpose.name}": Question(_check(purpose)) for purpose in Purpose},
    "users.check, partition": Question(_check(Purpose.GUEST_WRITES), partition_writer),
    "users.check, its holder": Question(_check(Purpose.GUEST_READS), holder),
    "users.check, under a hold": Question(
        _passes(lambda device: users.check(device.source, Purpose.GUEST_WRITES, is_mine=True))
    ),
    "users.is_held": Question(lambda device: not users.is_held(device.source), holder),
    "device_sets.device_set": Question(_has_no_partition, partition_writer),
    "openers.opened_by": Question(
        lambda device: not openers.opened_by(device.pid, [device.source.identity])
    ),
}
"""A line for each function by which a part asks whether it may have a device."""


EACH = pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)


def _concerns(device: Device) -> Concerns:
    identity, path = device.source.identity, device.source.path
    name = os.path.basename(path)
    lists = {"/proc", "/proc/partitions", "/proc/self/mountinfo", "/proc/self/ns/mnt"}
    places = (
        f"/proc/{device.pid}",
        f"/sys/dev/block/{identity.major}:{identity.minor}",
        f"/sys/block/{name}",
        f"/sys/class/block/{name}",
        f"/sys/devices/virtual/block/{name}",
        path,
    )
    return Concerns(frozenset(lists), places)


def _asked(question: Question, device: Device) -> Iterator[Asked[bool]]:
    """Ask with each failure, and after each without one."""
    truth = _answer(question, device)
    first = [*QUESTIONS.values()].index(question)
    errnos = lies.all_errnos if lies.ALL else lies.in_turn(first)
    ask = partial(question.is_free, device)
    for asked in lies.failures(ask, _concerns(device), errnos_of=errnos):
        yield asked
        assert _answer(question, device) is truth, f"after {asked.failure}"


def _answer(question: Question, device: Device) -> bool:
    """The answer without a failure; raises `NotSeen`, which would be wrong here."""
    try:
        return question.is_free(device)
    except NotSeen:
        raise
    except errors.CrustError:
        return False


@pytest.fixture
def device(attach: Attach) -> volumes.BlockSource:
    attached = attach()
    return volumes.BlockSource(attached.path, devices.identify(attached.path))


@EACH
def test_failed_call_beside_hidden_user_is_a_refusal(
    question: Question,
    device: volumes.BlockSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(users, "_PAUSES_S", (0.0,))  # this user does not leave
    with question.hidden(device, tmp_path) as pid:
        asked_of = Device(device, pid)
        assert not _answer(question, asked_of)
        missed = [
            f"{asked.failure}: {asked.error or 'free'}"
            for asked in _asked(question, asked_of)
            if not (asked.value is False or isinstance(asked.error, errors.CrustError))
        ]
    assert missed == []


@EACH
def test_failed_call_about_free_device_names_no_user(
    question: Question, device: volumes.BlockSource, tmp_path: Path
) -> None:
    with idle(device, tmp_path) as pid:
        asked_of = Device(device, pid)
        assert _answer(question, asked_of)
        wrong = [
            f"{asked.failure}: {asked.error or 'in use'}"
            for asked in _asked(question, asked_of)
            if not (asked.value is True or isinstance(asked.error, NotSeen))
        ]
    assert wrong == []
