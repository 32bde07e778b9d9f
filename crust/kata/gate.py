"""The decisions of the NRI plugin (`nri.Gate`): which container may use which deferred volume.

A container with a mount on a deferred target is created only if its sandbox has the volume's claim and Kata's entry
names the device, and is started only if the virtual machine has the device. In all other cases the gate refuses, with
one sentence that names the volume and the remedy. That holds for the volumes of every handler: a pod with another
runtime would write to the guard mount, and the volume would look empty to it.

The work of a call runs in a thread. When its time is over the gate refuses the container, and the thread, once it
returns, undoes its steps (`_Attempt`): an earlier claim of the same sandbox stays.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from crust.core import errors, volumes
from crust.handoff.record import Record
from crust.host.process import workers
from crust.kata import entry
from crust.kata.evidence import Runtime, Runtimes, Use
from crust.kata.grants import Grants, Sandbox, User
from crust.kata.nri import Container, Pod
from crust.kata.preflight import Configurations
from crust.kata.statistics import Uses
from crust.runtime_handler import NotDeferred, process_of, resolve_source

_log = logging.getLogger(__name__)

_LOCKS = 64
"""Kata's entries share locks by their names. The engine makes one call at a time, but a thread whose caller gave up
may go on: a device that hangs must delay its own volume only."""

Report = Callable[[str, errors.CrustError | None], None]
"""Reports a problem of the node under a name, for its health; None: the problem has ended."""


@dataclass(frozen=True, slots=True)
class ServedMount:
    """A mount of a container that one of our handlers must serve. `name` is the name of Kata's entry."""

    record: Record
    name: str
    source: str
    destination: str


class _Attempt:
    """Whether the work of a call counts: its thread commits it, or its caller gave up before."""

    def __init__(self) -> None:
        self._undecided = threading.Lock()

    def decide(self) -> bool:
        """Called by both: False if the other one was first. A thread must undo its steps then."""
        return self._undecided.acquire(blocking=False)


class Bridge:
    """The gate of a node. `default_handler` is the engine's runtime for a pod without a RuntimeClass."""

    def __init__(
        self,
        grants: Grants,
        runtimes: Runtimes,
        configurations: Configurations,
        default_handler: str,
        report: Report,
    ) -> None:
        self._grants, self._runtimes, self._configurations = grants, runtimes, configurations
        self._default, self._report = default_handler, report
        self._created: list[set[User]] = []
        """For each `synchronize` that runs, the containers that the engine has created since it made its list."""
        self.uses = Uses()
        self._locks = tuple(threading.RLock() for _ in range(_LOCKS))

    async def create(self, pod: Pod, container: Container, deadline_s: float) -> None:
        """See `nri.Gate`."""
        for created in self._created:
            created.add(_user(container))
        await _within(deadline_s, container, lambda attempt: self._create(pod, container, attempt))

    async def start(self, pod: Pod, container: Container, deadline_s: float) -> None:
        """See `nri.Gate`."""
        await _within(deadline_s, container, lambda attempt: self._start(pod, container, attempt))

    async def ended(self, container: Container) -> None:
        """See `nri.Gate`."""
        self.uses.ended(container.id)
        await workers.run(self._grants.withdraw, container.pod_id, _user(container).__eq__)

    async def synchronize(self, pods: dict[str, Pod], containers: list[Container]) -> None:
        """See `nri.Gate`."""
        created: set[User] = set()  # from now on: the engine creates no container before this
        self._created.append(created)
        try:
            await workers.run(self._synchronize, pods, containers, created)
        finally:
            self._created = [others for others in self._created if others is not created]

    def _create(self, pod: Pod, container: Container, attempt: _Attempt) -> None:
        mounts = self._served_mounts(pod, container)
        if not mounts:
            return
        with self._working_on(mounts), contextlib.ExitStack() as undo:
            installation = self._configurations.check_kata(mounts[0].record.handler)  # the pod's
            runtime = self._runtimes.of(pod.id)
            if installation.kind is not runtime.kind:
                raise _other_runtime(pod, runtime)
            sandbox = _sandbox(pod, runtime)
            user, features = _user(container), installation.features
            times = Counter(mount.record.digest for mount in mounts)
            for mount in mounts:
                needing = self._grants.needing(pod.id, mount.record)
                other_mounts = sum(_name(other) != container.name for other in needing)
                other_mounts += times[mount.record.digest] - 1
                runtime.check_attachable(pod.id, sandbox.pid, mount.record, other_mounts)
                granted = self._grants.grant(sandbox, mount.record, mount.source, user, features)
                undo.callback(granted)
            if attempt.decide():
                # earlier attempts of this container have failed: the engine tells nobody
                self._grants.withdraw(
                    pod.id, lambda other: other != user and _name(other) == container.name
                )
                undo.pop_all()

    def _start(self, pod: Pod, container: Container, attempt: _Attempt) -> None:
        mounts = self._served_mounts(pod, container)
        if not mounts:
            return
        with self._working_on(mounts):
            runtime = self._runtimes.of(pod.id)
            sandbox = _sandbox(pod, runtime)
            for mount in mounts:
                self._grants.check_claimed(sandbox, mount.record)
                runtime.check_mounted(
                    sandbox.id, sandbox.pid, container.id, mount.destination, mount.record
                )
            if not attempt.decide():
                return
            self._grants.withdraw(sandbox.id, _user(container).__eq__)
            for mount in mounts:
                self._grants.mounted(sandbox, mount.record)
            self._note(runtime, container, mounts)

    def _note(self, runtime: Runtime, container: Container, mounts: list[ServedMount]) -> None:
        destinations, sandbox_id = [mount.destination for mount in mounts], container.pod_id
        paths = runtime.guest_paths(sandbox_id, destinations, just_made=not container.is_running)
        for mount, path in zip(mounts, paths, strict=True):
            self.uses.started(mount.record.digest, Use(sandbox_id, container.id, path))

    def _synchronize(
        self, pods: dict[str, Pod], containers: Iterable[Container], created: set[User]
    ) -> None:
        """Withdraw the entries that no created container needs, and report containers without a volume."""
        for container in containers:
            problem = self._look_at(pods.get(container.pod_id), container)
            self._report(f"container {container.id}", problem)
        listed = {_user(container) for container in containers if container.is_created}
        for sandbox_id in self._grants.sandbox_ids():
            try:
                self._grants.withdraw(sandbox_id, lambda user: user not in listed | created)
            except errors.CrustError as error:
                extra = {"sandbox": sandbox_id, "error": error}
                _log.error("entries that no container needs are not withdrawn", extra=extra)

    @contextlib.contextmanager
    def _working_on(self, mounts: list[ServedMount]) -> Iterator[None]:
        """Hold the locks of all names, in one order."""
        with contextlib.ExitStack() as locks:
            for index in sorted({hash(mount.name) % _LOCKS for mount in mounts}):
                locks.enter_context(self._locks[index])
            yield

    def _look_at(self, pod: Pod | None, container: Container) -> errors.CrustError | None:
        if pod is None or not container.is_running:  # the start of a created one will be refused
            return None
        try:
            mounts = self._served_mounts(pod, container)
            if mounts:
                runtime = self._runtimes.of(pod.id)
                for mount in mounts:
                    self._grants.check_claimed(_sandbox(pod, runtime), mount.record)
                self._note(runtime, container, mounts)
        except errors.PeerUnavailable as error:  # not seen
            return error
        except errors.CrustError as error:
            return _without_volume(pod, container, error)
        return None

    def _served_mounts(self, pod: Pod, container: Container) -> list[ServedMount]:
        """The mounts that one of our handlers must serve. Raises for a mount that the pod may not use."""
        mounts = []
        for mount in container.mounts:
            resolved = resolve_source(self._grants.store.root, mount.source)
            if isinstance(resolved, NotDeferred):
                continue
            record, handler = resolved.record, pod.handler or self._default
            if record.handler != handler:
                raise _wrong_runtime(record, handler, pod)
            if record.handler not in self._configurations.handlers:
                if self._runtimes.find(pod.id) is not None:
                    raise _not_named(record, pod)
                continue  # another runtime's volume, which that runtime claims
            whole, name = resolved.require_whole(), entry.name_of(mount.source)
            mounts.append(ServedMount(whole, name, mount.source, mount.destination))
        return mounts


async def _within(
    deadline_s: float, container: Container, work: Callable[[_Attempt], None]
) -> None:
    """Run the work in a thread until the deadline, and refuse then; the thread undoes its steps."""
    attempt = _Attempt()
    running = asyncio.ensure_future(workers.run(work, attempt))
    await asyncio.wait((running,), timeout=max(0.0, deadline_s - time.monotonic()))
    if running.done() or not attempt.decide():
        await running
        return
    running.add_done_callback(_log_outcome)
    raise errors.PeerUnavailable.named(
        "EngineTimeOver",
        f"container {container.name} was not prepared in time",
        why="a volume's device, its lock or a path did not answer within the time of the container engine",
        hint="the engine tries again; `crust doctor` names devices and mounts that hang",
    )


def _log_outcome(running: "asyncio.Future[None]") -> None:
    """Log the failure of work whose caller gave up: the work has been undone."""
    error = None if running.cancelled() else running.exception()
    if error is not None:
        _log.warning("a call whose time was over has failed", extra={"error": error})


def _user(container: Container) -> User:
    """The container as its sandbox's keeper knows it: each attempt to run it has another id, and the same name."""
    return f"{container.id}/{container.name}"


def _name(user: User) -> str:
    return user.partition("/")[2]


def _sandbox(pod: Pod, runtime: Runtime) -> Sandbox:
    return Sandbox(volumes.SandboxId(pod.id), process_of(runtime.vm_of(pod.id, pod.pid)))


def _without_volume(pod: Pod, container: Container, error: errors.CrustError) -> errors.CrustError:
    problem = errors.NotReady.named(
        "RunsWithoutVolume",
        f"container {container.name} of pod {pod.name} runs without its volume",
        why=f"it was started while crust kata was away, or lost the claim: {error}",
        hint="delete the pod: its writes to the mount were refused or are lost",
    )
    _log.error("a container runs without its volume", extra={"error": problem})
    return problem


def _other_runtime(pod: Pod, runtime: Runtime) -> errors.CrustError:
    return errors.NotReady.named(
        "OtherKataRuntime",
        f"pod {pod.name} gets no deferred volume",
        why=f"Kata's {runtime.kind.value} has made its sandbox, and kata.toml names a configuration of the other",
        hint="name the configuration that containerd gives to this runtime (ConfigPath), and restart crust kata",
    )


def _not_named(record: Record, pod: Pod) -> errors.CrustError:
    return errors.NotReady.named(
        "RuntimeNotNamed",
        f"the volume at {record.target} cannot be used by pod {pod.name}",
        why=f"Kata has made its sandbox, and kata.toml does not name the runtime {record.handler}",
        hint="name the runtime in kata.toml again, and restart crust kata; or publish the volume to another runtime",
    )


def _wrong_runtime(record: Record, handler: str, pod: Pod) -> errors.CrustError:
    return errors.NotReady.named(
        "WrongRuntime",
        f"the volume at {record.target} cannot be used by pod {pod.name}",
        why=f"it is published to the runtime handler {record.handler}, and the pod runs with "
        f"{handler or 'the default one'}",
        hint=f"set runtimeClassName to a RuntimeClass whose handler is {record.handler}, or do not defer the volume",
    )
