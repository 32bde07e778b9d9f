"""`crust try`: a deferred publish like a kubelet's, with a volume of its own, and all steps undone at the end.

create, attach (if the driver attaches), stage, publish deferred, show the entry;
with --wait-s: until a sandbox has claimed the volume and has ended; then the steps are undone

It touches only the volume that it creates, whose name is random. If a step cannot be undone, the command names it,
and the exit code is 1. Ctrl-C, SIGTERM and SIGHUP undo the steps, too.

If the command is killed, its note remains, which has the request. The note is in the directory where a kubelet has
vol_data.json of a staged volume: a kubelet would remove it from a pod's directory. While the command runs, it holds
the note's lock. `crust gc` undoes the steps: CreateVolume of the same name answers the volume's id, and each undoing
call succeeds if there is nothing to undo (CSI).
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

from crust.core import deferral_keys, errors
from crust.host.files import durable, listing, locks
from crust.host.process import syscalls, workers
from crust.inspection import daemon_calls, refusals
from crust.rpc import status
from crust.rpc.port import Port, SocketPort, stub
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from crust.wire.v1 import inspect_pb2

CALL_S = 120.0
_STAGES = csi_pb2.NodeServiceCapability.RPC.STAGE_UNSTAGE_VOLUME
_ATTACHES = csi_pb2.ControllerServiceCapability.RPC.PUBLISH_UNPUBLISH_VOLUME
_UNDO_ATTEMPTS = 10
_ENDING = (signal.SIGTERM, signal.SIGHUP)
"""They end the steps as Ctrl-C does."""
_STAGED, _NOTE = "plugins/kubernetes.io/csi", "crust-try.json"
_NOTE_MAX_BYTES = 65536
_SHOWN_EVENTS = {"claimed": "by", "mounted": "in", "failed": "in", "released": "by"}


class TrialRequest(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The trial's volume and its driver. In JSON it is also the note."""

    name: str = pydantic.Field(default_factory=lambda: f"crust-try-{secrets.token_hex(4)}")
    driver: str
    handler: str
    size_bytes: int
    fs_type: str
    target_root: str
    parameters: Mapping[str, str]
    wait_s: float
    controller_socket: str = ""
    """Where CreateVolume and what else the sidecars call is answered; empty: where the kubelet calls."""


def killed_trials(kubelet_root: str) -> tuple[Path, ...]:
    """The notes of trials that were killed: no process holds their locks. Blocks. Raises as `locked`."""
    notes = []
    for note in listing.matching(kubelet_root, f"{_STAGED}/*/*/{_NOTE}"):
        with contextlib.suppress(errors.NotReady, errors.NotFound), locked(note):
            notes.append(note)
    return tuple(notes)


@contextlib.contextmanager
def locked(note: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the note's lock while the block runs. Blocks. Raises `TrialRuns`, and an error if the note is absent."""
    with (
        syscalls.translating(f"cannot lock {note}"),
        open(os.open(note, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file,
    ):
        if not locks.try_lock(file.fileno()):
            raise errors.NotReady.named(
                "TrialRuns", f"{note} is not undone", why="the `crust try` that wrote it runs"
            )
        yield


@dataclass
class Trial:
    """The steps of a trial, and their undoing. The ports are the driver's for a kubelet, and for sidecars."""

    request: TrialRequest
    inspect: daemon_calls.Stub
    csi: Port
    controller: Port
    show: Callable[[str], None] = click.echo

    def __post_init__(self) -> None:
        self._node = stub(csi_pb2_grpc.NodeStub, self.csi)
        self._controller = stub(csi_pb2_grpc.ControllerStub, self.controller)
        name, root = self.request.name, self.request.target_root
        staged = (
            f"{root}/{_STAGED}/{self.request.driver}/{hashlib.sha256(name.encode()).hexdigest()}"
        )
        self.note = f"{staged}/{_NOTE}"
        self.staging = f"{staged}/globalmount"
        self.target = f"{root}/pods/{name}/volumes/kubernetes.io~csi/{name}/mount"
        self._undo: list[Message] = []

    async def run_steps(self) -> None:
        """Create, stage, publish, and wait. Raises the refusal of a step."""
        # from before the publish: a sandbox may end before the volume's state is read
        events = await daemon_calls.events_of(self.inspect)
        for directory in (self.staging, os.path.dirname(self.target)):
            await workers.run(_make_directory, directory)
        context: Mapping[str, str] = {}
        async for request, undo in self._steps():
            self._undo.append(undo)  # before the step: a refused step may have had an effect
            if "publish_context" in request.DESCRIPTOR.fields_by_name:
                request.publish_context.update(context)
            answer = await self._step(request)
            context = getattr(answer, "publish_context", context)
        volume = await self._entry()
        self.show(f"published {volume.device} to {volume.handler} at {self.target}")
        if self.request.wait_s:
            await self._claimed_and_ended(events, volume.handler)

    def note_down(self) -> None:
        """Write the note; `undo_steps` removes it. Blocks. Raises an error if it cannot be written."""
        with syscalls.translating(f"cannot write {self.note}"):
            _make_directory(os.path.dirname(self.note))
        durable.write_file(self.note, self.request.model_dump_json().encode())

    async def adopt(self) -> None:
        """Find the steps of a killed trial, for `undo_steps`. Raises the driver's refusal."""
        async for _, undo in self._steps():
            self._undo.append(undo)

    async def _steps(self) -> AsyncIterator[tuple[Any, Message]]:
        """Create the volume; then yield each step of the driver, with the request that undoes it."""
        mount = csi_pb2.VolumeCapability.MountVolume(fs_type=self.request.fs_type)
        mode = csi_pb2.VolumeCapability.AccessMode.SINGLE_NODE_WRITER
        access = csi_pb2.VolumeCapability.AccessMode(mode=mode)
        capability = csi_pb2.VolumeCapability(mount=mount, access_mode=access)
        create = csi_pb2.CreateVolumeRequest(
            name=self.request.name,
            capacity_range=csi_pb2.CapacityRange(required_bytes=self.request.size_bytes),
            volume_capabilities=[capability],
            parameters=self.request.parameters,
        )
        volume: csi_pb2.Volume = (await self._step(create)).volume
        self._undo.append(csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id))
        self.show(f"volume {volume.volume_id}")
        by_id: dict[str, Any] = {"volume_id": volume.volume_id}
        fields = {**by_id, "volume_capability": capability}
        if _ATTACHES in await self._has(csi_pb2.ControllerGetCapabilitiesRequest()):
            node_id = (await self._call(csi_pb2.NodeGetInfoRequest())).node_id
            yield (
                csi_pb2.ControllerPublishVolumeRequest(
                    node_id=node_id, volume_context=volume.volume_context, **fields
                ),
                csi_pb2.ControllerUnpublishVolumeRequest(node_id=node_id, **by_id),
            )
        fields["volume_context"] = {
            **volume.volume_context,
            deferral_keys.DEFER: deferral_keys.Defer.ALWAYS.value,
            deferral_keys.RUNTIME_HANDLER: self.request.handler,
        }
        staging: dict[str, Any] = {"staging_target_path": self.staging}
        if _STAGES in await self._has(csi_pb2.NodeGetCapabilitiesRequest()):
            yield (
                csi_pb2.NodeStageVolumeRequest(**staging, **fields),
                csi_pb2.NodeUnstageVolumeRequest(**staging, **by_id),
            )
        yield (
            csi_pb2.NodePublishVolumeRequest(target_path=self.target, **staging, **fields),
            csi_pb2.NodeUnpublishVolumeRequest(target_path=self.target, **by_id),
        )

    async def _has(self, request: Message) -> set[int]:
        answer = await self._call(request)
        return {capability.rpc.type for capability in answer.capabilities}

    async def _claimed_and_ended(
        self, events: AsyncIterator[inspect_pb2.Event], handler: str
    ) -> None:
        self.show(f"waiting for a sandbox with the mount source {self.target}")
        try:
            async with asyncio.timeout(self.request.wait_s):
                await self._until("claimed", events, is_claimed=True)
        except TimeoutError as error:
            raise errors.NotReady.named(
                "NotClaimed",
                f"no sandbox claimed the volume at {self.target} in {self.request.wait_s:g} s",
                why=f"it is published to the handler {handler}, and the trial starts no sandbox",
            ) from error
        self.show("waiting for the end of the sandbox")
        try:
            async with asyncio.timeout(self.request.wait_s):
                await self._until("released", events, is_claimed=False)
        except TimeoutError:
            return  # the unpublish is refused, and names the sandbox

    async def _until(
        self, kind: str, events: AsyncIterator[inspect_pb2.Event], *, is_claimed: bool
    ) -> None:
        """Wait for an event. The volume's state is read only if the proxy had to drop some events."""
        async for event in events:
            if event.target_path == self.target and event.kind in _SHOWN_EVENTS:
                self.show(f"{event.kind} {_SHOWN_EVENTS[event.kind]} {event.message}")
            if event.target_path == self.target and event.kind == kind:
                return
            if event.kind == "missed" and bool((await self._entry()).sandbox_id) is is_claimed:
                return
        raise errors.PeerUnavailable.named(
            "EventsEnded",
            "the state of the volume's sandbox is not known",
            why="the proxy ended its events: it stops, or is replaced by another process",
        )

    async def _entry(self) -> inspect_pb2.DeferredVolume:
        for volume in await daemon_calls.deferred(self.inspect):
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
        name = _name(request)
        rpc = getattr(self._node if name.startswith("Node") else self._controller, name)
        try:
            return await rpc(request, timeout=CALL_S, metadata=daemon_calls.WITH_ERROR_INFO)
        except PeerStatus as error:
            raise status.to_error(error) from error

    async def undo_steps(self) -> list[str]:
        """Undo the steps, newest first; returns a sentence for each that could not be undone."""
        remaining = []
        for request in reversed(self._undo):
            try:
                await self._patiently(request)
            except errors.CrustError as error:
                remaining.append(f"{_name(request)}: {error.shown()}")
                break  # this step uses the results of the earlier ones
        if not remaining:
            await workers.run(Path(self.note).unlink, missing_ok=True)
        for path in (os.path.dirname(self.target), self.staging):
            try:
                await workers.run(_remove_empty, path, self.request.target_root)
            except errors.CrustError as error:
                remaining.append(error.shown())
        return remaining

    async def _patiently(self, request: Message) -> None:
        """Repeat the request while the driver answers ABORTED or UNAVAILABLE, as some do for a while."""
        for left in reversed(range(_UNDO_ATTEMPTS)):
            try:
                await self._step(request)
                return
            except (errors.OperationPending, errors.PeerUnavailable):
                if not left:
                    raise
            await asyncio.sleep(1)


def _name(request: Message) -> str:
    return request.DESCRIPTOR.name.removesuffix("Request")


def _make_directory(path: str) -> None:
    os.makedirs(path, mode=0o750, exist_ok=True)


def _remove_empty(path: str, root: str) -> None:
    """Remove the directory and its parents, as long as they are empty."""
    with syscalls.translating(f"cannot remove {path}"):
        while path.startswith(f"{root}/") and not syscalls.names_in(path):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(path)
            path = os.path.dirname(path)


async def try_publish(run_dir: str, request: TrialRequest) -> int:
    """Run the trial; returns the exit code: 0 it worked and all steps are undone, 1 otherwise."""
    async with daemon_calls.inspecting(run_dir) as inspect:
        served = await daemon_calls.drivers(inspect)
        matching = [driver for driver in served if request.driver in ("", driver.name)]
        if len(matching) != 1:
            raise errors.NotFound.named(
                "NoDriverToTry",
                f"no driver {request.driver or '(none was named)'} can be tried",
                why=f"the proxy serves {', '.join([driver.name for driver in served]) or 'none'}",
            )
        request = request.model_copy(update={"driver": matching[0].name})
        socket = matching[0].socket
        by_sidecars = request.controller_socket or socket
        async with SocketPort(socket) as csi, SocketPort(by_sidecars) as controller:
            trial = Trial(request, inspect, csi, controller)
            await workers.run(trial.note_down)
            with locked(trial.note):
                return await _run_and_undo(trial)


async def _run_and_undo(trial: Trial) -> int:
    failure: errors.CrustError | None = None
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "a coroutine runs in a task"
    try:
        for number in _ENDING:
            loop.add_signal_handler(number, task.cancel)
        await trial.run_steps()
    except errors.CrustError as error:
        refusals.tell(error)
        failure = error
    finally:
        for number in _ENDING:  # from now on ignored
            loop.add_signal_handler(number, lambda: None)
        remaining = await trial.undo_steps()
        for sentence in remaining:
            refusals.tell(f"not removed: {sentence}")
    return 1 if failure or remaining else 0


async def undo(note: Path, inspect: daemon_calls.Stub) -> tuple[str, ...]:
    """Undo the trial of a note, whose command was killed; returns a sentence for each remaining step.

    Raises `TrialNoteUnreadable`, as `locked`, the driver's refusal, and an error if the note cannot be read.
    """
    with locked(note):
        data = await workers.run(durable.read, note, limit_bytes=_NOTE_MAX_BYTES)
        try:
            request = TrialRequest.model_validate_json(data)
        except pydantic.ValidationError as error:
            raise errors.Corrupt.named(
                "TrialNoteUnreadable",
                f"the note {note} cannot be read",
                why=f"it is not the note of a `crust try`: {error.error_count()} errors",
            ) from error
        sockets = {driver.name: driver.socket for driver in await daemon_calls.drivers(inspect)}
        if request.driver not in sockets:
            return (f"the proxy serves no driver {request.driver}",)
        socket = sockets[request.driver]
        by_sidecars = request.controller_socket or socket
        async with SocketPort(socket) as csi, SocketPort(by_sidecars) as controller:
            trial = Trial(request, inspect, csi, controller, lambda _: None)
            await trial.adopt()
            return tuple(await trial.undo_steps())
