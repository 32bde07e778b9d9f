"""Kata's runtime-rs: the machine by its socket or its name, the guest's paths, and the agent's own bytes."""

import asyncio
import errno
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crust.core import volumes
from crust.host.answers import NotSeen
from crust.host.block import devices, openers
from crust.kata import rust_runtime
from crust.kata.evidence import Use
from crust.kata.rust_runtime import RustRuntime
from tests.support.faults import lies
from tests.support.kata import sandbox
from tests.support.kata.sandbox import StandInRustSandbox
from tests.support.raised import raised
from tests.support.records.records import a_record
from tests.support.waiting_processes import no_free_descriptor

ID = "d1dc64d5c914e4e3"
GUEST = "/run/kata-containers/shared/containers/passthrough/333e5eb9a7-b8eb4561-data"
CALL = (
    b"\x00\x00\x00\x72\x00\x00\x00\x01\x01\x00"
    b"\x0a\x11grpc.AgentService\x12\x0eGetVolumeStats\x1aM\x0aK" + GUEST.encode()
)
"""The bytes of the call as the real shim sends it, without a time: the service's and the method's published names."""
ANSWER = (
    b"\x00\x00\x00\x26\x00\x00\x00\x01\x02\x00\x12\x24"
    b"\x0a\x0f\x08\x80\xb8\xad\x1b\x10\x80\xa8\xae\x1b\x18\x80\x70\x20\x01"
    b"\x0a\x0b\x08\xf5\x7f\x10\x80\x80\x01\x18\x0b\x20\x02\x12\x04\x12\x02OK"
)
"""57,367,552 of 57,381,888 bytes and 16,373 of 16,384 inodes, as the real agent 4.1.0 counts them."""


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose sockets have paths of less than 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="crust-") as path:
        yield Path(path)


@pytest.fixture
def runtime(short: Path) -> RustRuntime:
    return RustRuntime(str(short / "kata"), str(short / "shares"))


@pytest.fixture
def running(short: Path, runtime: RustRuntime) -> Iterator[StandInRustSandbox]:
    with sandbox.running_rust(short / "kata", short / "shares", ID) as made:
        yield made


def test_the_machine_is_the_process_that_listens(
    runtime: RustRuntime, running: StandInRustSandbox
) -> None:
    assert runtime.has(ID)
    assert runtime.vm_of(ID) == runtime.vm_of(ID, running.pid) == running.pid
    with raised("VmUnknown", match="the engine names process 1"):
        runtime.vm_of(ID, 1)
    running.kill()
    with raised("VmUnknown"):
        runtime.vm_of(ID)


def test_listener_that_is_not_of_sandbox_is_not_its_machine(
    short: Path, runtime: RustRuntime
) -> None:
    with sandbox.running_rust(short / "kata", short / "shares", "other-sandbox-1"):
        (short / "kata" / ID).mkdir()
        os.link(
            short / "kata" / "other-sandbox-1" / "ch-api.sock", short / "kata" / ID / "ch-api.sock"
        )
        with raised("VmUnknown", match="is not the sandbox's"):
            runtime.vm_of(ID)
    assert not runtime.has("sandbox-unknown")
    with raised("VmUnknown"):
        runtime.vm_of("../../etc")


def test_qemu_is_the_named_process_that_has_sandboxs_name(
    short: Path, runtime: RustRuntime
) -> None:
    root, shares = short / "kata", short / "shares"
    with (
        sandbox.running_rust(root, shares, ID, "qemu") as running,
        sandbox.running_rust(root, shares, f"{ID}-2", "qemu") as other,
    ):
        assert runtime.vm_of(ID, running.pid) == running.pid
        for named in (0, other.pid, os.getpid(), running.shim.pid):
            with raised("VmUnknown", match="the engine names no QEMU of it"):
                runtime.vm_of(ID, named)
        unseen = lies.Concerns(frozenset({f"/proc/{running.pid}/cmdline"}), ())
        with lies.failing(unseen, lies.Failure(0, errno.EACCES)), pytest.raises(NotSeen):
            runtime.vm_of(ID, running.pid)


def test_disk_of_an_ended_container_is_waited_for(
    runtime: RustRuntime, running: StandInRustSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = a_record()
    runtime.check_attachable(running.id, running.pid, [(record, 0)], 0.0)
    with raised("VolumeInUseInSandbox", match=f"process {running.pid}"):
        runtime.check_attachable(running.id, running.pid, [(record, 1)], 0.0)
    looks = [{record.identity}, set(), {record.identity}]
    monkeypatch.setattr(openers, "opened_by", lambda *_: looks.pop(0))
    runtime.check_attachable(running.id, running.pid, [(record, 0)], time.monotonic() + 60)
    with raised("DeviceNotReleased", match=f"process {running.pid}"):
        runtime.check_attachable(running.id, running.pid, [(record, 0)], 0.0)
    assert not looks


def test_a_read_only_volume_on_a_writable_device_is_refused(
    runtime: RustRuntime, running: StandInRustSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = a_record(readonly=True)
    monkeypatch.setattr(devices, "is_readonly", lambda _: False)
    with raised("DeviceWritable"):
        runtime.check_attachable(running.id, running.pid, [(record, 0)], 0.0)
    monkeypatch.setattr(devices, "is_readonly", lambda _: True)
    runtime.check_attachable(running.id, running.pid, [(record, 0)], 0.0)


def test_a_mount_needs_the_open_device_and_a_directory(
    runtime: RustRuntime, running: StandInRustSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = a_record()
    running.make_mount("/data")
    with raised("VolumeNotAttached", match="has not opened"):
        runtime.check_mounted(ID, running.pid, "container-1", {"/data": record})
    monkeypatch.setattr(openers, "opened_by", lambda *_: {record.identity})
    runtime.check_mounted(ID, running.pid, "container-1", {"/data": record})
    with raised("VolumeNotAttached", match="no mount for /other"):
        runtime.check_mounted(ID, running.pid, "container-1", {"/other": record})
    with no_free_descriptor(), pytest.raises(NotSeen):
        runtime.guest_paths(ID, ["/data"], just_made=True)


def test_path_in_guest_is_the_newest_and_never_guessed(
    runtime: RustRuntime, running: StandInRustSandbox
) -> None:
    def paths(*destinations: str, just_made: bool) -> list[str]:
        return runtime.guest_paths(ID, destinations, just_made=just_made)

    assert paths("/data", just_made=True) == [""]
    first = running.make_mount("/data")
    assert paths("/data", just_made=False) == [first]
    second = running.make_mount("/srv/data")
    made = running.shares / ID / "rw" / "passthrough"
    old, new = (made / path.rpartition("/")[2] for path in (first, second))
    while new.stat().st_ctime_ns == old.stat().st_ctime_ns:  # within one tick of the kernel's clock
        new.chmod(0o700)
    assert paths("/data/", "/logs", just_made=True) == [second, ""]
    assert paths("/data", just_made=False) == [""]  # which of the two it is, is not known
    assert paths("/data", "/srv/data", just_made=True) == ["", ""]
    (made / "sandbox-b8eb4561-logs").mkdir()  # a shared directory
    assert paths("/logs", just_made=True) == [""]


@asynccontextmanager
async def _sockets(root: Path, url: str, *answers: bytes) -> AsyncIterator[list[bytes]]:
    """The shim's HTTP, and the hypervisor's hybrid vsock with an agent behind it."""
    asked: list[bytes] = []
    serving: list[asyncio.Task[None] | None] = []

    async def shim(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /agent-url HTTP/1.1\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n" + url.encode())
        writer.close()

    async def machine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        asked.append(await reader.readline())
        writer.write(answers[0])
        asked.append(await reader.read(1000))
        for answer in answers[1:]:
            writer.write(answer)
        writer.close()

    (root / ID).mkdir(parents=True)
    async with (
        await asyncio.start_unix_server(shim, str(root / ID / "shim-monitor.sock")),
        await asyncio.start_unix_server(machine, str(root / ID / "ch-vm.sock")),
    ):
        yield asked
        await asyncio.gather(*filter(None, serving))


async def test_the_agent_is_asked_with_its_own_bytes(short: Path, runtime: RustRuntime) -> None:
    root = short / "kata"
    url = f"hvsock://{root}/{ID}/ch-vm.sock:1024"
    async with _sockets(root, url, b"OK 1073741824\n", ANSWER[:7], ANSWER[7:]) as asked:
        stats = await runtime.stats(a_record(), Use(ID, "container-1", GUEST))
    assert asked == [b"CONNECT 1024\n", CALL]
    in_bytes, inodes = stats.usage
    assert (in_bytes.total, in_bytes.used, in_bytes.available) == (57381888, 14336, 57367552)
    assert (inodes.unit, inodes.total, inodes.used) == (volumes.UsageUnit.INODES, 16384, 11)


class _HostVsock(socket.socket):
    """vsock(7) of a host with one guest, whose ports are unix sockets of the directory `ports`."""

    ports: Path

    def __init__(self, family: int, kind: int) -> None:
        assert family == socket.AF_VSOCK
        super().__init__(socket.AF_UNIX, kind)

    def connect(self, address: object) -> None:
        assert isinstance(address, tuple)
        cid, port = address
        if cid % 2**32 != 3:  # as Python's socket takes its lowest bits
            raise OSError(errno.ENODEV, "No such device")
        super().connect(f"{self.ports}/{port}.sock")


@pytest.fixture
def vsock(short: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the guest's ports."""
    monkeypatch.setattr(_HostVsock, "ports", short, raising=False)
    monkeypatch.setattr(rust_runtime, "socket", _HostVsock)
    return short


async def test_agent_of_qemu_is_asked_by_vsock(
    short: Path, vsock: Path, runtime: RustRuntime
) -> None:
    asked: list[bytes] = []

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readexactly(len(CALL)))
        writer.write(ANSWER)
        writer.close()

    async with (
        await asyncio.start_unix_server(agent, str(vsock / "1024.sock")),
        _sockets(short / "kata", "vsock://3:1024", b""),
    ):
        stats = await runtime.stats(a_record(), Use(ID, "container-1", GUEST))
    assert asked == [CALL]
    assert stats.usage[0].total == 57381888


async def test_address_beyond_vsock_reaches_no_other_guest(
    short: Path, vsock: Path, runtime: RustRuntime
) -> None:
    asked: list[bytes] = []

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readexactly(len(CALL)))
        writer.write(ANSWER)
        writer.close()

    async with (
        await asyncio.start_unix_server(agent, str(vsock / "1024.sock")),
        _sockets(short / "kata", f"vsock://{2**32 + 3}:1024", b""),
    ):
        with pytest.raises(ValueError, match="no address of vsock"):
            await runtime.stats(a_record(), Use(ID, "container-1", GUEST))
    assert asked == []


@pytest.mark.usefixtures("vsock")
@pytest.mark.parametrize(
    ("url", "answers"),
    [
        ("vsock://3:1025", [b""]),
        ("vsock://4:1024", [b""]),
        ("vsock://three:1024", [b""]),
        ("", [b""]),
        ("hvsock://{0}/ch-vm.sock:1024", [b"NO\n"]),
        ("hvsock://{0}/ch-vm.sock:1024", [b"OK 1\n"]),
        ("hvsock://{0}/ch-vm.sock:1024", [b"OK 1\n", b"\xff" * 100]),
        ("hvsock://{0}/ch-vm.sock:1024", [b"OK 1\n", ANSWER[:5] + b"\x03" + ANSWER[6:]]),
        (
            "hvsock://{0}/ch-vm.sock:1024",
            [b"OK 1\n", b"\0\0\0\x0b\0\0\0\x01\x02\0\x0a\x09\x08\x0d\x12\x05ENOENT"[:21]],
        ),
    ],
)
async def test_what_is_no_answer_of_the_agent_is_an_error(
    short: Path, runtime: RustRuntime, url: str, answers: list[bytes]
) -> None:
    root = short / "kata"
    async with _sockets(root, url.format(root / ID), *answers):
        with pytest.raises((ValueError, OSError)):
            await runtime.stats(a_record(), Use(ID, "container-1", GUEST))


async def test_without_the_guest_s_path_nobody_is_asked(runtime: RustRuntime) -> None:
    with pytest.raises(ValueError, match="cannot be distinguished"):
        await runtime.stats(a_record(), Use(ID, "container-1"))


@given(st.binary(max_size=300))
def test_an_answer_is_numbers_or_a_value_error(data: bytes) -> None:
    try:
        stats = rust_runtime.parsed(data)
    except ValueError:
        return
    assert all(0 <= usage.total < 2**63 for usage in stats.usage)
