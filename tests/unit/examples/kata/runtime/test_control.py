"""The daemon's control socket: clients that disconnect, hostile clients, and a daemon that stops."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from crust.core import volumes
from examples.kata.runtime import control, messages
from examples.kata.runtime.client import Client, RuntimeRefused, RuntimeUnreachable
from examples.kata.runtime.sandboxes import Sandboxes
from examples.kata.vm import faults, values
from tests.support.drivers.fake_driver import Gate
from tests.support.fake_vms.guest import FakeContainer
from tests.support.fake_vms.handoff import FakeHandoff
from tests.support.fake_vms.vms import FakeVms
from tests.support.fake_vms.world import World
from tests.support.faults.refusals import until
from tests.support.records.records import TARGET, a_record


@dataclass
class Endpoint:
    """A daemon's control socket, and the sandboxes behind it."""

    world: World
    sandboxes: Sandboxes
    socket: Path

    @property
    def client(self) -> Client:
        return Client(str(self.socket))

    async def say(self, line: bytes) -> dict[str, Any]:
        """Send raw bytes; returns the one answer."""
        reader, writer = await asyncio.open_unix_connection(str(self.socket), limit=1 << 22)
        try:
            writer.write(line)
            async with asyncio.timeout(60):
                answer: dict[str, Any] = json.loads(await reader.readline())
            return answer
        finally:
            writer.close()


@asynccontextmanager
async def opened(root: Path) -> AsyncIterator[Endpoint]:
    world = World(records={TARGET.text: a_record()})
    sandboxes = Sandboxes(root / "sandboxes", FakeVms(world), FakeHandoff(world))
    socket = root / "control.sock"
    async with control.serving(socket, control.Control(sandboxes)):
        yield Endpoint(world, sandboxes, socket)
    await sandboxes.close()


@pytest.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[Endpoint]:
    async with opened(tmp_path) as endpoint:
        yield endpoint


def run(*, keep: bool = False, **fields: Any) -> messages.Run:
    mounts = (messages.Mount(source=TARGET.text, destination="/data"),)
    return messages.Run(
        **{"sandbox": "one", "argv": ("true",), "mounts": mounts, **fields}, keep=keep
    )


def line(**changes: Any) -> bytes:
    return json.dumps({"op": "run", "sandbox": "one", "argv": ["true"], **changes}).encode() + b"\n"


async def test_run_returns_output_and_code_and_stops_its_sandbox(endpoint: Endpoint) -> None:
    output = (values.Output("stdout", b"\0\xff"), values.Output("stderr", b"oh"))
    endpoint.world.container = FakeContainer(output)
    endpoint.world.container.ended.set()
    seen: list[tuple[str, bytes]] = []
    ended = await endpoint.client.run(run(), lambda stream, data: seen.append((stream, data)))
    assert (ended.code, ended.stdout, ended.stderr) == (0, b"\0\xff", b"oh")
    assert seen == [("stdout", b"\0\xff"), ("stderr", b"oh")]
    await endpoint.client.stop("one")  # joins the stop that followed the command
    assert endpoint.world.container.released
    assert await endpoint.client.list() == []


LIMITS = volumes.IoLimits(write_iops=100)


async def test_kept_sandbox_is_listed_with_its_volumes_until_stopped(
    endpoint: Endpoint,
) -> None:
    mount = replace(a_record().mount, io_limits=LIMITS)
    endpoint.world.records[TARGET.text] = a_record().replaced(mount)
    await endpoint.client.run(run(keep=True))
    (listed,) = await endpoint.client.list()
    assert (listed["sandbox"], listed["volumes"]) == ("one", [TARGET.text])
    assert listed["limits"] == {TARGET.text: asdict(LIMITS)}
    for _ in range(2):
        await endpoint.client.stop("one")
    assert await endpoint.client.list() == []


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"\n", "JSON"),
        (b"[]\n", "an object"),
        (b'{"op":"format"}\n', "format"),
        (b"\xff\xfe\n", "JSON"),
        (b"x" * (messages.LIMIT_BYTES + 1) + b"\n", "more than"),
        (line(sandbox="../../etc"), "sandbox"),
        (line(sandbox="one\n"), "sandbox"),
        (line(sandbox="o" * 64), "sandbox"),
        (line(argv=[]), "argv"),
        (line(argv=["a\0b"]), "argv"),
        (line(env={"A": "\0"}), "env"),
        (line(mounts=[{"source": "/a\0b", "destination": "/d"}]), "source"),
        (line(mounts=[{"source": "/a", "destination": "data"}]), "destination"),
        (line(root=True), "root"),
        (b'{"op":"stop","sandbox":"../one"}\n', "sandbox"),
    ],
)
async def test_invalid_request_is_refused_and_starts_nothing(
    endpoint: Endpoint, sent: bytes, words: str
) -> None:
    answer = await endpoint.say(sent)
    assert (answer["event"], answer["kind"]) == ("error", "InvalidMessage")
    assert words in answer["why"]
    assert endpoint.world.calls == []
    assert await endpoint.client.list() == []


async def test_silent_client_does_not_block_others(endpoint: Endpoint) -> None:
    _, silent = await asyncio.open_unix_connection(str(endpoint.socket))
    await endpoint.client.run(run())
    silent.close()


async def test_run_error_reaches_the_client_and_stops_its_sandbox(endpoint: Endpoint) -> None:
    endpoint.world.failures["mount"].append(
        faults.GuestRefused("a bad option", hint="leave it out")
    )
    with pytest.raises(RuntimeRefused, match="a bad option") as caught:
        await endpoint.client.run(run())
    assert (caught.value.error_name, caught.value.hint) == ("GuestRefused", "leave it out")
    assert endpoint.world.bodies == {}
    assert not endpoint.world.is_locked(TARGET)


async def test_oserror_is_answered_as_request_failed(endpoint: Endpoint) -> None:
    (endpoint.socket.parent / "sandboxes").write_text("no directory can be made here")
    with pytest.raises(RuntimeRefused) as caught:
        await endpoint.client.run(run())
    assert caught.value.error_name == "RequestFailed"


async def _leave(endpoint: Endpoint, container: FakeContainer) -> None:
    """Run a command that does not end by itself, and go away."""
    endpoint.world.container = container
    reader, writer = await asyncio.open_unix_connection(str(endpoint.socket))
    writer.write(run().model_dump_json().encode() + b"\n")
    await reader.readline()  # its first output: it runs
    writer.close()
    await until(container.killed)


async def test_client_disconnect_kills_command_and_stops_its_sandbox(endpoint: Endpoint) -> None:
    container = FakeContainer([values.Output("stdout", b"begun")])
    await _leave(endpoint, container)
    await until(endpoint.world.killed)
    await endpoint.sandboxes.stop(volumes.SandboxId("one"))  # joins
    assert container.released
    assert not endpoint.world.is_locked(TARGET)


async def test_unkillable_command_does_not_keep_its_sandbox(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_KILL_TIMEOUT_S", 0)
    await _leave(endpoint, FakeContainer([values.Output("stdout", b"begun")], dies=False))
    await until(endpoint.world.killed)


async def test_daemon_stop_ends_one_command_sandboxes_and_keeps_others(tmp_path: Path) -> None:
    """Ended while they are still controlled: a directory removed under a running VM would hide who has the volume."""
    async with opened(tmp_path) as endpoint:
        await endpoint.client.run(run(keep=True, sandbox="kept", mounts=()))
        endpoint.world.container = FakeContainer()
        gate = endpoint.world.gates["container"] = Gate()
        gate.opened.set()
        running = asyncio.create_task(endpoint.client.run(run()))
        await until(gate.entered)
    with pytest.raises(RuntimeUnreachable):
        await running
    assert [path.name for path in endpoint.world.bodies] == ["kept"]
    assert [path.name for path in (tmp_path / "sandboxes").iterdir()] == ["kept"]
    assert not endpoint.world.is_locked(TARGET)


async def test_daemon_stop_ends_a_starting_one_command_sandbox(tmp_path: Path) -> None:
    async with opened(tmp_path) as endpoint:
        gate = endpoint.world.gates["start"] = Gate()
        running = asyncio.create_task(endpoint.client.run(run()))
        await until(gate.entered)
        gate.opened.set()
    with pytest.raises(RuntimeUnreachable):
        await running
    assert endpoint.world.bodies == {}


async def test_a_kept_sandbox_survives_its_client(endpoint: Endpoint) -> None:
    endpoint.world.container = FakeContainer([values.Output("stdout", b"begun")])
    reader, writer = await asyncio.open_unix_connection(str(endpoint.socket))
    writer.write(run(keep=True).model_dump_json().encode() + b"\n")
    await reader.readline()
    writer.close()
    await until(endpoint.world.container.killed)
    assert [listed["sandbox"] for listed in await endpoint.client.list()] == ["one"]


async def test_client_without_daemon_says_how_to_start_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnreachable, match="start it"):
        await Client(str(tmp_path / "none.sock")).list()
