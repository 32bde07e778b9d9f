"""Statistics by the shim's socket: its own bytes, its errors, a shim that hangs, and numbers that a guest made up."""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crust.core import volumes
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.kata import go_runtime, statistics
from crust.kata.evidence import KataBuilds, Use
from crust.kata.go_runtime import GoRuntime
from crust.kata.statistics import KataHandler, Uses
from tests.support.kata import shim_monitor
from tests.support.raised import raised
from tests.support.records.records import HANDLER, MOUNT, TARGET, a_record
from tests.support.runtimes import fake_handler
from tests.unit.host.filesystems.test_superblocks import ext4

BODY = (
    b'{"usage":[{"available":58650624,"total":58675200,"used":24576,"unit":1},'
    b'{"available":16373,"total":16384,"used":11,"unit":2}],"volume_condition":{"message":"OK"}}'
)
"""What the real shim 4.1.0 answered."""


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose sockets have paths of less than 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="crust-") as path:
        yield Path(path)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(f"{tmp_path}/volumes")
    made.open()
    return made


async def _always(body: bytes) -> bytes:
    return body


def _published(store: Store, name: str) -> Record:
    record = a_record(volumes.TargetPath.parse(f"/k/{name}/mount"))
    store.write(record)
    return record


async def test_the_shim_s_numbers_are_the_volume_s(store: Store, short: Path) -> None:
    assert isinstance(MOUNT.source, volumes.BlockSource)
    # the machine that runs the test has no such device, whose reserved blocks would count
    store.write(a_record(TARGET, source=replace(MOUNT.source, path="/dev/absent")))
    handler = KataHandler(store, KataBuilds([GoRuntime(str(short))]), Uses())
    async with shim_monitor.serving(
        short, "sandbox-1", lambda _: _always(shim_monitor.ok(BODY))
    ) as asked:
        with fake_handler.sandbox(store.root, TARGET.text, name="sandbox-1", handler=HANDLER):
            stats = await handler.stats(TARGET)
    assert asked == ["/direct-volume/stats?path=%252Fdev%252Fabsent"]  # quoted twice
    in_bytes, inodes = stats.usage
    assert (in_bytes.total, in_bytes.used, in_bytes.available) == (58675200, 24576, 58650624)
    assert (inodes.unit, inodes.total) == (volumes.UsageUnit.INODES, 16384)
    assert stats.condition is None


@pytest.mark.parametrize(
    ("reserved", "available"), [(1_000, 58650624 - (1_000 + 286) * 4096), (2**32 - 1, 0)]
)
async def test_blocks_that_are_reserved_for_root_are_not_available(
    store: Store, short: Path, reserved: int, available: int
) -> None:
    """Kata's agent tells all free blocks (f_bfree); the extents' reserve of the kernel is 2 % of 14,325."""
    fields = {"blocks": (0x04, "<I", 14_325), "incompat": (0x60, "<I", 0x40)}
    device = ext4(short / "device", reserved=(0x08, "<I", reserved), **fields)
    assert isinstance(MOUNT.source, volumes.BlockSource)
    store.write(a_record(TARGET, source=replace(MOUNT.source, path=device)))
    handler = KataHandler(store, KataBuilds([GoRuntime(str(short))]), Uses())
    async with shim_monitor.serving(short, "sandbox-1", lambda _: _always(shim_monitor.ok(BODY))):
        with fake_handler.sandbox(store.root, TARGET.text, name="sandbox-1", handler=HANDLER):
            in_bytes, inodes = (await handler.stats(TARGET)).usage
    assert (in_bytes.used, in_bytes.available) == (24576, available)
    assert inodes.available == 16373


async def test_a_full_disk_has_no_key_for_what_is_available() -> None:
    stats = go_runtime.parsed(b'{"usage":[{"total":10,"used":10,"unit":1}]}')
    assert stats.usage[0].available == 0


async def test_between_two_containers_the_last_numbers_say_their_age(
    store: Store, short: Path
) -> None:
    record = _published(store, "a")
    answers = [
        shim_monitor.ok(BODY),
        b"HTTP/1.1 500 Internal Server Error\r\n\r\nmount /dev/loop7 not found in sandbox",
    ]
    handler = KataHandler(store, KataBuilds([GoRuntime(str(short))]), Uses())
    async with shim_monitor.serving(short, "sandbox-1", lambda _: _always(answers.pop(0))):
        with fake_handler.sandbox(
            store.root, record.target.text, name="sandbox-1", handler=HANDLER
        ):
            first, second = [await handler.stats(record.target) for _ in range(2)]
    assert first.usage == second.usage
    assert second.condition is not None
    assert "s old" in second.condition.message
    assert "not found in sandbox" in second.condition.message


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 500 Internal Server Error\r\n\r\nstat nope: no such file or directory",
        b"",
        b"garbage",
        shim_monitor.ok(b"[]"),
        shim_monitor.ok(b'{"usage":[]}'),
        shim_monitor.ok(b'{"usage":[{"total":-1,"unit":1}]}'),
        shim_monitor.ok(b'{"usage":[{"total":1e300,"unit":1}]}'),
        shim_monitor.ok(b'{"usage":[{"total":' + b"9" * 5000 + b',"unit":1}]}'),
        shim_monitor.ok(b'{"usage":' + b"[" * 9000),
        shim_monitor.ok(b"x" * 1_000_000),
    ],
)
async def test_what_is_no_answer_is_an_error(store: Store, short: Path, answer: bytes) -> None:
    record = _published(store, "a")
    handler = KataHandler(store, KataBuilds([GoRuntime(str(short))]), Uses())
    async with shim_monitor.serving(short, "sandbox-1", lambda _: _always(answer)):
        with (
            fake_handler.sandbox(store.root, record.target.text, name="sandbox-1", handler=HANDLER),
            raised("StatisticsUnavailable"),
        ):
            await handler.stats(record.target)


@pytest.mark.parametrize(
    ("container", "hint"), [("", "none has the volume now"), ("c1", "the guest's agent hangs")]
)
async def test_agent_is_named_only_while_a_container_has_the_volume(
    store: Store, short: Path, container: str, hint: str
) -> None:
    """Between the containers of a pod that fails again and again the agent is well."""
    record, uses = _published(store, "a"), Uses()
    uses.started(record.digest, Use("sandbox-1", container))
    handler = KataHandler(store, KataBuilds([GoRuntime(str(short))]), uses)
    async with shim_monitor.serving(
        short, "sandbox-1", lambda _: _always(b"HTTP/1.1 500 x\r\n\r\nnot found")
    ):
        with (
            fake_handler.sandbox(store.root, record.target.text, name="sandbox-1", handler=HANDLER),
            raised("StatisticsUnavailable", match=hint),
        ):
            await handler.stats(record.target)


async def test_guests_text_in_the_error_is_one_printable_line(store: Store, short: Path) -> None:
    record = _published(store, "a")
    handler = KataHandler(store, KataBuilds([GoRuntime(str(short))]), Uses())
    answer = b"HTTP/1.1 500 x\r\n\r\nagent: \x1b]0;owned\x07\n[OK] all volumes healthy"
    async with shim_monitor.serving(short, "sandbox-1", lambda _: _always(answer)):
        with (
            fake_handler.sandbox(store.root, record.target.text, name="sandbox-1", handler=HANDLER),
            raised("StatisticsUnavailable") as refused,
        ):
            await handler.stats(record.target)
    assert r"agent: \x1b]0;owned\x07\n[OK] all" in str(refused.value)
    assert str(refused.value).isprintable()


@given(st.binary(max_size=300))
def test_a_body_is_numbers_or_a_value_error(body: bytes) -> None:
    try:
        go_runtime.parsed(body)
    except ValueError:
        return


async def test_without_a_sandbox_or_its_socket_it_says_so(store: Store, short: Path) -> None:
    record = _published(store, "a")
    handler = KataHandler(store, KataBuilds([GoRuntime(str(short))]), Uses())
    with raised("NotInSandbox"):
        await handler.stats(record.target)
    with raised("NotPublished"):
        await handler.stats(TARGET)
    for name in ("sandbox-1", "../../etc"):
        with (
            fake_handler.sandbox(store.root, record.target.text, name=name, handler=HANDLER),
            pytest.raises(Exception, match=r"StatisticsUnavailable|cannot be"),
        ):
            await handler.stats(record.target)


async def test_shim_that_hangs_has_one_request_and_delays_nobody_else(
    store: Store, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 sandboxes with 10 volumes each, of which one answers nothing."""
    monkeypatch.setattr(statistics, "_ANSWER_S", 60.0)
    never = asyncio.Event()

    async def hang(_: str) -> bytes:
        await never.wait()
        return b""

    handler = KataHandler(store, KataBuilds([GoRuntime(str(short))]), Uses())
    records = {(box, at): _published(store, f"{box}-{at}") for box in range(10) for at in range(10)}
    async with AsyncExitStack() as stack:
        asked = []
        for box in range(10):
            answers: shim_monitor.Answers = (
                hang if box == 0 else lambda _: _always(shim_monitor.ok(BODY))
            )
            asked.append(
                await stack.enter_async_context(
                    shim_monitor.serving(short, f"sandbox-{box}", answers)
                )
            )
        for (box, _), record in records.items():
            target = record.target.text
            held = fake_handler.sandbox(store.root, target, name=f"sandbox-{box}", handler=HANDLER)
            stack.enter_context(held)
        calls = [asyncio.ensure_future(handler.stats(r.target)) for r in records.values()]
        assert len(await asyncio.gather(*calls[10:])) == 90
        assert not any(call.done() for call in calls[:10])
        for call in calls[:10]:
            call.cancel()
        await asyncio.wait(calls[:10])
        monkeypatch.setattr(statistics, "_ANSWER_S", 0.01)
        with raised("StatisticsUnavailable", match="no answer in time"):
            await handler.stats(records[0, 0].target)
        await handler.close()
        never.set()
    assert len(asked[0]) == 1
