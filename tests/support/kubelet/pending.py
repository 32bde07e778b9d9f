"""The kubelet's nested pending operations: one at a time per volume, with a growing pause after a failure.

An operation for one pod (unmount) and one for all pods (mount, unmount device) of a volume exclude each other. One
that meets the *failed* operation of another name takes its place and resets the pause: that is why an unmount that is
refused is retried five times a second, without end, while another pod waits for the same volume.
"""

from dataclasses import dataclass, field

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 122.0
ANY_POD = ""


@dataclass(eq=False)
class Operation:
    """One operation that runs, or has failed and waits."""

    volume: str
    pod: str
    name: str
    running: bool = True
    pause_s: float = 0.0
    failed_at_s: float = field(default=0.0)


class Clock:
    """Seconds since the start of the simulation: a test decides how fast time goes."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_s += seconds


class PendingOperations:
    """The operations that run or wait."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._operations: list[Operation] = []

    def begin(self, volume: str, pod: str, name: str) -> Operation | None:
        """The operation if it may begin now; None while another one runs or its own pause lasts."""
        operation = self._find(volume, pod)
        if operation is None:
            operation = Operation(volume, pod, name)
            self._operations.append(operation)
            return operation
        if operation.running:
            return None
        if self._pauses(operation):
            if operation.name == name:
                return None
            operation.name, operation.pause_s = name, 0.0
        operation.pod, operation.running = pod, True
        return operation

    def end(self, operation: Operation, *, failed: bool) -> None:
        """Forget what succeeded; let what failed wait, twice as long as the last time."""
        if not failed:
            self._operations.remove(operation)
            return
        operation.running = False
        operation.failed_at_s = self._clock.now_s
        operation.pause_s = min(operation.pause_s * 2 or FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def is_running(self, volume: str) -> bool:
        """Whether anything runs for the volume."""
        return any(
            operation.running for operation in self._operations if operation.volume == volume
        )

    def _pauses(self, operation: Operation) -> bool:
        return self._clock.now_s - operation.failed_at_s <= operation.pause_s

    def _find(self, volume: str, pod: str) -> Operation | None:
        waiting: Operation | None = None
        for operation in self._operations:
            if operation.volume != volume or (
                operation.pod != pod and ANY_POD not in (operation.pod, pod)
            ):
                continue
            if operation.running:
                return operation
            if waiting is None or operation.pod == pod:
                waiting = operation
        return waiting
