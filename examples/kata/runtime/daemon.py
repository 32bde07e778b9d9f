"""Composition of the daemon: guest image and accelerator, then the VMs that run already, then the sockets.

The handler registers last, and registers again whenever the proxy restarts. Stopping the daemon leaves the VMs
running.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import crust
from crust.blockdriver.ceph.attach import Host
from crust.core import errors, volumes
from crust.core.volumes import HandlerFeature
from crust.host.files import durable, locks
from crust.runtime_handler import blocking, registration, service
from examples.kata.guest import image
from examples.kata.runtime import ceph_images, control, handler, handoff, ports
from examples.kata.runtime.sandboxes import Sandboxes
from examples.kata.vm import accel, faults, images, machine, spec

_log = logging.getLogger(__name__)

GIVE_BACK_S = 30.0
"""Between two looks for claims of ended virtual machines in clusters: each lists a directory, mostly an empty one."""
FEATURES = frozenset(
    {
        HandlerFeature.GROUP,
        HandlerFeature.GROUP_CHANGE_POLICY,
        HandlerFeature.ONLINE_EXPAND,
        HandlerFeature.GROW,
        HandlerFeature.STATS,
        HandlerFeature.READ_ONLY,
        HandlerFeature.HEALTH,
        HandlerFeature.FREEZE,
        HandlerFeature.IO_LIMITS,
        HandlerFeature.FORMAT,
        HandlerFeature.SUB_PATH,
    }
)
FILESYSTEMS = frozenset({"btrfs", "ext4", "xfs"})
"""The filesystems that the guest agent can grow and report on, if the guest's kernel can mount them."""


@dataclass(frozen=True, slots=True)
class Options:
    """How the daemon is started."""

    run_dir: Path
    handlers_socket: str
    name: volumes.HandlerName
    volumes_root: str
    cache: Path
    claims: spec.ClaimHolder = "hypervisor"
    node: str = ""
    """This node's name, in the claims on images; empty: the host's name."""
    boot_timeout_s: float = machine.BOOT_S
    """How long a guest may take until its agent answers."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Starts and stops sandboxes as lines of text say, one at a time: `crust-conformance --runtime` writes them.

        start SANDBOX MOUNT_SOURCE   ok; refused WHY; ordinary: the source is no deferred volume
        stop SANDBOX                 ok; also if it is not there

    A sandbox has a volume and no container here. docs/runtime-author.md describes the lines.
    """

    sandboxes: Sandboxes
    handoff: ports.Handoff

    async def answer(self, line: str) -> str:
        """The answer to a line, without a newline."""
        try:
            match line.split():
                case ["start", sandbox, source]:
                    return await self._start(volumes.SandboxId(sandbox), source)
                case ["stop", sandbox]:
                    await self.sandboxes.stop(volumes.SandboxId(sandbox))
                    return "ok"
        except errors.CrustError as error:
            return f"refused {' '.join(error.shown().split())}"
        return "refused the line is not understood"

    async def _start(self, sandbox_id: volumes.SandboxId, source: str) -> str:
        resolved = await asyncio.to_thread(self.handoff.resolve, source)
        if isinstance(resolved, blocking.NotDeferred):
            return "ordinary"
        sandbox = await self.sandboxes.get(sandbox_id)
        await sandbox.use(resolved.record)
        return "ok"


@dataclass(frozen=True, slots=True)
class QemuVms:
    """`ports.Vms`, with this daemon's image and accelerator; a VM that is adopted keeps those of its start."""

    image: image.GuestImage
    acceleration: spec.Acceleration
    claims: spec.ClaimHolder = "hypervisor"
    boot_timeout_s: float = machine.BOOT_S

    async def start(self, name: str, directory: Path) -> machine.Machine:
        """See `machine.start`; raises VmStartFailed also if the directory cannot be used."""
        wanted = spec.MachineSpec(
            name, self.image, acceleration=self.acceleration, claims=self.claims
        )
        try:
            return await machine.start(wanted, directory, boot_timeout_s=self.boot_timeout_s)
        except OSError as err:
            raise faults.VmStartFailed(directory, str(err), "") from err

    async def adopt(self, directory: Path) -> machine.Machine:
        """See `machine.adopt`."""
        return await machine.adopt(directory)

    async def destroy(self, directory: Path) -> bool:
        """See `machine.destroy`."""
        return await machine.destroy(directory)


async def answer_lines(options: Options) -> None:
    """Serve, and answer the lines of standard input, until it ends."""
    async with running(options) as sandboxes:
        front = Lines(sandboxes, sandboxes.handoff)
        while line := await asyncio.to_thread(sys.stdin.readline):
            answer = await front.answer(line)
            await asyncio.to_thread(print, answer, flush=True)


async def run(options: Options) -> None:
    """Serve until cancelled."""
    async with running(options):
        await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def running(options: Options) -> AsyncIterator[Sandboxes]:
    """Serve while the block runs."""
    async with AsyncExitStack() as stack:
        lock = await asyncio.to_thread(_own, options.run_dir)
        stack.callback(lock.close)
        guest_image = await asyncio.to_thread(image.build, options.cache)
        accelerator = await accel.probe(guest_image, options.cache)
        _log.info("accelerator", extra={"kind": accelerator.kind, "why": accelerator.reason})
        vms = QemuVms(guest_image, accelerator.kind, options.claims, options.boot_timeout_s)
        endpoint = str(options.run_dir / "handler.sock")
        session = _session(options, guest_image, endpoint)
        host = await asyncio.to_thread(Host.this, options.node)
        in_clusters = ceph_images.CephImages(host, options.run_dir / "images")
        volumes_here = handoff.Directory(options.volumes_root, options.name, session, in_clusters)
        sandboxes = Sandboxes(options.run_dir / "sandboxes", vms, volumes_here)
        stack.push_async_callback(sandboxes.close)
        await sandboxes.adopt_all()
        await stack.enter_async_context(service.serving(endpoint, handler.Volumes(sandboxes)))
        socket = options.run_dir / "control.sock"
        await stack.enter_async_context(control.serving(socket, control.Control(sandboxes)))
        await stack.enter_async_context(session)
        giving_back = asyncio.create_task(_give_back(session, sandboxes), name="give back")
        stack.push_async_callback(_ended, giving_back)
        yield sandboxes


async def _give_back(session: registration.Registration, sandboxes: Sandboxes) -> None:
    """End the claims of ended VMs in clusters while the proxy is there, which has the keys; again if it failed."""
    while True:
        await session.registered.wait()
        await sandboxes.give_back_left()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GIVE_BACK_S):
                await session.lost.wait()


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _session(options: Options, guest: image.GuestImage, endpoint: str) -> registration.Registration:
    """The registration, which begins when it is kept."""
    luks = frozenset({HandlerFeature.LUKS}) if guest.opens_luks else frozenset[HandlerFeature]()
    images_ = frozenset({HandlerFeature.NETWORK_IMAGE} if images.can_be_opened() else ())
    request = registration.RegisterRequest(
        name=options.name,
        version=crust.__version__,
        endpoint=endpoint,
        filesystems=FILESYSTEMS & frozenset(guest.filesystems),
        features=FEATURES | luks | images_,
        max_volumes_per_sandbox=spec.VOLUME_SLOTS,
        guest_kernel=guest.kernel,
    )
    return registration.Registration(options.handlers_socket, request)


def _own(run_dir: Path) -> locks.ProcessLock:
    durable.make_directory(run_dir, 0o700)
    return locks.ProcessLock.acquire(run_dir / "runtime.lock")
