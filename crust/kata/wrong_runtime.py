"""A container of another runtime on the guard mount of a volume: refused at its start, and ended if it runs.

It sees an empty directory in the place of its volume. Its end is told: the engine makes the container again, and the
refusal is an event of the pod. The rule: a process is killed only while its pidfd is held and its control group has
the container's id (docs/decisions/0044).
"""

import logging
import signal

from crust.core import errors
from crust.handoff.record import Record
from crust.host import answers
from crust.host.process import processes, syscalls
from crust.kata.nri import Container, Pod

_log = logging.getLogger(__name__)


class WrongRuntime(errors.NotReady):
    def __init__(self, record: Record, handler: str, pod: Pod) -> None:
        super().__init__(
            f"the volume at {record.target} cannot be used by pod {pod.name}",
            why=f"it is published to the runtime handler {record.handler}, and the pod runs with "
            f"{handler or 'the default one'}",
            hint=f"set runtimeClassName to a RuntimeClass whose handler is {record.handler}, or do not defer "
            "the volume",
        )


def end(container: Container) -> bool:
    """Kill the container's first process, with which its other processes end (pid_namespaces(7)). Blocks.

    Returns whether it was there. Raises `NotSeen`, and `NotOfContainer` for a process that is not the container's.
    """
    process = answers.seen(processes.of(container.pid)) if container.pid else None
    if process is None:
        return False
    with processes.holding(process) as pidfd:
        if pidfd is None:
            return False
        with syscalls.translating(f"cannot read the control group of process {process.pid}"):
            groups = syscalls.read_whole(f"/proc/{process.pid}/cgroup")
        if container.id.encode() not in groups:
            raise errors.NotReady.named(
                "NotOfContainer",
                f"process {process.pid} is not ended",
                why=f"the container engine names it for container {container.id}, and its control group does not",
            )
        with syscalls.translating(f"cannot end process {process.pid}"):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    _log.warning(
        "ended a container of another runtime that ran on the guard mount of a volume",
        extra={"container": container.name, "id": container.id, "killed_pid": process.pid},
    )
    return True
