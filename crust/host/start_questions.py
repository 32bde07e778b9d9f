"""The questions about the host that a daemon needs, asked once at its start, under its own filters and capabilities.

A system call filter, a dropped capability or a PID namespace refuses each publish later, and only the daemon itself
meets it: the shell in which an operator looks has none of them. So each daemon tries its questions when it starts,
and shows what it may not ask as a problem of its own (`crust status`, `crust doctor`). Calls that need the answer are
refused then, and none is guessed.
"""

import os
from collections.abc import Callable, Iterable

from crust.core import errors
from crust.core.supervised import Health
from crust.host import answers
from crust.host.block import openers, signatures
from crust.host.files import sealed
from crust.host.process import hidden, processes, syscalls, workers

Question = tuple[str, Callable[[], object]]
"""Its name, for people, and the call; raises `errors.CrustError`, `OSError`."""


def _own_end() -> None:
    process = answers.seen(processes.of(os.getpid()))
    assert process is not None, "it asks about itself"
    processes.has_ended(process)


def _way_to_a_target() -> None:
    with syscalls.closing(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        os.close(syscalls.open_beneath(root, "."))


OPEN_FILES: Question = ("open files of other processes", openers.openers)
PROCESSES: Question = ("end of a process (pidfd_open)", _own_end)
TARGETS: Question = ("way to a target (openat2)", _way_to_a_target)
MOUNTS: Question = ("mount of a path (statx)", lambda: syscalls.mount_at("/"))
# A killed daemon would leave a new file, and bwrap(1) binds no file without a name: this one is there.
CONFINED: Question = (
    "programs that parse a volume (bubblewrap)",
    lambda: signatures.probe(__file__),
)
SEALS: Question = ("targets that take no names (chattr +i)", sealed.try_to_seal)

NODE_QUESTIONS = (OPEN_FILES, PROCESSES, TARGETS, MOUNTS, CONFINED)
"""Of a driver on a node."""
PROXY_QUESTIONS = (*NODE_QUESTIONS, SEALS)
RUNTIME_QUESTIONS = (OPEN_FILES, PROCESSES)
"""Of the bridge to Kata."""


async def report(questions: Iterable[Question], health: Health) -> None:
    """Ask each question, and report what gets no answer; it takes some 50 ms with a confined program.

    The operator's exceptions are reported beside them.
    """
    health.report("excepted control groups", hidden.exception(), is_fatal=False)
    for name, ask in questions:
        problem: errors.CrustError | None = None
        try:
            answers.seen(await workers.run(answers.ask, name, ask))
        except errors.CrustError as error:
            problem = error
        health.report(name, problem, is_fatal=False)
