"""`crust try`: a deferred publish as a kubelet makes it, with a volume of its own, and everything undone at the end.

    create, attach (where the driver asks for it), stage, publish deferred, show the entry;
    with --wait-s: until a sandbox has claimed the volume and has ended; then the same steps back

It touches no volume but the one that it creates, whose name is random. What a step back cannot remove is named, and
the exit code is 1. Ctrl-C goes the steps back, too.
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import click

from crust.cli import asking
from crust.core import deferral_keys, errors
from crust.host.process import workers
from crust.rpc import status
from crust.rpc.messages import extensions
from crust.rpc.port import Port, SocketPort, stub
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from crust.wire.v1 import inspect_pb2

CALL_S = 120.0
_METADATA = ((extensions.KEY, extensions.ERROR_INFO),)
_NODE_RPC = csi_pb2.NodeServiceCapability.RPC
_CONTROLLER_RPC = csi_pb2.ControllerServiceCapability.RPC
_UNDO_ATTEMPTS = 10
Show = Callable[[str], None]
State = Callable[[], Awaitable[inspect_pb2.DeferredVolume]]
_SENTENCES = {
    "claimed": "claimed by {}",
    "mounted": "mounted in {}",
    "failed": "failed in {}",
    "released": "released by {}",
}


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """What is tried."""

    driver: str
    handler: str
    size_bytes: int
    fs_type: str
    target_root: str
    parameters: Mapping[str, str]
    wait_s: float


class SandboxEvents:
    """The events of the volume at `target`. `show` gets a sentence for each.

    A sandbox may be over before anybody asks for the volume's state, so the events count, from before the publish on.
    The state is asked for only if the proxy had to drop some.
    """

    def __init__(
        self,
        events: AsyncIterator[inspect_pb2.Event],
        target: str,
        state: State,
        show: Show,
    ) -> None:
        self._events = events
        self._target = target
        self._state = state
        self._show = show

    async def claimed(self) -> None:
        """Return when a sandbox has claimed the volume. Raises EventsEnded."""
        while True:
            kind = await self._next()
            if kind == "claimed":
                return
            if kind == "missed" and (await self._state()).sandbox_id:
                return

    async def released(self) -> None:
        """Return when no sandbox has the volume any more. Raises EventsEnded."""
        while True:
            kind = await self._next()
            if kind == "released":
                return
            if kind == "missed" and not (await self._state()).sandbox_id:
                return

    async def _next(self) -> str:
        event = await anext(self._events, None)
        if event is None:
            raise errors.PeerUnavailable.named(
                "EventsEnded",
                "what sandboxes do with the volume is not known",
                why="the proxy ended its events: it stops, or is replaced by another process",
                hint="try again when the proxy serves",
            )
        if event.target_path == self._target and event.kind in _SENTENCES:
            self._show(_SENTENCES[event.kind].format(event.message))
        return event.kind if event.target_path in ("", self._target) else ""


@asynccontextmanager
async def watching(
    inspect: asking.Stub, target: str, state: State, show: Show
) -> AsyncIterator[SandboxEvents]:
    """The events from now on. `state` asks for the volume as it is."""
    stream = inspect.Watch(inspect_pb2.WatchRequest())  # ends with the port of `inspect`
    await stream.initial_metadata()
    yield SandboxEvents(aiter(stream), target, state, show)


@dataclass
class Trial:
    """The steps, and those back. `csi` is the driver's socket for the CO."""

    wanted: TrialRequest
    inspect: asking.Stub
    csi: Port
    driver: str
    name: str = field(default_factory=lambda: f"crust-try-{secrets.token_hex(4)}")

    def __post_init__(self) -> None:
        self.node = stub(csi_pb2_grpc.NodeStub, self.csi)
        self.controller = stub(csi_pb2_grpc.ControllerStub, self.csi)
        staged = hashlib.sha256(self.name.encode()).hexdigest()
        root = self.wanted.target_root
        self.staging = f"{root}/plugins/kubernetes.io/csi/{self.driver}/{staged}/globalmount"
        self.target = f"{root}/pods/{self.name}/volumes/kubernetes.io~csi/{self.name}/mount"
        self._undo: list[tuple[str, Callable[[], Awaitable[object]]]] = []

    async def forth(self) -> None:
        """Create, stage, publish, and wait. Raises what refuses a step."""
        mount = csi_pb2.VolumeCapability.MountVolume(fs_type=self.wanted.fs_type)
        mode = csi_pb2.VolumeCapability.AccessMode.SINGLE_NODE_WRITER
        access = csi_pb2.VolumeCapability.AccessMode(mode=mode)
        capability = csi_pb2.VolumeCapability(mount=mount, access_mode=access)
        volume = await self._create(capability)
        publish_context = await self._attach(volume, capability)
        context = {
            **volume.volume_context,
            deferral_keys.DEFER: deferral_keys.Defer.ALWAYS.value,
            deferral_keys.RUNTIME_HANDLER: self.wanted.handler,
        }
        common: dict[str, Any] = {
            "volume_id": volume.volume_id,
            "volume_context": context,
            "publish_context": publish_context,
            "volume_capability": capability,
        }
        if await self._node_has(_NODE_RPC.STAGE_UNSTAGE_VOLUME):
            await workers.run(self._make_directory, self.staging)
            unstage = csi_pb2.NodeUnstageVolumeRequest(
                volume_id=volume.volume_id, staging_target_path=self.staging
            )
            self._back("NodeUnstageVolume", lambda: _call(self.node.NodeUnstageVolume, unstage))
            stage = csi_pb2.NodeStageVolumeRequest(staging_target_path=self.staging, **common)
            await self._step("NodeStageVolume", self.node.NodeStageVolume, stage)
        await workers.run(self._make_directory, os.path.dirname(self.target))
        unpublish = csi_pb2.NodeUnpublishVolumeRequest(
            volume_id=volume.volume_id, target_path=self.target
        )
        self._back("NodeUnpublishVolume", lambda: _call(self.node.NodeUnpublishVolume, unpublish))
        publish = csi_pb2.NodePublishVolumeRequest(
            target_path=self.target, staging_target_path=self.staging, **common
        )
        following = watching(self.inspect, self.target, self._entry, click.echo)
        async with following as events:  # from before the publish: a sandbox may be quick
            await self._step("NodePublishVolume", self.node.NodePublishVolume, publish)
            found = await self._entry()
            click.echo(f"published {found.device} to {found.handler} at {self.target}")
            if self.wanted.wait_s:
                await self._claimed_and_ended(events, found.handler)

    async def _create(self, capability: csi_pb2.VolumeCapability) -> csi_pb2.Volume:
        request = csi_pb2.CreateVolumeRequest(
            name=self.name,
            capacity_range=csi_pb2.CapacityRange(required_bytes=self.wanted.size_bytes),
            volume_capabilities=[capability],
            parameters=self.wanted.parameters,
        )
        answer = await self._step("CreateVolume", self.controller.CreateVolume, request)
        made: csi_pb2.Volume = answer.volume
        delete = csi_pb2.DeleteVolumeRequest(volume_id=made.volume_id)
        self._back("DeleteVolume", lambda: _call(self.controller.DeleteVolume, delete))
        click.echo(f"volume {made.volume_id}")
        return made

    async def _attach(
        self, volume: csi_pb2.Volume, capability: csi_pb2.VolumeCapability
    ) -> Mapping[str, str]:
        ask = csi_pb2.ControllerGetCapabilitiesRequest()
        answer = await _call(self.controller.ControllerGetCapabilities, ask)
        if _CONTROLLER_RPC.PUBLISH_UNPUBLISH_VOLUME not in {
            each.rpc.type for each in answer.capabilities
        }:
            return {}
        node_id = (await _call(self.node.NodeGetInfo, csi_pb2.NodeGetInfoRequest())).node_id
        request = csi_pb2.ControllerPublishVolumeRequest(
            volume_id=volume.volume_id,
            node_id=node_id,
            volume_capability=capability,
            volume_context=volume.volume_context,
        )
        detach = csi_pb2.ControllerUnpublishVolumeRequest(
            volume_id=volume.volume_id, node_id=node_id
        )
        rpc = self.controller.ControllerUnpublishVolume
        self._back("ControllerUnpublishVolume", lambda: _call(rpc, detach))
        made = await self._step(
            "ControllerPublishVolume", self.controller.ControllerPublishVolume, request
        )
        found: Mapping[str, str] = made.publish_context
        return found

    async def _node_has(self, wanted: int) -> bool:
        answer = await _call(self.node.NodeGetCapabilities, csi_pb2.NodeGetCapabilitiesRequest())
        return wanted in {each.rpc.type for each in answer.capabilities}

    async def _claimed_and_ended(self, events: SandboxEvents, handler: str) -> None:
        click.echo(f"waiting for a sandbox with the mount source {self.target}")
        try:
            async with asyncio.timeout(self.wanted.wait_s):
                await events.claimed()
        except TimeoutError as error:
            raise errors.NotReady.named(
                "NotClaimed",
                f"no sandbox claimed the volume at {self.target} in {self.wanted.wait_s:g} s",
                why=f"it is published to the handler {handler}, which starts no sandbox by itself",
                hint="start a sandbox with that mount source meanwhile",
            ) from error
        click.echo("waiting for the end of the sandbox")
        with contextlib.suppress(
            TimeoutError
        ):  # then the unpublish is refused, and says who has it
            async with asyncio.timeout(self.wanted.wait_s):
                await events.released()

    async def _entry(self) -> inspect_pb2.DeferredVolume:
        request = inspect_pb2.ListDeferredVolumesRequest()
        answer = await _call(self.inspect.ListDeferredVolumes, request)
        found = next((each for each in answer.volumes if each.target_path == self.target), None)
        if found is None:
            raise errors.RuntimeFailed(
                f"the volume at {self.target} is not deferred",
                why="the publish was answered OK, and the handoff directory has no entry",
                hint="read the proxy's log",
            )
        entry: inspect_pb2.DeferredVolume = found
        return entry

    async def _step(self, name: str, rpc: Callable[..., Awaitable[object]], request: object) -> Any:
        answer = await _call(rpc, request)
        click.echo(f"{name}: OK")
        return answer

    def _make_directory(self, path: str) -> None:
        os.makedirs(path, mode=0o750, exist_ok=True)

    def _back(self, name: str, undo: Callable[[], Awaitable[object]]) -> None:
        """Registered before the step: one that was refused may have left something."""
        self._undo.append((name, undo))

    async def back(self) -> list[str]:
        """The steps back, newest first; returns what could not be undone, in sentences."""
        left = []
        for name, undo in reversed(self._undo):
            try:
                await _patiently(undo)
            except errors.CrustError as error:
                left.append(f"{name}: {error.shown()}")
                break  # what is below is in use by it
            click.echo(f"{name}: OK")
        for path in (os.path.dirname(self.target), self.staging):
            await workers.run(_remove_empty, path, self.wanted.target_root)
        return left


async def _patiently(undo: Callable[[], Awaitable[object]]) -> None:
    """Some drivers answer ABORTED or UNAVAILABLE for a while."""
    for attempt in range(_UNDO_ATTEMPTS):
        try:
            await undo()
        except (errors.OperationPending, errors.PeerUnavailable):
            if attempt + 1 == _UNDO_ATTEMPTS:
                raise
            await asyncio.sleep(1)
        else:
            return


def _remove_empty(path: str, root: str) -> None:
    """The directory and those above it, as long as they are empty."""
    with contextlib.suppress(OSError):
        while path != root and path.startswith(f"{root}/"):
            os.rmdir(path)
            path = os.path.dirname(path)


async def _call(rpc: Callable[..., Awaitable[object]], request: object) -> Any:
    try:
        return await rpc(request, timeout=CALL_S, metadata=_METADATA)
    except PeerStatus as error:
        raise status.to_error(error) from error


async def run(run_dir: str, wanted: TrialRequest) -> int:
    """Try it; returns the exit code: 0 it worked and nothing is left, 1 otherwise."""
    async with asking.inspecting(run_dir) as inspect:
        served = (
            await inspect.ListDrivers(inspect_pb2.ListDriversRequest(), timeout=CALL_S)
        ).drivers
        found = [each for each in served if wanted.driver in ("", each.name)]
        if len(found) != 1:
            raise errors.NotFound.named(
                "NoDriverToTry",
                f"no driver {wanted.driver or '(none was named)'} can be tried",
                why=f"the proxy serves {', '.join([each.name for each in served]) or 'none'}",
                hint="choose one with --driver; `crust drivers` shows them",
            )
        async with SocketPort(found[0].socket) as csi:
            trial = Trial(wanted, inspect, csi, found[0].name)
            failed = False
            try:
                await trial.forth()
            except errors.CrustError as error:
                click.echo(error.shown(), err=True)
                failed = True
            finally:
                left = await trial.back()
                for each in left:
                    click.echo(f"not removed: {each}", err=True)
            return 1 if failed or left else 0
