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
from crust.ceph.attach import Host
from crust.core import volumes
from crust.host.files import durable, locks
from crust.runtime_handler import registration, service
from crust.runtime_handler.registration import Feature
from examples.kata.guest import image
from examples.kata.runtime import ceph_images, control, handler, handoff, lines
from examples.kata.runtime.qemu_vms import QemuVms
from examples.kata.runtime.sandboxes import Sandboxes
from examples.kata.vm import accel, images, machine, spec

_log = logging.getLogger(__name__)

GIVE_BACK_S = 30.0
"""Between two looks for what virtual machines have left in clusters: a list of files, as a rule an empty one."""
FEATURES = frozenset(
    {
        Feature.GROUP,
        Feature.GROUP_CHANGE_POLICY,
        Feature.ONLINE_EXPAND,
        Feature.GROW,
        Feature.STATS,
        Feature.READ_ONLY,
        Feature.HEALTH,
        Feature.FREEZE,
        Feature.IO_LIMITS,
        Feature.FORMAT,
        Feature.SUB_PATH,
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


async def answer_lines(options: Options) -> None:
    """Serve, and answer the lines of standard input, until it ends."""
    async with running(options) as sandboxes:
        front = lines.Lines(sandboxes, sandboxes.handoff)
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
        await stack.enter_async_context(registration.keeping(session))
        giving_back = asyncio.create_task(_give_back(session, sandboxes), name="give back")
        stack.push_async_callback(_ended, giving_back)
        yield sandboxes


async def _give_back(session: registration.Registration, sandboxes: Sandboxes) -> None:
    """End what VMs have left in clusters while the proxy is there, which has the keys; again if it failed."""
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
    luks = frozenset({Feature.LUKS}) if guest.opens_luks else frozenset[Feature]()
    images_ = frozenset({Feature.NETWORK_IMAGE} if images.can_be_opened() else ())
    request = registration.RegisterRequest(
        name=options.name,
        version=crust.__version__,
        endpoint=endpoint,
        filesystems=FILESYSTEMS & frozenset(guest.filesystems),
        features=FEATURES | luks | images_,
        max_volumes_per_sandbox=spec.VOLUME_SLOTS,
    )
    return registration.Registration(options.handlers_socket, request)


def _own(run_dir: Path) -> locks.ProcessLock:
    durable.make_directory(run_dir, 0o700)
    return locks.ProcessLock.acquire(run_dir / "runtime.lock")
