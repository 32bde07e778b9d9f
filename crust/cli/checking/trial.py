"""`crust try`: a deferred publish as a kubelet makes it, with a volume of its own, and everything undone at the end.

    create, attach (where the driver asks for it), stage, publish deferred, show the entry;
    with --wait-s: until a sandbox has claimed the volume and has ended; then the same steps back

It touches no volume but the one that it creates, whose name is random. What a step back cannot remove is named, and
the exit code is 1. Ctrl-C, SIGTERM and SIGHUP go the steps back, too.

What a kill leaves is found by a note, which says what was tried. It lies where a kubelet has vol_data.json of a
staged volume: in a pod's directory a kubelet would remove it. The lock of the note says whether the command still
runs. `crust gc` goes the steps back: CreateVolume of the same name answers which volume it is, and each step back
succeeds where there is nothing to undo (CSI).
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pydantic
from google.protobuf.message import Message

from crust.cli import asking
from crust.core import deferral_keys, errors
from crust.host.files import durable, locks
from crust.host.process import syscalls, workers
from crust.rpc import status
from crust.rpc.port import Port, SocketPort, stub
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from crust.wire.v1 import inspect_pb2

CALL_S = 120.0
_STAGES = csi_pb2.NodeServiceCapability.RPC.STAGE_UNSTAGE_VOLUME
_ATTACHES = csi_pb2.ControllerServiceCapability.RPC.PUBLISH_UNPUBLISH_VOLUME
_UNDO_ATTEMPTS = 10
_STAGED, _NOTE = "plugins/kubernetes.io/csi", "crust-try.json"
_NOTE_MAX_BYTES = 65536
Show = Callable[[str], None]
_SENTENCES = {
    "claimed": "claimed by {}",
    "mounted": "mounted in {}",
    "failed": "failed in {}",
    "released": "released by {}",
}


class TrialRequest(pydantic.BaseModel, frozen=True, extra="forbid"):
    """What is tried, by which name. It is also the note, in JSON."""

    name: str = pydantic.Field(default_factory=lambda: f"crust-try-{secrets.token_hex(4)}")
    driver: str
    handler: str
    size_bytes: int
    fs_type: str
    target_root: str
    parameters: Mapping[str, str]
    wait_s: float


def left(kubelet_root: str) -> tuple[Path, ...]:
    """The notes of trials that were killed: nobody holds their locks. Blocks."""
    found = []
    for note in sorted(Path(kubelet_root).glob(f"{_STAGED}/*/*/{_NOTE}")):
        with contextlib.suppress(errors.CrustError), locked(note):
            found.append(note)
    return tuple(found)


@contextlib.contextmanager
def locked(note: str | os.PathLike[str]) -> Iterator[None]:
    """The note's lock, while the block runs. Blocks. Raises `TrialRuns`, and why there is no such note."""
    with (
        syscalls.translating(f"cannot lock {note}"),
        open(os.open(note, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file,
    ):
        if not locks.try_lock(file.fileno()):
            raise errors.NotReady.named(
                "TrialRuns",
                f"{note} is not undone",
                why="the `crust try` that wrote it runs",
                hint="wait for its end, or stop it: it undoes its steps",
            )
        yield


def wanted_of(note: Path) -> TrialRequest:
    """What was tried. Blocks. Raises `TrialNoteUnreadable`, and why the file cannot be read."""
    data = durable.read(note, limit_bytes=_NOTE_MAX_BYTES)
    try:
        return TrialRequest.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise errors.Corrupt.named(
            "TrialNoteUnreadable",
            f"{note} does not say what was tried",
            why=f"it is not the note of a `crust try`: {error.error_count()} errors",
            hint="`crust pool` shows the volume, whose name begins with crust-try-",
        ) from error


@dataclass
class Trial:
    """The steps, and those back. `csi` is the driver's socket for the CO."""

    wanted: TrialRequest
    inspect: asking.Stub
    csi: Port
    show: Show = click.echo

    def __post_init__(self) -> None:
        self._node = stub(csi_pb2_grpc.NodeStub, self.csi)
        self._controller = stub(csi_pb2_grpc.ControllerStub, self.csi)
        name, root = self.wanted.name, self.wanted.target_root
        staged = (
            f"{root}/{_STAGED}/{self.wanted.driver}/{hashlib.sha256(name.encode()).hexdigest()}"
        )
        self.note = f"{staged}/{_NOTE}"
        self.staging = f"{staged}/globalmount"
        self.target = f"{root}/pods/{name}/volumes/kubernetes.io~csi/{name}/mount"
        self._undo: list[Message] = []

    async def forth(self) -> None:
        """Create, stage, publish, and wait. Raises what refuses a step."""
        # from before the publish: a sandbox may be over before anybody asks for the volume's state
        events = await asking.events_of(self.inspect)
        for directory in (self.staging, os.path.dirname(self.target)):
            await workers.run(_make_directory, directory)
        context: Mapping[str, str] = {}
        async for request, undo in self._steps():
            self._undo.append(undo)  # before the step: one that was refused may have left something
            if "publish_context" in request.DESCRIPTOR.fields_by_name:
                request.publish_context.update(context)
            answer = await self._step(request)
            context = getattr(answer, "publish_context", context)
        found = await self._entry()
        self.show(f"published {found.device} to {found.handler} at {self.target}")
        if self.wanted.wait_s:
            await self._claimed_and_ended(events, found.handler)

    def note_down(self) -> None:
        """Write the note; `back` removes it. Blocks. Raises why it cannot be written."""
        with syscalls.translating(f"cannot write {self.note}"):
            _make_directory(os.path.dirname(self.note))
        durable.publish(self.note, self.wanted.model_dump_json().encode())

    async def adopt(self) -> None:
        """Find what a killed trial may have left, for `back`. Raises what refuses to say it."""
        async for _, undo in self._steps():
            self._undo.append(undo)

    async def _steps(self) -> AsyncIterator[tuple[Any, Message]]:
        """Create the volume; then each step that the driver has, and what undoes it."""
        mount = csi_pb2.VolumeCapability.MountVolume(fs_type=self.wanted.fs_type)
        mode = csi_pb2.VolumeCapability.AccessMode.SINGLE_NODE_WRITER
        access = csi_pb2.VolumeCapability.AccessMode(mode=mode)
        capability = csi_pb2.VolumeCapability(mount=mount, access_mode=access)
        create = csi_pb2.CreateVolumeRequest(
            name=self.wanted.name,
            capacity_range=csi_pb2.CapacityRange(required_bytes=self.wanted.size_bytes),
            volume_capabilities=[capability],
            parameters=self.wanted.parameters,
        )
        volume: csi_pb2.Volume = (await self._step(create)).volume
        self._undo.append(csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id))
        self.show(f"volume {volume.volume_id}")
        same: dict[str, Any] = {"volume_id": volume.volume_id}
        given = {**same, "volume_capability": capability}
        if _ATTACHES in await self._has(csi_pb2.ControllerGetCapabilitiesRequest()):
            node_id = (await self._call(csi_pb2.NodeGetInfoRequest())).node_id
            yield (
                csi_pb2.ControllerPublishVolumeRequest(
                    node_id=node_id, volume_context=volume.volume_context, **given
                ),
                csi_pb2.ControllerUnpublishVolumeRequest(node_id=node_id, **same),
            )
        given["volume_context"] = {
            **volume.volume_context,
            deferral_keys.DEFER: deferral_keys.Defer.ALWAYS.value,
            deferral_keys.RUNTIME_HANDLER: self.wanted.handler,
        }
        staging: dict[str, Any] = {"staging_target_path": self.staging}
        if _STAGES in await self._has(csi_pb2.NodeGetCapabilitiesRequest()):
            yield (
                csi_pb2.NodeStageVolumeRequest(**staging, **given),
                csi_pb2.NodeUnstageVolumeRequest(**staging, **same),
            )
        yield (
            csi_pb2.NodePublishVolumeRequest(target_path=self.target, **staging, **given),
            csi_pb2.NodeUnpublishVolumeRequest(target_path=self.target, **same),
        )

    async def _has(self, request: Message) -> set[int]:
        """The capabilities of a service."""
        answer = await self._call(request)
        return {capability.rpc.type for capability in answer.capabilities}

    async def _claimed_and_ended(
        self, events: AsyncIterator[inspect_pb2.Event], handler: str
    ) -> None:
        self.show(f"waiting for a sandbox with the mount source {self.target}")
        try:
            async with asyncio.timeout(self.wanted.wait_s):
                await self._until("claimed", events, is_claimed=True)
        except TimeoutError as error:
            raise errors.NotReady.named(
                "NotClaimed",
                f"no sandbox claimed the volume at {self.target} in {self.wanted.wait_s:g} s",
                why=f"it is published to the handler {handler}, which starts no sandbox by itself",
                hint="start a sandbox with that mount source meanwhile",
            ) from error
        self.show("waiting for the end of the sandbox")
        # then the unpublish is refused, and says who has it
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.wanted.wait_s):
                await self._until("released", events, is_claimed=False)

    async def _until(
        self, kind: str, events: AsyncIterator[inspect_pb2.Event], *, is_claimed: bool
    ) -> None:
        """The volume's state is asked for only if the proxy had to drop some events."""
        async for event in events:
            if event.target_path == self.target and event.kind in _SENTENCES:
                self.show(_SENTENCES[event.kind].format(event.message))
            if event.target_path == self.target and event.kind == kind:
                return
            if event.kind == "missed" and bool((await self._entry()).sandbox_id) is is_claimed:
                return
        raise errors.PeerUnavailable.named(
            "EventsEnded",
            "what sandboxes do with the volume is not known",
            why="the proxy ended its events: it stops, or is replaced by another process",
            hint="try again when the proxy serves",
        )

    async def _entry(self) -> inspect_pb2.DeferredVolume:
        for volume in await asking.deferred(self.inspect):
            if volume.target_path == self.target:
                return volume
        raise errors.RuntimeFailed(
            f"the volume at {self.target} is not deferred",
            why="the publish was answered OK, and the handoff directory has no entry",
            hint="read the proxy's log",
        )

    async def _step(self, request: Message) -> Any:
        answer = await self._call(request)
        self.show(f"{_name(request)}: OK")
        return answer

    async def _call(self, request: Message) -> Any:
        """A request's type is its RPC."""
        name = _name(request)
        rpc = getattr(self._node if name.startswith("Node") else self._controller, name)
        try:
            return await rpc(request, timeout=CALL_S, metadata=asking.WITH_ERROR_INFO)
        except PeerStatus as error:
            raise status.to_error(error) from error

    async def back(self) -> list[str]:
        """The steps back, newest first; returns what could not be undone, in sentences."""
        left = []
        for request in reversed(self._undo):
            try:
                await self._patiently(request)
            except errors.CrustError as error:
                left.append(f"{_name(request)}: {error.shown()}")
                break  # what is below is in use by it
        if not left:
            await workers.run(Path(self.note).unlink, missing_ok=True)
        for path in (os.path.dirname(self.target), self.staging):
            await workers.run(_remove_empty, path, self.wanted.target_root)
        return left

    async def _patiently(self, request: Message) -> None:
        """Some drivers answer ABORTED or UNAVAILABLE for a while."""
        for _ in range(_UNDO_ATTEMPTS - 1):
            with contextlib.suppress(errors.OperationPending, errors.PeerUnavailable):
                await self._step(request)
                return
            await asyncio.sleep(1)
        await self._step(request)


def _name(request: Message) -> str:
    return request.DESCRIPTOR.name.removesuffix("Request")


def _make_directory(path: str) -> None:
    os.makedirs(path, mode=0o750, exist_ok=True)


def _remove_empty(path: str, root: str) -> None:
    """The directory and those above it, as long as they are empty."""
    while path.startswith(f"{root}/"):
        try:
            os.rmdir(path)
        except FileNotFoundError:
            pass
        except OSError:
            return
        path = os.path.dirname(path)


async def try_publish(run_dir: str, wanted: TrialRequest) -> int:
    """Try it; returns the exit code: 0 it worked and nothing is left, 1 otherwise."""
    async with asking.inspecting(run_dir) as inspect:
        served = await asking.drivers(inspect)
        found = [each for each in served if wanted.driver in ("", each.name)]
        if len(found) != 1:
            raise errors.NotFound.named(
                "NoDriverToTry",
                f"no driver {wanted.driver or '(none was named)'} can be tried",
                why=f"the proxy serves {', '.join([each.name for each in served]) or 'none'}",
                hint="choose one with --driver; `crust drivers` shows them",
            )
        wanted = wanted.model_copy(update={"driver": found[0].name})
        async with SocketPort(found[0].socket) as csi:
            trial = Trial(wanted, inspect, csi)
            await workers.run(trial.note_down)
            with locked(trial.note):
                return await _forth_and_back(trial)


async def _forth_and_back(trial: Trial) -> int:
    failed = False
    try:
        with _ended_by(signal.SIGTERM, signal.SIGHUP):
            await trial.forth()
    except errors.CrustError as error:
        click.echo(error.shown(), err=True)
        failed = True
    finally:
        left = await trial.back()
        for each in left:
            click.echo(f"not removed: {each}", err=True)
    return 1 if failed or left else 0


@contextlib.contextmanager
def _ended_by(*signals: signal.Signals) -> Iterator[None]:
    """The signals end the block as Ctrl-C does. While the steps back run, they are ignored."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "a coroutine runs in a task"
    for each in signals:
        loop.add_signal_handler(each, task.cancel)
    try:
        yield
    finally:
        for each in signals:
            loop.add_signal_handler(each, lambda: None)


async def undo(note: Path, inspect: asking.Stub) -> tuple[str, ...]:
    """Undo the trial of a note, whose command was killed; returns what is left, in sentences.

    Raises as `locked` and `wanted_of`, and what the driver refuses.
    """
    with locked(note):
        wanted = await workers.run(wanted_of, note)
        sockets = {driver.name: driver.socket for driver in await asking.drivers(inspect)}
        if wanted.driver not in sockets:
            return (f"the proxy serves no driver {wanted.driver}",)
        async with SocketPort(sockets[wanted.driver]) as csi:
            trial = Trial(wanted, inspect, csi, lambda _: None)
            await trial.adopt()
            return tuple(await trial.back())
