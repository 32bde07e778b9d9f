"""One microVM: start it, or adopt it from a process that died; plug volumes; stop it.

    <directory>/machine.json           the VM's identity, written before QEMU is started
    <directory>/owner.lock             flock of the one process that controls the VM
    <directory>/{control,agent}.sock   QEMU's QMP and the guest's agent
    <directory>/qemu.pid               written by QEMU
    <directory>/console.{in,out}, qemu.err   pipes (console.py)
    <directory>/keeper.sock            of the process that holds the claims, if QEMU does not (kept_descriptors.py)

QEMU runs in a session of its own and survives this process. Both sockets are bound and listened on before QEMU
starts, so connecting neither waits nor polls. A start that fails leaves no QEMU running. Closing a Machine only
releases control of the VM; `stop` and `kill` end it.
"""

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TypeVar

from crust.core import errors, volumes
from crust.runtime_handler.blocking import Process, process_of
from examples.kata.vm import (
    agent,
    block_nodes,
    console,
    descriptors,
    disks,
    faults,
    guest,
    images,
    kept_descriptors,
    process,
    qmp,
    values,
    vm_directory,
)
from examples.kata.vm import spec as spec_module

_log = logging.getLogger(__name__)

T = TypeVar("T")

BOOT_S = 60.0
UNPLUG_S = 20.0
SHUTDOWN_S = 60.0
"""A guest's time to end its containers and unmount its volumes."""
_POWER_OFF_S = 20.0


class Machine:
    """A running VM under this process's control. Made by `start` and `adopt`."""

    def __init__(self, directory: Path, identity: vm_directory.Identity, lock: int) -> None:
        self.directory = directory
        self.identity = identity
        self._lock = lock
        self._stack = contextlib.AsyncExitStack()
        self._stack.callback(os.close, lock)
        self.console = console.Console(directory)
        self._stack.callback(self.console.close)
        self._file_servers: list[process.Process] = []
        self._process: process.Process
        self._control: qmp.Qmp
        self.disks: disks.Disks
        self.descriptors: descriptors.HeldDescriptors | kept_descriptors.KeptDescriptors
        self.guest: guest.Guest

    @property
    def name(self) -> str:
        """The VM's name."""
        return self.identity.name

    @property
    def pid(self) -> int:
        """QEMU's process id."""
        return self._process.pid

    @property
    def named_process(self) -> Process:
        """The same, with its start. Raises `errors.NotFound` if it has ended."""
        named = process_of(self.pid)
        if not self.runs():  # then the number may be another process's
            raise errors.NotFound(f"QEMU, process {self.pid}, has ended")
        return named

    def runs(self) -> bool:
        """Whether QEMU has not ended."""
        return self._process.runs()

    async def attach(
        self, serial: str, source: Path, *, read_only: bool = False
    ) -> block_nodes.Disk:
        """Plug a block device or a regular file as the disk `serial` (1 to 20 letters, digits, _, -); idempotent.

        Raises InvalidSerial, NotADisk, SerialInUse, DiskInUse, NoFreeSlot, QemuCommandFailed, QmpDisconnected.
        """
        return await self.disks.attach(serial, source, read_only=read_only)

    async def attach_image(
        self,
        serial: str,
        image: volumes.NetworkImage,
        key: str,
        record: Callable[[], Awaitable[None]],
        *,
        read_only: bool,
    ) -> block_nodes.Disk:
        """Plug an image of a Ceph cluster; idempotent. `record` runs before the guest has it.

        Raises the errors of `record` and `attach`.
        """
        opened = images.OpenedImage(image, self.directory / f"ceph-{serial}.conf", key)
        return await self.disks.attach_image(serial, opened, record, read_only=read_only)

    async def plugged(self) -> tuple[str, ...]:
        """The disks that it has. Raises QemuCommandFailed, QmpDisconnected."""
        return await self.disks.serials()

    async def has_open(self, serial: str) -> bool:
        """Whether QEMU has the disk's source open. Raises QemuCommandFailed, QmpDisconnected."""
        return await self.disks.has_open(serial)

    async def detach(self, serial: str, *, timeout_s: float = UNPLUG_S) -> None:
        """Unmount in the guest, then unplug; absent is success. Raises GuestBusy, UnplugTimedOut and others.

        The guest comes first, because QEMU would unplug a mounted disk without an error and lose its last writes.
        """
        await self.guest.unmount(serial)
        await self.disks.detach(serial, timeout_s)

    async def grow(self, serial: str, size_bytes: int) -> values.Usage:
        """Show the guest a disk's new size and grow the filesystem on it, while it is in use; idempotent.

        The device behind the disk must have grown before. Raises DiskNotAttached, DiskNotGrown, DiskReadOnly, …
        """
        actual_bytes = await self.disks.resize(serial, size_bytes)
        grown = await self.guest.grow(serial, actual_bytes)
        return grown.usage.clamped(actual_bytes)

    async def limit(self, serial: str, limits: volumes.IoLimits) -> None:
        """Limit a disk's I/O; idempotent. Raises DiskNotAttached, QemuCommandFailed, QmpDisconnected."""
        await self.disks.limit(serial, limits)

    async def limits(self, serial: str) -> volumes.IoLimits:
        """A disk's I/O limits. Raises DiskNotAttached, QemuCommandFailed, QmpDisconnected."""
        return await self.disks.limits(serial)

    async def usage(self, serial: str) -> values.Usage:
        """Bytes and inodes of a mounted disk, none larger than the disk itself. Raises DiskNotAttached and others."""
        disk = await self.disks.disk(serial)
        return (await self.guest.usage(serial)).clamped(disk.size_bytes)

    async def wait(self) -> None:
        """Wait until QEMU has ended, for any reason."""
        await self._process.wait()

    async def stop(self) -> list[str]:
        """Shut the guest down and end QEMU; returns the volumes that could not be unmounted.

        Kills a guest that does not answer; its filesystems replay their journals at the next mount.
        """
        stuck: list[str] = []
        try:
            stuck = await self.guest.shutdown(SHUTDOWN_S)
            async with asyncio.timeout(_POWER_OFF_S):
                await self._process.wait()
        except (errors.CrustError, TimeoutError) as err:
            _log.warning("VM did not shut down", extra={"vm": self.name, "reason": str(err)})
        await self.kill()
        return stuck

    async def kill(self) -> None:
        """End QEMU at once and release it. Idempotent; a VM that was released before is not touched."""
        for running in (self._process, *self._file_servers):
            running.kill()
            await running.wait()
        await self.close()

    async def close(self) -> None:
        """Release control of the VM, which continues to run; idempotent."""
        await self._stack.aclose()

    async def _connect(self, started: Sequence[process.Process], timeout_s: float) -> None:
        """Take ownership of the processes, QEMU last, and connect to both sockets."""
        *self._file_servers, self._process = started
        for running in started:
            self._stack.callback(running.close)
        self._control = await qmp.Qmp.connect(self.directory / "control.sock")
        self._stack.push_async_callback(self._control.close)
        emulated = self.identity.acceleration == "tcg"
        self.disks = disks.Disks(
            self._control, self.directory, self.identity.volume_slots, emulated=emulated
        )
        self.descriptors = descriptors.HeldDescriptors(self._control, self.pid)
        if self.identity.claims == "keeper":
            keeper = self.directory / "keeper.sock"
            self.descriptors = kept_descriptors.KeptDescriptors(keeper, self.named_process)
        client, hello = await self._agent(timeout_s)
        self._stack.push_async_callback(client.close)
        self.guest = guest.Guest(client, hello)

    async def _agent(self, timeout_s: float) -> tuple[agent.AgentClient, values.Hello]:
        """Connect to the agent, unless QEMU ends or stops first."""
        path = self.directory / "agent.sock"
        connecting = asyncio.create_task(agent.AgentClient.connect(path, timeout_s))
        stopped = asyncio.create_task(self._control.broken())
        try:
            await asyncio.wait((connecting, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise faults.VmGone(self.directory, f"QEMU stopped: {await stopped}")
            return connecting.result()
        finally:
            connecting.cancel()
            stopped.cancel()
            await asyncio.gather(connecting, stopped, return_exceptions=True)


async def start(
    spec: spec_module.MachineSpec,
    directory: Path,
    *,
    boot_timeout_s: float = BOOT_S,
) -> Machine:
    """Start a VM in `directory` (made with mode 0700) and wait until its agent answers.

    Raises InvalidVmDirectory, VmAlreadyControlled, VmAlreadyRuns, ShareFailed, VmStartFailed.
    """
    identity = vm_directory.Identity(
        spec.name, str(uuid.uuid4()), spec.acceleration, spec.volume_slots, spec.claims
    )
    lock = await _run_to_completion(
        asyncio.to_thread(vm_directory.prepare, directory, identity), os.close
    )
    machine = Machine(directory, identity, lock)
    started: list[process.Process] = []
    try:
        spawning = asyncio.to_thread(_spawn, spec, directory, identity.uuid, started)
        await _run_to_completion(spawning, lambda _: None)
        await machine._connect(started, boot_timeout_s)
        if isinstance(machine.descriptors, kept_descriptors.KeptDescriptors):
            await machine.descriptors.begin()
    except BaseException as err:
        console_tail = machine.console.tail()
        await asyncio.shield(_undo(machine, started))
        if isinstance(err, errors.CrustError | OSError):
            raise faults.VmStartFailed(directory, str(err), console_tail) from err
        raise
    return machine


def _spawn(
    spec: spec_module.MachineSpec,
    directory: Path,
    identity: str,
    started: list[process.Process],
) -> None:
    """Start the file servers and then QEMU; each is appended to `started` as soon as it runs."""
    for share in spec.shares:
        if share.kind == "virtiofs":
            started.append(_serve_share(share, directory))
    listeners = vm_directory.listen(directory)
    try:
        control, channel = (listeners[n].fileno() for n in ("control.sock", "agent.sock"))
        argv = spec_module.command_line(
            spec, directory, identity, control_fd=control, agent_fd=channel
        )
        pid = process.spawn(argv, (control, channel), directory / "qemu.err")
        started.append(process.Process(pid))
    finally:
        # From here on only QEMU has the listening sockets: when it ends, connections are refused.
        for listener in listeners.values():
            listener.close()


async def _run_to_completion(work: Coroutine[object, object, T], undo: Callable[[T], object]) -> T:
    """Wait for work in a thread, which cannot be cancelled: if cancelled, wait for its end and undo its result."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        if task.exception() is None:
            undo(task.result())
        raise


def _forget(running: process.Process | None) -> None:
    if running is not None:
        running.close()


async def _undo(machine: Machine, started: list[process.Process]) -> None:
    for running in started:
        running.kill()
        await running.wait()
    await machine.close()
    for running in started:
        running.close()


async def adopt(directory: Path, *, timeout_s: float = BOOT_S) -> Machine:
    """Take control of a running VM whose parent has ended.

    Raises VmAlreadyControlled, VmGone, QmpDisconnected, AgentTimedOut.
    """
    reopening = asyncio.to_thread(vm_directory.reopen, directory)
    identity, lock = await _run_to_completion(reopening, lambda reopened: os.close(reopened[1]))
    machine = Machine(directory, identity, lock)
    try:
        finding = asyncio.to_thread(process.find, directory / "qemu.pid", identity.uuid)
        running = await _run_to_completion(finding, _forget)
        if running is None:
            raise faults.VmGone(directory, "no such process runs", machine.console.tail())
        await machine._connect([running], timeout_s)
    except BaseException:
        await machine.close()
        raise
    return machine


async def destroy(directory: Path) -> bool:
    """Kill the VM that runs in `directory`, even if it does not answer; returns whether one ran.

    Raises VmAlreadyControlled while another process controls it, VmGone if none was ever started in `directory`.
    """
    reopening = asyncio.to_thread(vm_directory.reopen, directory)
    identity, lock = await _run_to_completion(reopening, lambda reopened: os.close(reopened[1]))
    try:
        finding = asyncio.to_thread(process.find, directory / "qemu.pid", identity.uuid)
        running = await _run_to_completion(finding, _forget)
        if running is None:
            return False
        running.kill()
        await running.wait()
        running.close()
        return True
    finally:
        os.close(lock)


def _serve_share(share: spec_module.Share, directory: Path) -> process.Process:
    """Start virtiofsd for a share; it listens when this returns. Raises ShareFailed.

    virtiofsd ends by itself when its VM does; the code that starts a VM kills a virtiofsd that QEMU never connected
    to. 9p is served by QEMU itself.
    """
    path = spec_module.share_socket(share, directory)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(1)
        argv = spec_module.virtiofsd(share, listener.fileno())
        pid = process.spawn(argv, [listener.fileno()], directory / "qemu.err")
        return process.Process(pid)
    except OSError as err:
        raise faults.ShareFailed(share.tag, err.strerror or str(err)) from err
    finally:
        listener.close()
