"""A node in one of the forms in which crust is shipped, as the list of what a node must do uses it.

The node has a root directory of its own with the paths that the pages name, so that a kubelet, a runtime and an
operator use the same paths in every form. A runtime is a process of the node that registers and claims by the SDK,
without a virtual machine.
"""

import asyncio
import subprocess
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio

from crust.core import deferral_keys
from crust.core.settings import OWN_DRIVER
from crust.core.volumes import HandlerFeature
from crust.handoff.record import Record
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from examples.drivers import minimal
from examples.kata.demo.kubelet import Kubelet
from tests.support.booted_systemd import CHECKOUT
from tests.support.co import Co, capability
from tests.support.faults.refusals import until_probe

ANSWER_S = 120.0
"""The deadline of a call, on a machine that does other work too."""
KUBELET = "/var/lib/kubelet"
STAGING = f"{KUBELET}/plugins/kubernetes.io/csi/v/globalmount"
TARGET = f"{KUBELET}/pods/p/volumes/kubernetes.io~csi/v/mount"
VENDORS_SOCKET = f"{KUBELET}/plugins/vendor/csi.sock"
HANDLER = """
import asyncio
from crust.core import volumes
from crust.runtime_handler import registration, service

class Guests(service.Handler):
    async def stats(self, target):
        usage = volumes.VolumeUsage(volumes.UsageUnit.BYTES, 1000, 400, 500)
        return volumes.VolumeStats((usage,))

    async def expand(self, target, capacity):
        return capacity.required_bytes

async def main():
    features = frozenset(map(volumes.HandlerFeature, {features}))
    filesystems = frozenset({{"ext4", "xfs", "btrfs"}})
    socket = "/run/crust/example/handler.sock"
    request = registration.RegisterRequest(
        volumes.HandlerName("kata"), "1.0", socket, filesystems, features
    )
    served = service.serving(socket, Guests())
    async with served, registration.Registration("/run/crust/handlers.sock", request) as session:
        await session.registered.wait()
        print("registered", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
CLAIM = """
import sys
from crust.core import volumes
from crust.runtime_handler.blocking import State, claim_volume
names = volumes.TargetPath(sys.argv[1]), volumes.SandboxId("s"), volumes.HandlerName("kata")
with claim_volume("/run/crust/volumes", *names, features=[*volumes.HandlerFeature]) as claim:
    claim.report(State.ERROR if sys.argv[2:] else State.MOUNTED, *sys.argv[2:])
    print(claim.record.shown_source, flush=True)
    sys.stdin.read()
"""
NO_FORMAT = frozenset(HandlerFeature) - {HandlerFeature.FORMAT}
"""As Kata, which makes no filesystem."""


class Form(ABC):
    """A node on which crust runs as it is shipped."""

    driver: str = OWN_DRIVER
    """Whose volumes the list is about."""
    unseen: str = ""
    """What crust cannot look at in this form on this machine; empty: nothing."""
    secrets: Mapping[str, str] = MappingProxyType({})
    """Of each stage of its driver."""
    features: frozenset[HandlerFeature] = NO_FORMAT
    """Of its handler, without which its driver's volumes cannot be published."""
    left: "Volume | None" = None
    """That of an entry that failed."""

    @property
    @abstractmethod
    def root(self) -> Path:
        """The node's root directory, seen from outside."""

    @property
    @abstractmethod
    def python(self) -> str:
        """A Python of the node that has crust."""

    @property
    @abstractmethod
    def processes(self) -> tuple[str, ...]:
        """The processes of crust, by the names of what starts them."""

    @abstractmethod
    def kill(self, process: str) -> None:
        """SIGKILL; what starts the process does so again. It may not serve yet when this returns."""

    @abstractmethod
    def reboot(self) -> None:
        """The node boots again, and crust is started; it may not serve yet when this returns."""

    @abstractmethod
    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command on the node, as root; never raises for its exit code."""

    @abstractmethod
    def running(self, *command: str) -> AbstractContextManager["subprocess.Popen[str]"]:
        """A command that runs on the node beside others, its input and output pipes; it ends with the block."""

    @abstractmethod
    def crust(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """The command `crust`, as an operator runs it in this form."""

    def seen(self, path: str) -> str:
        """A path below the node's /run, seen from outside."""
        return f"{self.root}{path}"

    def output(self, *command: str) -> str:
        """The output of a command that must succeed."""
        done = self.run(*command)
        assert done.returncode == 0, f"{' '.join(command)}: {done}"
        return done.stdout

    def is_mounted(self, target: str = TARGET) -> bool:
        """Whether the node itself sees a mount there."""
        return self.run("mountpoint", "--quiet", target).returncode == 0

    def socket(self, driver: str) -> str:
        """That of a driver which the kubelet calls, seen from outside."""
        return f"{self.root}{KUBELET}/plugins/{driver}/csi.sock"

    @asynccontextmanager
    async def called(self, driver: str = "") -> AsyncIterator[Co]:
        """The socket of a driver that the kubelet calls (its own if none is named), and the kubelet's directories."""
        self.output("mkdir", "-p", STAGING, str(Path(TARGET).parent))
        async with channel.connect(self.socket(driver or self.driver)) as connected:
            await until_probe(connected, grpc.StatusCode.OK, within_s=ANSWER_S)
            yield Co(connected, ANSWER_S, waits=True)

    async def until_registered(self) -> None:
        """Wait for the handler kata; what registers it was perhaps started a moment ago."""
        kubelet = Kubelet(self.root, self.socket(self.driver), self.seen("/run/crust/inspect.sock"))
        try:
            await kubelet.wait_ready("kata")
        finally:
            await kubelet.close()

    @asynccontextmanager
    async def handler(
        self, features: frozenset[HandlerFeature] | None = None
    ) -> AsyncIterator[None]:
        """The runtime handler kata, a process of the node, registered during the block. Its guests are numbers."""
        features = self.features if features is None else features
        self.output(
            "mkdir", "-p", "/run/crust/example"
        )  # below the run directory a pod sees it too
        program = HANDLER.format(features=sorted(feature.value for feature in features))
        with self.running(self.python, "-c", program) as process:
            assert process.stdout is not None
            line = await asyncio.to_thread(process.stdout.readline)
            assert line == "registered\n", line
            yield

    @contextmanager
    def sandbox(self, target: str = TARGET, error: str = "") -> Iterator[str]:
        """A sandbox that has the volume of the target, by a process among the node's own; its device, or its image.

        With `error` it reports that. A sandbox that something else has ended is not ended again.
        """
        reported = (error,) if error else ()
        with self.running(self.python, "-c", CLAIM, target, *reported) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            device = process.stdout.readline().strip()
            assert device.startswith(("/dev/", "image ")), device + process.stdout.read()
            yield device
            process.stdin.close()
            assert process.wait(60) == 0 or error

    @contextmanager
    def vendors_driver(self) -> Iterator[None]:
        """The vendor's driver: a process of the node, which knows nothing of crust and serves at `VENDORS_SOCKET`."""
        self.output("mkdir", "-p", str(Path(VENDORS_SOCKET).parent))
        arguments = f"--socket {VENDORS_SOCKET} --state-dir /var/lib/crust/vendor --node-id n1"
        line = f"cd {CHECKOUT} && exec {self.python} -m {minimal.__name__} {arguments}"
        with self.running("sh", "-c", line):
            yield

    def needs_recovery(self, record: Record) -> bool:
        """Whether the ext4 of a published volume has a log that is to be replayed."""
        return "needs_recovery" in self.output("dumpe2fs", "-h", record.device)

    @asynccontextmanager
    async def cleaned(self) -> AsyncIterator[None]:
        """After the block the volume of a failed entry is removed, by a node that can do so again."""
        try:
            yield
        finally:
            if self.left is not None:
                left, self.left = self.left, None
                with self.vendors_driver() if left.driver != self.driver else nullcontext():
                    async with self.called(left.driver) as co:
                        await replace(left, co=co).remove()


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume, and the calls of its kubelet. Its context says whether it is deferred, as a StorageClass does."""

    co: Co
    created: csi_pb2.Volume
    capability: csi_pb2.VolumeCapability
    driver: str = OWN_DRIVER
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Of the stage."""

    @property
    def id(self) -> str:
        return self.created.volume_id

    @property
    def stages(self) -> bool:
        """Whether the driver has STAGE_UNSTAGE_VOLUME."""
        return self.driver != minimal.NAME

    async def stage(self) -> None:
        if self.stages:
            context, secrets = dict(self.created.volume_context), self.secrets
            given = self.capability
            await self.co.stage(self.id, STAGING, given, volume_context=context, secrets=secrets)

    async def publish(self, target: str = TARGET, *, defer: bool = True, **fields: Any) -> None:
        context = {
            **self.created.volume_context,
            deferral_keys.DEFER: "always" if defer else "never",
            deferral_keys.RUNTIME_HANDLER: "kata",
            deferral_keys.CREATED_EMPTY: "true",
        }
        staging = STAGING if self.stages else ""
        fields = {"given": self.capability, "defer": False, "staging": staging, **fields}
        await self.co.publish(self.id, target, volume_context=context, **fields)

    async def unpublish(self, target: str = TARGET) -> None:
        """Again, as a kubelet does, while a runtime has the claim's lock for a moment and no sandbox is named."""
        while True:
            try:
                await self.co.unpublish(self.id, target)
            except grpc.aio.AioRpcError as error:
                if "or it is being unpublished" not in (error.details() or ""):
                    raise
            else:
                return

    async def unstage(self) -> None:
        if self.stages:
            await self.co.unstage(self.id, STAGING)

    async def grow(self, size: int) -> None:
        """As an external-resizer and the kubelet do: the controller only if it advertises that."""
        rpc = csi_pb2.ControllerServiceCapability.RPC.EXPAND_VOLUME
        asked = csi_pb2.ControllerGetCapabilitiesRequest()
        answer = await self.co.controller.ControllerGetCapabilities(asked, timeout=ANSWER_S)
        if any(each.rpc.type == rpc for each in answer.capabilities):
            await self.co.grow(self.id, size)
        assert (await self.co.expand(self.id, TARGET, size)).capacity_bytes >= size

    async def copy(self, **source: str) -> "Volume":
        """A new volume of a `snapshot` or a `volume`."""
        created = await self.co.create("copy", self.capability, **source)
        return replace(self, created=created)

    async def remove(self) -> None:
        await self.unpublish()
        await self.unstage()
        await self.co.delete(self.id)


@asynccontextmanager
async def staged(
    form: Form,
    given: csi_pb2.VolumeCapability | None = None,
    *,
    driver: str = "",
    features: frozenset[HandlerFeature] | None = None,
    runtime: AbstractAsyncContextManager[None] | None = None,
    secrets: Mapping[str, str] | None = None,
    **fields: Any,
) -> AsyncIterator[Volume]:
    """A new volume, staged beside a runtime, else the form's own handler with these features; the block unpublishes
    it, or fails in `form.cleaned`.
    """
    given, driver = given or capability(), driver or form.driver
    async with form.called(driver) as co, runtime or form.handler(features):
        created = await co.create("v", given, **fields)
        own = form.secrets if driver == form.driver else {}
        volume = Volume(co, created, given, driver, secrets or own)
        form.left = volume
        await volume.stage()
        yield volume
        await volume.unstage()
        await co.delete(volume.id)
        form.left = None
