"""Kata's runtime-rs: the machine of a sandbox, the sandbox's share, and statistics by the guest's agent.

The runtime names neither a machine's process nor its devices in a file. Cloud Hypervisor is the process that listens
at /run/kata/<sandbox>/ch-api.sock: the kernel names it. QEMU is the process that the container engine names, if its
own arguments say `-name sandbox-<sandbox>` (docs/decisions/0052).

The runtime makes an empty directory in the sandbox's share for each mount; its name contains the last part of the
mount's destination, and gives the guest's path. The directory stays until the sandbox ends. If two mounts have the
same last part, neither has statistics.

If two containers have one volume, the end of the first makes the runtime forget the device, which stays attached: the
next container would attach the device twice, and mount the filesystem twice. So a container is refused while the
machine has the device.
"""

import asyncio
import errno
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from socket import AF_VSOCK, SOCK_NONBLOCK, SOCK_STREAM, socket

from google.protobuf.message import DecodeError

from crust.core import errors, volumes
from crust.handoff.record import Record
from crust.host import answers
from crust.host.block import devices, openers
from crust.host.process import arguments
from crust.kata import evidence, ttrpc
from crust.kata.evidence import Kind, Use, VmUnknown
from crust.rpc.serving import sockets
from crust.wire.kata.v1 import agent_pb2

_GUEST = "/run/kata-containers/shared/containers/passthrough"
_NAME = re.compile(r"[0-9a-f]{10}-[0-9a-f]{8}-(?P<last>.+)", re.DOTALL)
_HYBRID_URL = re.compile(r"hvsock://(?P<path>/[^:\s]{1,107}):(?P<port>\d{1,5})")
_VSOCK_URL = re.compile(r"vsock://(?P<cid>\d{1,10}):(?P<port>\d{1,5})")
_VSOCK_MAX = 2**32 - 1
"""Of a context id, and of a port (vsock(7)). Python passes the lowest bits of a larger one, another guest's."""
_READ_BYTES = 4096
_LINE_BYTES = 64
_LIMIT_BYTES = 64 * 1024
_AGAIN_S = 0.05
"""Between two looks at a disk that the machine is to let go of: a guest takes 0.3 to 1.6 s."""


@dataclass(frozen=True)
class RustRuntime(evidence.KataBuild):
    """runtime-rs: the shares of its sandboxes are below `shares`."""

    kind = Kind.RUST
    shares: str

    def vm_of(self, sandbox_id: str, engine_pid: int = 0) -> int:
        evidence.check_id(sandbox_id)
        path = f"{self.root}/{sandbox_id}/ch-api.sock"
        pid = sockets.listener(path)
        if pid is None and arguments.has(engine_pid, "-name", f"sandbox-{sandbox_id}"):
            pid = engine_pid
        if pid is None:
            why = f"no process listens at {path}, and the engine names no QEMU of it"
            raise VmUnknown(sandbox_id, why)
        evidence.check_machine(sandbox_id, pid, engine_pid)
        return pid

    def check_attachable(
        self, sandbox_id: str, pid: int, mounts: Sequence[tuple[Record, int]], until_s: float
    ) -> None:
        for record, others in mounts:
            if record.readonly and not devices.is_readonly(record.device):
                raise errors.NotReady.named(
                    "DeviceWritable",
                    f"the volume at {record.target} cannot be given to a sandbox read-only",
                    why=f"{record.device} accepts writes, and Kata's runtime-rs attaches it writable",
                )
            if others:
                raise errors.NotReady.named(
                    "VolumeInUseInSandbox",
                    f"the volume at {record.target} cannot be given to one more container of its pod",
                    why=f"process {pid} has it for another container or mount, and Kata's runtime-rs cannot attach a "
                    "volume again after one of two has ended",
                )
        wanted = {record.identity: record for record, _ in mounts}
        while had := openers.opened_by(pid, wanted):
            if time.monotonic() >= until_s:
                raise errors.NotReady.named(
                    "DeviceNotReleased",
                    f"the volume at {wanted[had.pop()].target} cannot be given to the next container of its pod yet",
                    why=f"the guest has not let go of the disk of the container before: process {pid} has it",
                )
            time.sleep(_AGAIN_S)

    def check_mounted(
        self, sandbox_id: str, pid: int, container_id: str, mounts: Mapping[str, Record]
    ) -> None:
        """See `evidence.KataBuild`. The machine did not have the device when the container was created."""
        opened = openers.opened_by(pid, [record.identity for record in mounts.values()])
        for destination, record in mounts.items():
            if record.identity not in opened:
                why = f"process {pid} has not opened {record.device} for the mount {destination}"
                raise evidence.not_attached(record, sandbox_id, why)
            if not self._mount_directories(sandbox_id, destination):
                why = f"{self.shares}/{sandbox_id} has no mount for {destination}"
                raise evidence.not_attached(record, sandbox_id, why)

    def guest_paths(
        self, sandbox_id: str, destinations: Sequence[str], *, just_made: bool
    ) -> list[str]:
        lasts = Counter(map(_last, destinations))
        paths = []
        for destination in destinations:
            names = self._mount_directories(sandbox_id, destination)
            is_told = (
                bool(names) and lasts[_last(destination)] == 1 and (just_made or len(names) == 1)
            )
            paths.append(f"{_GUEST}/{names[0]}" if is_told else "")
        return paths

    async def stats(self, record: Record, use: Use) -> volumes.VolumeStats:
        if not use.guest_path:
            raise ValueError("the volume's mount in the guest cannot be distinguished from others")
        async with asyncio.timeout(evidence.ANSWER_S):
            answer = await self.ask_shim(use.sandbox_id, "/agent-url")
            url = answer.decode("ascii", "replace").strip()
            reader, writer = await _opened(url)
            try:
                request = agent_pb2.VolumeStatsRequest(volume_guest_path=use.guest_path)
                writer.write(ttrpc.request(1, "grpc.AgentService", "GetVolumeStats", request))
                return parsed(await _response(reader))
            except ttrpc.ProtocolViolated as err:
                raise ValueError("an answer that is not ttrpc") from err
            finally:
                writer.close()

    def _mount_directories(self, sandbox_id: str, destination: str) -> list[str]:
        """The directories that the runtime made for a destination's last part, the newest first. Raises `NotSeen`."""
        directory = f"{self.shares}/{sandbox_id}/rw/passthrough"

        def look() -> list[tuple[int, str]]:
            with os.scandir(directory) as children:
                return [
                    (child.stat(follow_symlinks=False).st_ctime_ns, child.name)
                    for child in children
                    if (name := _NAME.fullmatch(child.name)) and name["last"] == _last(destination)
                ]

        directories = answers.seen(answers.ask(directory, look, absent=(errno.ENOENT,))) or []
        return [name for _, name in sorted(directories, reverse=True)]


def _last(destination: str) -> str:
    return os.path.basename(destination.rstrip("/"))


async def _opened(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection by vsock(7), or by the hypervisor's hybrid vsock on a unix socket."""
    if vsock := _VSOCK_URL.fullmatch(url):
        address = (int(vsock["cid"]), int(vsock["port"]))
        if max(address) > _VSOCK_MAX:
            raise ValueError("Kata's shim names an agent at no address of vsock")
        connected = socket(AF_VSOCK, SOCK_STREAM | SOCK_NONBLOCK)
        try:
            await asyncio.get_running_loop().sock_connect(connected, address)
            return await asyncio.open_connection(sock=connected)
        except BaseException:
            connected.close()
            raise
    hybrid = _HYBRID_URL.fullmatch(url)
    if hybrid is None:
        raise ValueError("Kata's shim names no agent behind a vsock")
    reader, writer = await asyncio.open_unix_connection(hybrid["path"], limit=_LINE_BYTES)
    try:
        writer.write(f"CONNECT {hybrid['port']}\n".encode())
        if not (await reader.readline()).startswith(b"OK "):
            raise ValueError("the hypervisor does not connect to the agent")
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def _response(reader: asyncio.StreamReader) -> bytes:
    decoder, left_bytes = ttrpc.message_splitter(), _LIMIT_BYTES
    while left_bytes > 0 and (data := await reader.read(_READ_BYTES)):
        left_bytes -= len(data)
        for frame in (frame for frame in decoder.feed(data) if frame.stream == 1):
            answer = ttrpc.parse_response(frame)
            if isinstance(answer, ttrpc.Failure):
                raise ValueError(answer.text[:300] or f"the agent answered code {answer.code}")
            return answer
    raise ValueError("the agent closed the connection, or its answer is too long")


def parsed(data: bytes) -> volumes.VolumeStats:
    """The numbers of the agent's answer. Raises ValueError for other bytes."""
    try:
        answer = agent_pb2.VolumeStatsResponse.FromString(data)
    except DecodeError as err:
        raise ValueError("an answer that cannot be read") from err
    return evidence.stats_of(answer)
