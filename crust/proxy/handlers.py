"""The registered runtime handlers, their features, and the service HandlerRegistry: a Register stream is a session.

Nothing is kept on disk. After a restart of the proxy the handlers register again within a second, so for a short time
after the start a look-up waits for the handler instead of failing.

The proxy checks a deferred publish before it calls the driver, by the request, and again by the driver's answer. If
the handler cannot serve the publish, it fails with the reason; it never becomes a host mount.
"""

import asyncio
import logging
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace

import crust
from crust.core import deferral_keys, errors, metrics, volumes
from crust.core.supervised import Health
from crust.core.volumes import HandlerFeature
from crust.handoff.record import needs, unsupported
from crust.host.answers import NotSeen
from crust.host.block import openers
from crust.host.process import workers
from crust.proxy.table import Entries, Event, Table
from crust.proxy.target import Wanted
from crust.rpc import channel
from crust.rpc.call import Call
from crust.rpc.messages import crust_v1, csi
from crust.rpc.messages.crust_v1 import HandlerNameTaken, InvalidRegistration
from crust.rpc.port import Port, SocketPort, stub
from crust.rpc.serving import sockets
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import handlers_pb2, handlers_pb2_grpc

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredHandler(crust_v1.RegisterRequest):
    """A registered runtime handler; `port` ends with the session."""

    port: Port = field(repr=False, compare=False)
    registered_at_s: float = field(default_factory=time.time, compare=False)
    health: Health = field(default_factory=Health, repr=False, compare=False)

    def report(self, problem: errors.CrustError | None) -> None:
        """Set whether it answers calls: a problem until it answers again, or its session ends."""
        self.health.report(f"runtime handler {self.name}", problem, is_fatal=False)

    @property
    def stub(self) -> "handlers_pb2_grpc.RuntimeHandlerAsyncStub":
        return stub(handlers_pb2_grpc.RuntimeHandlerStub, self.port)


class Handlers:
    """The registered handlers; `grace_s`: the time after the start in which a look-up waits for a handler."""

    def __init__(self, *, grace_s: float) -> None:
        self._live: dict[str, RegisteredHandler] = {}
        self._changed = asyncio.Condition()
        self._grace_until_s = time.monotonic() + grace_s

    @asynccontextmanager
    async def session(self, handler: RegisteredHandler) -> AsyncIterator[None]:
        """Keep the handler registered while the block runs, and wake waiting calls; raises `HandlerNameTaken`."""
        holder = self._live.get(handler.name)
        if holder is not None:
            raise HandlerNameTaken(handler.name, holder.endpoint)
        self._live[handler.name] = handler
        metrics.handlers.set(len(self._live))
        try:
            async with self._changed:
                self._changed.notify_all()
            yield
        finally:
            del self._live[handler.name]
            metrics.handlers.set(len(self._live))

    def all(self) -> tuple[RegisteredHandler, ...]:
        """The registered handlers, by name."""
        return tuple(self._live[name] for name in sorted(self._live))

    async def choose(self, name: str | None) -> RegisteredHandler:
        """The handler for a new publish; raises `HandlerNotRegistered`, `AmbiguousHandler`.

        Without a name the only handler is chosen. Right after a start the first handler may not be the only one, so
        an unnamed publish waits until the grace ends or a second handler registers.
        """
        handler = await self._find(name)
        if handler is not None:
            return handler
        present = sorted(self._live)
        if name is None and len(present) > 1:
            raise errors.NotReady.named(
                "AmbiguousHandler",
                "the mount cannot be deferred: no runtime handler is named",
                why=f"registered are: {', '.join(present)}",
            )
        description = f"runtime handler {name!r}" if name else "a runtime handler"
        raise errors.NotReady.named(
            "HandlerNotRegistered",
            f"the mount cannot be deferred: {description} is needed",
            why=f"registered are: {', '.join(present)}" if present else "none is registered",
        )

    async def owner(self, name: str) -> RegisteredHandler:
        """The handler that a volume is published to; raises `HandlerDisconnected`."""
        handler = await self._find(name)
        if handler is None:
            raise errors.PeerUnavailable.named(
                "HandlerDisconnected",
                f"runtime handler {name!r} cannot be reached",
                why="it is not registered now",
            )
        return handler

    async def _find(self, name: str | None) -> RegisteredHandler | None:
        """The handler of the name; without a name the only one. Waits for it until the grace ends."""

        def is_certain() -> bool:
            return len(self._live) > 1 if name is None else name in self._live

        left_s = self._grace_until_s - time.monotonic()
        if left_s > 0 and not is_certain():
            try:
                async with asyncio.timeout(left_s) as grace, self._changed:
                    await self._changed.wait_for(is_certain)
            except TimeoutError:
                if not grace.expired():
                    raise
        if name is not None:
            return self._live.get(name)
        return next(iter(self._live.values())) if len(self._live) == 1 else None

    def guest_kernel(self, name: str | None) -> str:
        """The kernel of the handler's guests; empty: not known, or the handler is not registered now."""
        if name is None and len(self._live) == 1:
            (name,) = self._live
        return self._live[name].guest_kernel if name in self._live else ""


def check_features(
    handler: RegisteredHandler,
    fs_type: str,
    group: volumes.GroupChange | None,
    *,
    readonly: bool,
    mount: volumes.DeferredMount | None = None,
) -> None:
    """Raise `UnsupportedByHandler` for the first missing feature. An empty `fs_type` is not known yet.

    `mount`: the driver's answer. Only a guest can format a volume that only a guest can open; the proxy formats the
    others.
    """
    if fs_type and fs_type not in handler.filesystems:
        supported = ", ".join(sorted(handler.filesystems)) or "none"
        why = f"its filesystem is {fs_type!r}, and the runtime supports: {supported}"
        raise unsupported(handler.name, why)
    is_opened_here = mount is not None and mount.encryption is None and mount.image is None
    for feature, reason in needs(readonly=readonly, group=group, mount=mount):
        if feature not in handler.features and not (
            feature is HandlerFeature.FORMAT and is_opened_here
        ):
            raise unsupported(handler.name, reason, feature)


def mount_of(
    wanted: Wanted,
    request: csi_pb2.NodePublishVolumeRequest,
    response: csi_pb2.NodePublishVolumeResponse,
) -> volumes.DeferredMount:
    """The driver's mount with the CO's options; raises if the answer drops or changes a part of the request.

    `request` is the one that the driver was sent.
    """
    if not response.HasField("deferred_mount"):
        raise errors.RuntimeFailed.named(
            "DriverIgnoredDeferral",
            f"volume {wanted.key} was not deferred",
            why="the driver answered without deferred_mount",
        )
    answer = csi.deferred_mount(response.deferred_mount)
    access, group, sent = wanted.access, answer.group, request.volume_capability.mount
    # the driver could not answer what it was not sent (D-6)
    if access.group is not None and group is None and not sent.volume_supplemental_group:
        group = access.group
    elif access.group is not None and group is not None:
        is_sent = bool(sent.volume_supplemental_group_change_policy)
        group = group if is_sent else replace(group, policy=access.group.policy)
    asked_and_answered = {
        "fs_type": (access.fs_type and repr(access.fs_type), repr(answer.fs_type)),
        "the group": (str(access.group or ""), str(group or "")),
    }
    for part, (wish, fact) in asked_and_answered.items():
        if wish and wish != fact:
            raise errors.RuntimeFailed.named(
                "DeferredMountMismatch",
                "the driver's deferred_mount differs from the request",
                why=f"{part} is {fact or 'none'}, and {wish} was requested",
            )
    if wanted.encryption is not None and answer.encryption is not wanted.encryption:
        raise errors.RuntimeFailed.named(
            "DriverIgnoredEncryption",
            f"volume {wanted.key} was not deferred",
            why=f"{deferral_keys.ENCRYPTION} is {wanted.encryption.value}, and the driver answered without "
            "encryption: the guest would write it unencrypted",
        )
    return replace(
        answer,
        group=group,
        readonly=answer.readonly or wanted.readonly,
        # the driver may not repeat the CO's options, and they must reach the runtime (KEP-2857)
        mount_options=(*answer.mount_options, *wanted.options),
    )


_POD = re.compile(r"(.*/pods/[^/]+/)")


def check_place(handler: RegisteredHandler, target: volumes.TargetPath, table: Table) -> None:
    """Raise TooManyVolumesInSandbox if the pod of the target has as many volumes as its sandbox can have, and
    PathTooLongForHandler if the runtime cannot be given a volume at such a path.

    The rows include running publishes: a kubelet publishes all volumes of a pod at once. The kubelet's path of a
    target names the pod; with other paths of a CO, the handler itself refuses the volume when the container starts.
    """
    length = len(os.fsencode(target.text))
    if 0 < handler.max_target_path_bytes < length:
        raise errors.NotReady.named(
            "PathTooLongForHandler",
            f"the volume cannot be published to runtime handler {handler.name!r} at {target}",
            why=f"the path has {length} bytes, and its runtime takes {handler.max_target_path_bytes}",
        )
    pod, most = _POD.match(target.text), handler.max_volumes_per_sandbox
    if not most or pod is None:
        return
    others = sum(
        row.handler == handler.name and row.path != target.text and row.path.startswith(pod[1])
        for row in table.rows()
    )
    if others >= most:
        raise errors.NotReady.named(
            "TooManyVolumesInSandbox",
            f"the volume cannot be published to runtime handler {handler.name!r} at {target}",
            why=f"its sandboxes have at most {most} volumes, and the pod has as many already",
        )


def _check_visible(endpoint: str) -> None:
    """Raise `NotSeen` unless the process at a handler's endpoint can be seen from here. Blocks."""
    pid = sockets.listener(endpoint)
    if pid is None:
        raise NotSeen(
            f"cannot see the runtime handler at {endpoint}",
            why="no process listens at that path, as the proxy sees it",
            hint="serve the endpoint before Register; a proxy in a pod sees only the directories that it mounts",
        )
    openers.check_visible(pid)


class HandlerRegistry:
    def __init__(self, handlers: Handlers, entries: Entries) -> None:
        self._handlers = handlers
        self._entries = entries
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End every stream, so that the server's stop does not wait for them."""
        self._stopping.set()

    async def Register(
        self, request: handlers_pb2.RegisterRequest, call: Call
    ) -> AsyncIterator[handlers_pb2.RegisterResponse]:
        """Register, respond, and keep the session until one side ends it.

        Raises `InvalidRegistration`, and `NotSeen` for a handler whose process cannot be looked at: its virtual
        machines would not be seen either, and a device that one of them has would pass for unused.
        """
        registration = crust_v1.registration(request)
        try:
            limit = channel.HANDLER_ANSWER_MAX_BYTES
            port = SocketPort(registration.endpoint, answer_max_bytes=limit)
        except errors.InvalidRequest as err:
            raise InvalidRegistration(str(err)) from err
        await workers.run(_check_visible, registration.endpoint)
        handler = RegisteredHandler(**asdict(registration), port=port, health=self._entries.health)
        async with port, self._handlers.session(handler):
            self._report("handler-registered", handler)
            try:
                yield handlers_pb2.RegisterResponse(
                    volumes_directory=self._entries.store.root, proxy_version=crust.__version__
                )
                await self._stopping.wait()
            finally:
                handler.report(None)
                self._report("handler-lost", handler)

    async def GetVolumeSecrets(
        self, request: handlers_pb2.GetVolumeSecretsRequest, call: Call
    ) -> handlers_pb2.GetVolumeSecretsResponse:
        """The secrets that the guest needs; empty if it needs none. They are in memory and nowhere else.

        A handler gets the secrets only while a live sandbox of its own has claimed the volume: the lock is held, and
        claim.json names the handler. Raises SecretsNotForCaller, SecretsForgotten, and the errors of the entry.
        """
        target = volumes.TargetPath.parse(request.target_path, role="target_path")
        record, handler = self._entries.table.expect(target.text), request.handler
        await self._handlers.owner(handler)
        claim = await self._entries.holder(record)
        # A held lock alone may be the proxy's own, which is unpublishing: then no sandbox is named.
        is_named = claim is not None and bool(claim.sandbox_id)
        if claim is None or not is_named or not claim.handler == record.handler == handler:
            raise errors.NotReady.named(
                "SecretsNotForCaller",
                f"runtime handler {handler[:63]!r} does not get the secrets of the volume at {target}",
                why="no live sandbox of that handler has claimed the volume",
            )
        if not record.mount.needs_secrets:
            return handlers_pb2.GetVolumeSecretsResponse()
        row = self._entries.table.at(target.text)
        if row is None or row.key != record.key or row.secrets is None:
            raise errors.NotReady.named(
                "SecretsForgotten",
                f"the secrets of the volume at {target} are not known any more",
                why="the proxy was started after the volume was published, and keeps secrets in memory only",
            )
        return handlers_pb2.GetVolumeSecretsResponse(secrets=row.secrets)

    def _report(self, kind: str, handler: RegisteredHandler) -> None:
        _log.info(kind, extra={"handler": handler.name, "endpoint": handler.endpoint})
        self._entries.events.emit(Event(kind, handler=handler.name))
