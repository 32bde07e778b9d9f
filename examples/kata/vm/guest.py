"""The operations of the agent in a VM, one typed method each.

Deadlines are in seconds and limit the wait for the answer: an operation whose deadline has passed continues in the
guest and may be repeated. Errors of the guest are those of `faults.of_guest`; all methods also raise
AgentDisconnected, AgentTimedOut and GuestProtocolViolation.
"""

import asyncio
import contextlib
import time

from crust.core import errors
from examples.kata.vm import agent, containers, faults, values

ANSWER_S = 30.0
FREEZE_S = 50.0
"""A guest may have much to flush before a freeze; this is a little less than crust's proxy waits."""
STALLED_S = 120.0
"""How long fsGroup may make no progress."""
_PROGRESS_S = 10
# The guest gets less time than the caller waits, so that its own timeout, which names the reason, arrives.
_MARGIN_S = 5.0


class Guest:
    """The agent of one VM."""

    def __init__(self, client: agent.AgentClient, hello: values.Hello) -> None:
        self._client = client
        self.hello = hello

    async def ping(self, timeout_s: float = ANSWER_S) -> None:
        """Raises unless the agent answers."""
        await self._client.call("ping", {}, values.Empty, timeout_s)

    async def mount(self, volume: values.VolumeMount, timeout_s: float = 120.0) -> values.Mounted:
        """Wait for the disk, format it if it is blank and shall be, and mount it. Idempotent.

        Other options than those of the mount are GuestConflict. An encrypted volume that is not open, without a
        passphrase, is GuestNeedsPassphrase; with a wrong passphrase, WrongPassphrase.
        """
        args: dict[str, object] = {
            "volume": volume.volume,
            "fstype": volume.fstype,
            "options": list(volume.options),
            "read_only": volume.read_only,
            "timeout_s": int(min(30.0, max(1.0, timeout_s - _MARGIN_S))),
        }
        if volume.format is not None:
            args["format"] = {
                "bytes_per_inode": volume.format.ext4_bytes_per_inode or 0,
                "reserved_percent": volume.format.ext4_reserved_percent or 0,
            }
        if volume.encrypted:
            args["encrypted"] = True
        if volume.passphrase is not None:
            args["passphrase"] = volume.passphrase
        return await self._client.call("mount", args, values.Mounted, timeout_s)

    async def own(
        self, volume: str, group: values.FsGroup, stalled_s: float = STALLED_S
    ) -> values.Owned:
        """Apply an fsGroup, for as long as that takes; repeating it continues or is done at once.

        Raises AgentTimedOut when there is no progress for `stalled_s`. A guest whose agent was started again in
        between begins again, and passes over the files that are done.
        """
        last, ends_s = -1, time.monotonic() + stalled_s
        while time.monotonic() < ends_s:
            with contextlib.suppress(faults.AgentTimedOut):
                owned = await self.progress(volume, group, _PROGRESS_S)
                if owned.done:
                    return owned
                if owned.owned_entries != last:
                    last, ends_s = owned.owned_entries, time.monotonic() + stalled_s
        raise faults.AgentTimedOut("own", stalled_s)

    async def progress(self, volume: str, group: values.FsGroup, wait_s: int = 0) -> values.Owned:
        """Begin to apply an fsGroup, or ask how far it is; waits for its end, `wait_s` at most."""
        args = {"volume": volume, "gid": group.gid, "policy": group.policy, "wait_s": wait_s}
        return await self._client.call("own", args, values.Owned, ANSWER_S)

    async def unmount(self, volume: str, timeout_s: float = 120.0) -> bool:
        """Unmount; returns whether it was mounted. Raises GuestBusy, naming the users."""
        args = {"volume": volume}
        return (await self._client.call("unmount", args, values.Unmounted, timeout_s)).was_mounted

    async def usage(self, volume: str, timeout_s: float = ANSWER_S) -> values.Usage:
        """Bytes and inodes as the guest reports them; `Machine.usage` clamps them to the disk's size."""
        args = {"volume": volume}
        return (await self._client.call("usage", args, values.Measured, timeout_s)).usage

    async def grow(self, volume: str, disk_bytes: int, timeout_s: float = 120.0) -> values.Grown:
        """Wait until the guest sees `disk_bytes`, and grow the filesystem while it is in use; idempotent."""
        wait_s = int(min(30.0, max(1.0, timeout_s - _MARGIN_S)))
        args = {"volume": volume, "disk_bytes": disk_bytes, "timeout_s": wait_s}
        return await self._client.call("grow", args, values.Grown, timeout_s)

    async def freeze(self, volume: str, thaw_after_s: int, timeout_s: float = FREEZE_S) -> None:
        """Freeze the filesystem for `thaw_after_s` (1 to 600) at most; idempotent."""
        args = {"volume": volume, "thaw_after_s": thaw_after_s}
        await self._client.call("freeze", args, values.Empty, timeout_s)

    async def thaw(self, volume: str, timeout_s: float = FREEZE_S) -> bool:
        """Thaw; waits for a freeze that is still under way.

        False means that the watchdog thawed it before, so a copy taken meanwhile is not crash-consistent.
        """
        args = {"volume": volume}
        return (await self._client.call("thaw", args, values.Thawed, timeout_s)).was_frozen

    async def health(self, volume: str, timeout_s: float = ANSWER_S) -> values.Condition:
        """The condition of a mounted volume. Raises GuestNotFound."""
        return await self._client.call("health", {"volume": volume}, values.Condition, timeout_s)

    async def start(
        self, spec: values.ContainerSpec, *, stdin: bool = False, timeout_s: float = ANSWER_S
    ) -> containers.Container:
        """Start a container. Raises GuestConflict for a name in use, GuestNotFound, GuestRefused (a subPath)."""
        container = containers.Container(self._client, spec.name)
        self._client.listen(spec.name, container)
        args = {**_container(spec), "stdin": stdin, "credit": containers.WINDOW}
        try:
            await self._client.call("container.start", args, values.Started, timeout_s)
        except BaseException:
            self._client.ignore(spec.name)
            raise
        return container

    async def run(
        self,
        spec: values.ContainerSpec,
        *,
        stdin: bytes = b"",
        limit_bytes: int = 1024 * 1024,
        timeout_s: float = 300.0,
    ) -> values.Completed:
        """Run a container to its end and release it. Raises OutputTooLarge, ContainerTimedOut; then it is killed."""
        container = await self.start(spec, stdin=bool(stdin))
        try:
            async with asyncio.timeout(timeout_s):
                if stdin:
                    await container.write(stdin, eof=True)
                completed = await container.collect(limit_bytes)
        except BaseException as err:
            await self._abandon(container)
            if isinstance(err, TimeoutError):
                raise faults.ContainerTimedOut(spec.name, timeout_s) from err
            raise
        await container.release()
        return completed

    async def _abandon(self, container: containers.Container) -> None:
        """Kill and release a container whose caller failed, if the guest answers."""
        with contextlib.suppress(errors.CrustError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await container.kill()
                await container.wait()
                await container.release()

    async def attach(self, name: str, timeout_s: float = ANSWER_S) -> containers.Container:
        """Attach to a container that an earlier process started; the guest repeats its exit if it has ended."""
        container = containers.Container(self._client, name)
        self._client.listen(name, container)
        args = {"container": name, "credit": containers.WINDOW}
        try:
            await self._client.call("container.attach", args, values.Empty, timeout_s)
        except BaseException:
            self._client.ignore(name)
            raise
        return container

    async def containers(self, timeout_s: float = ANSWER_S) -> list[values.ContainerRow]:
        """All containers that are not released yet."""
        listing = await self._client.call("container.list", {}, values.ContainerList, timeout_s)
        return listing.containers

    async def shutdown(self, timeout_s: float = 60.0) -> list[str]:
        """Kill all containers, unmount all volumes, power off; returns the volumes that could not be unmounted."""
        return (await self._client.call("shutdown", {}, values.Stopped, timeout_s)).stuck

    async def close(self) -> None:
        """End the connection; the guest continues to run."""
        await self._client.close()


def _container(spec: values.ContainerSpec) -> dict[str, object]:
    return {
        "container": spec.name,
        "command": list(spec.command),
        "environment": [f"{key}={value}" for key, value in (spec.environment or {}).items()],
        "directory": spec.directory,
        "uid": spec.uid,
        "gid": spec.gid,
        "groups": list(spec.groups),
        "mounts": [
            {
                "volume": bind.volume,
                "sub_path": bind.sub_path,
                "destination": bind.destination,
                "read_only": bind.read_only,
            }
            for bind in spec.binds
        ],
    }
