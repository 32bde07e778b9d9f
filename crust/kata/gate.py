"""The decisions of the NRI plugin (`nri.Gate`): which container may use which deferred volume.

A container with a mount on a deferred target is created only if its sandbox has the volume's claim and Kata's entry
names the device, and is started only if the virtual machine has the device. In all other cases the gate refuses, with
one sentence that names the volume and the remedy. That holds for the volumes of every handler: a pod with another
runtime would write to the guard mount, and the volume would look empty to it. If it runs already, its end is told:
the engine makes it again, and the refusal is an event of the pod. A process is killed only while its pidfd is held
and its control group has the container's id (docs/decisions/0044).

The work of a call runs in a thread (`volume_work`). When its time is over the gate refuses the container, and the
thread, once it returns, undoes its steps: an earlier claim of the same sandbox stays. A later call for the same
sandbox waits for the withdrawal of its ended containers.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from crust.core import errors, operations, volumes
from crust.handoff.record import Record
from crust.host import answers
from crust.host.process import processes, syscalls, workers
from crust.kata import entry
from crust.kata.evidence import KataBuild, KataBuilds, Use
from crust.kata.grants import Grants, Sandbox, User
from crust.kata.nri import Container, Pod
from crust.kata.preflight import Configurations
from crust.kata.statistics import Uses
from crust.kata.volume_work import Attempt, VolumeWork
from crust.runtime_handler.blocking import NotDeferred, process_of, resolve_source

_log = logging.getLogger(__name__)

_GRANT_S = 0.5
"""What a claim may take of a call's time, after the machine has let go of the volume's disk."""
_LOOK_S = 1.0
"""How long a synchronization waits for the mount sources of one container."""

Report = Callable[[str, errors.CrustError | None], None]
"""Reports a problem of the node under a name, for its health; None: the problem has ended."""


class WrongRuntime(errors.NotReady):
    def __init__(self, record: Record, handler: str, pod: Pod) -> None:
        super().__init__(
            f"the volume at {record.target} cannot be used by pod {pod.name}",
            why=f"it is published to the runtime handler {record.handler}, and the pod runs with "
            f"{handler or 'the default one'}",
            hint=f"set runtimeClassName to a RuntimeClass whose handler is {record.handler}, or do not defer "
            "the volume",
        )


@dataclass(frozen=True, slots=True)
class ServedMount:
    """A mount of a container that one of our handlers must serve. `name` is the name of Kata's entry."""

    record: Record
    name: str
    source: str
    destination: str


Step = Callable[[Pod, Container, list[ServedMount], Attempt], None]


@dataclass(eq=False)
class KataGate:
    """The gate of a node."""

    _grants: Grants
    _builds: KataBuilds
    _configurations: Configurations
    _default: str
    """The engine's runtime for a pod without a RuntimeClass."""
    _report: Report
    _created: list[set[User]] = field(default_factory=list)
    """For each `synchronize` that runs, the containers that the engine has created since it made its list."""
    uses: Uses = field(default_factory=Uses)
    _work: VolumeWork = field(default_factory=VolumeWork)
    _mounts: operations.KeyedOperations = field(
        default_factory=lambda: operations.KeyedOperations(
            workers.Workers("the mounts of containers", limit=64)
        )
    )
    _told: set[str] = field(default_factory=set)
    """The containers whose problem is reported."""
    _ended: dict[str, set[User]] = field(default_factory=dict)
    """The containers of each sandbox that need no entry any more, and are not withdrawn yet."""
    _withdrawing: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def create(self, pod: Pod, container: Container, deadline_s: float) -> None:
        for created in self._created:
            created.add(_user(container))
        await self._do(self._create, pod, container, deadline_s)

    async def start(self, pod: Pod, container: Container, deadline_s: float) -> None:
        await self._do(self._start, pod, container, deadline_s)

    async def _do(self, step: Step, pod: Pod, container: Container, deadline_s: float) -> None:
        mounts = await self._mounts_of(pod, container, deadline_s - time.monotonic())
        if not mounts:
            return
        if (ending := self._withdrawing.get(pod.id)) is not None:
            await asyncio.wait((ending,), timeout=max(0.0, deadline_s - time.monotonic()))
        await self._work.run(
            {mount.name for mount in mounts},
            container.name,
            deadline_s,
            lambda attempt: step(pod, container, mounts, attempt),
        )

    async def _mounts_of(self, pod: Pod, container: Container, left_s: float) -> list[ServedMount]:
        """As `_served_mounts`; a source that hangs, as one of a dead file server, has one thread."""
        return await self._mounts.look(
            (pod.id, container.mounts),
            lambda: self._served_mounts(pod, container),
            timeout_s=max(0.0, left_s),
            shown=f"a mount source of container {container.name}",
            fresh=True,
        )

    async def ended(self, container: Container) -> None:
        self.uses.ended(container.id)
        self._tell(container.id, None)
        sandbox_id = container.pod_id
        self._ended.setdefault(sandbox_id, set()).add(_user(container))
        if sandbox_id not in self._withdrawing:
            self._withdrawing[sandbox_id] = asyncio.create_task(self._withdraw(sandbox_id))
        await asyncio.wait((self._withdrawing[sandbox_id],))

    async def _withdraw(self, sandbox_id: str) -> None:
        """A keeper that does not answer has one thread, whatever ends meanwhile."""
        while users := self._ended.pop(sandbox_id, None):
            try:
                await workers.run(self._grants.withdraw, sandbox_id, users.__contains__)
            except errors.CrustError as error:  # the next synchronization withdraws them
                extra = {"sandbox": sandbox_id, "error": error}
                _log.error("entries of ended containers are not withdrawn", extra=extra)
        del self._withdrawing[sandbox_id]  # with no await since the last look: no end is missed

    async def synchronize(self, pods: dict[str, Pod], containers: list[Container]) -> None:
        created: set[User] = set()  # from now on: the engine creates no container before this
        self._created.append(created)
        try:
            for container in containers:
                self._tell(container.id, await self._look_at(pods.get(container.pod_id), container))
            for container_id in self._told - {container.id for container in containers}:
                self._tell(container_id, None)  # its end was missed
            listed = {_user(container) for container in containers if container.is_created}
            await workers.run(self._withdraw_needless, listed, created)
            lasting = {container.id for container in containers if not container.is_stopped}
            self.uses.keep(lasting | {user.partition("/")[0] for user in created})
        finally:
            self._created = [others for others in self._created if others is not created]

    def _tell(self, container_id: str, problem: errors.CrustError | None) -> None:
        if problem is None and container_id not in self._told:
            return
        (self._told.discard if problem is None else self._told.add)(container_id)
        self._report(f"container {container_id}", problem)

    def _create(
        self, pod: Pod, container: Container, mounts: list[ServedMount], attempt: Attempt
    ) -> None:
        with contextlib.ExitStack() as undo:
            installation = self._configurations.check_kata(mounts[0].record.handler)  # the pod's
            runtime = self._builds.of(pod.id)
            if installation.kind is not runtime.kind:
                raise errors.NotReady.named(
                    "OtherKataRuntime",
                    f"pod {pod.name} gets no deferred volume",
                    why=f"Kata's {runtime.kind.value} has made its sandbox, and kata.toml names a configuration of "
                    "the other",
                )
            sandbox = _sandbox(pod, runtime)
            user, features = _user(container), installation.features
            needing = self._grants.needing(pod.id)
            others = [digest for digest, other in needing if _name(other) != container.name]
            times = Counter([*others, *(mount.record.digest for mount in mounts)])
            attached = []
            for digest, record in _records(mounts).items():
                user_id = self.uses.of(digest, pod.id).container_id
                attached.append((record, times[digest] - 1 + (user_id not in ("", container.id))))
            until_s = attempt.deadline_s - _GRANT_S
            runtime.check_attachable(pod.id, sandbox.process.pid, attached, until_s)
            sources = {mount.source: mount.record for mount in mounts}
            undo.callback(self._grants.grant(sandbox, sources, user, features))
            if attempt.decide():
                # earlier attempts of this container have failed: the engine tells nobody
                attempts = {other for _, other in needing if _name(other) == container.name}
                if earlier := attempts - {user}:
                    self._grants.withdraw(pod.id, earlier.__contains__)
                undo.pop_all()

    def _start(
        self, pod: Pod, container: Container, mounts: list[ServedMount], attempt: Attempt
    ) -> None:
        runtime = self._builds.of(pod.id)
        sandbox = _sandbox(pod, runtime)
        with self._grants.adopted(sandbox, _records(mounts)) as claims:
            devices = {mount.destination: mount.record for mount in mounts}
            runtime.check_mounted(sandbox.id, sandbox.process.pid, container.id, devices)
            if not attempt.decide():
                return
            self._grants.withdraw(sandbox.id, _user(container).__eq__)
            for claim in claims:
                claim.report_mounted()
        self._note(runtime, container, mounts)

    def _note(self, runtime: KataBuild, container: Container, mounts: list[ServedMount]) -> None:
        destinations, sandbox_id = [mount.destination for mount in mounts], container.pod_id
        paths = runtime.guest_paths(sandbox_id, destinations, just_made=not container.is_running)
        for mount, path in zip(mounts, paths, strict=True):
            self.uses.started(mount.record.digest, Use(sandbox_id, container.id, path))

    def _withdraw_needless(self, listed: set[User], created: set[User]) -> None:
        for sandbox_id in self._grants.sandbox_ids():
            try:
                self._grants.withdraw(sandbox_id, lambda user: user not in listed | created)
            except errors.CrustError as error:
                extra = {"sandbox": sandbox_id, "error": error}
                _log.error("entries that no container needs are not withdrawn", extra=extra)

    async def _look_at(self, pod: Pod | None, container: Container) -> errors.CrustError | None:
        """The problem of a container that runs without its volume, or that is not seen."""
        if pod is None or not container.is_running:  # the start of a created one will be refused
            return None
        try:
            if mounts := await self._mounts_of(pod, container, _LOOK_S):
                await workers.run(self._check_running, pod, container, mounts)
            return None
        except WrongRuntime as error:
            problem = _without_volume(pod, container, error)
        except errors.PeerUnavailable as error:  # not seen
            return error
        except errors.CrustError as error:
            return _without_volume(pod, container, error)
        try:
            # a pod of a runtime that has processes of containers on the host
            is_ended = await workers.run(
                lambda: self._builds.find(pod.id) is None and end_container(container)
            )
        except errors.CrustError as error:
            return error
        return None if is_ended else problem

    def _check_running(self, pod: Pod, container: Container, mounts: list[ServedMount]) -> None:
        runtime = self._builds.of(pod.id)
        with self._grants.adopted(_sandbox(pod, runtime), _records(mounts)):
            self._note(runtime, container, mounts)

    def _served_mounts(self, pod: Pod, container: Container) -> list[ServedMount]:
        """The mounts that one of our handlers must serve. Raises for a mount that the pod may not use."""
        mounts = []
        for mount in container.mounts:
            resolved = resolve_source(self._grants.store.root, mount.source)
            if isinstance(resolved, NotDeferred):
                continue
            record, handler = resolved.record, pod.handler or self._default
            if record.handler != handler:
                raise WrongRuntime(record, handler, pod)
            if record.handler not in self._configurations.handlers:
                if self._builds.find(pod.id) is None:
                    continue  # another runtime's volume, which that runtime claims
                raise errors.NotReady.named(
                    "RuntimeNotNamed",
                    f"the volume at {record.target} cannot be used by pod {pod.name}",
                    why=f"Kata has made its sandbox, and kata.toml does not name the runtime {record.handler}",
                )
            whole, name = resolved.require_whole(), entry.name_of(mount.source)
            mounts.append(ServedMount(whole, name, mount.source, mount.destination))
        return mounts


def _user(container: Container) -> User:
    """The container as its sandbox's keeper knows it: each attempt to run it has another id, and the same name."""
    return f"{container.id}/{container.name}"


def _records(mounts: Collection[ServedMount]) -> dict[str, Record]:
    """By digest: two mounts may have one volume."""
    return {mount.record.digest: mount.record for mount in mounts}


def _name(user: User) -> str:
    return user.partition("/")[2]


def _sandbox(pod: Pod, runtime: KataBuild) -> Sandbox:
    return Sandbox(volumes.SandboxId(pod.id), process_of(runtime.vm_of(pod.id, pod.pid)))


def _without_volume(pod: Pod, container: Container, error: errors.CrustError) -> errors.CrustError:
    problem = errors.NotReady.named(
        "RunsWithoutVolume",
        f"container {container.name} of pod {pod.name} runs without its volume",
        why=f"it was started while crust kata was away, or lost the claim: {error}",
    )
    _log.error("a container runs without its volume", extra={"error": problem})
    return problem


def end_container(container: Container) -> bool:
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
