"""ControllerModifyVolume and ControllerExpandVolume on an engine in memory: all of a change, or none."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import pytest

from crust.blockdriver import guests
from crust.blockdriver.controller.class_parameters import Changes
from crust.blockdriver.controller.create_volume import VolumeExistsDifferently
from crust.blockdriver.driver import Driver
from crust.blockdriver.records.models import Limits, VolumeRecord
from crust.core import errors, volumes
from tests.support.drivers import driver_state
from tests.support.drivers.block_driver import MIB, mount
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.faults import crashes
from tests.support.faults.crashes import Killed, killed
from tests.support.nodes.fake_throttle import FakeThrottle
from tests.support.raised import raised
from tests.support.runtimes.fake_guests import FakeGuests, Guest

TARGETS = ("/pods/one/mount", "/pods/two/mount")
OLD = volumes.IoLimits(read_iops=100, write_iops=200)
NEW = (("read_bytes_per_second", MIB), ("read_iops", 50))
AFTER = volumes.IoLimits(read_iops=50, write_iops=200, read_bytes_per_second=MIB)


@dataclass
class Bench:
    """A volume with limits, and the guests and kernel that take new ones."""

    state: Driver
    guests: FakeGuests
    throttle: FakeThrottle
    volume_id: volumes.VolumeId

    @property
    def record(self) -> VolumeRecord:
        return self.state.stores.volume_records.load(self.volume_id)

    @property
    def limits(self) -> volumes.IoLimits:
        return self.record.limits.value

    async def change(self, changes: Changes = NEW) -> None:
        await self.state.controller.modifier.modify(self.volume_id, changes)

    def deferred(self, target: str = TARGETS[0], *, running: bool = True) -> Guest:
        """A guest that has the volume, and obeys the old limits."""
        published = driver_state.published(self.volume_id, target)
        self.state.stores.node_state.note_published(published)
        guest = self.guests.add(target, running=running)
        guest.limits, guest.applied = OLD, OLD if running else None
        return guest


@pytest.fixture
async def bench(tmp_path: Path) -> Bench:
    throttle, runtime_guests = FakeThrottle(), FakeGuests()
    state = driver_state.opened(tmp_path, runtime_guests=runtime_guests, throttle=throttle)
    request = replace(
        driver_state.create(required=64 * MIB), limits=(("read_iops", 100), ("write_iops", 200))
    )
    made = await state.controller.provisioner.create(request)
    return Bench(state, runtime_guests, throttle, made.volume_id)


async def test_modify_of_an_unused_volume_changes_the_record(bench: Bench) -> None:
    assert bench.limits == OLD
    await bench.change()
    assert bench.limits == AFTER
    assert bench.record.limits_before is None
    await bench.change()
    assert bench.limits == AFTER


@pytest.mark.parametrize("running", [True, False], ids=["at once", "to the next sandbox"])
async def test_modify_of_deferred_volume_sends_all_limits_to_guest(
    bench: Bench, *, running: bool
) -> None:
    guest = bench.deferred(running=running)
    await bench.change()
    assert (bench.limits, guest.limits) == (AFTER, AFTER)
    assert guest.applied == (AFTER if running else None)


async def test_modify_refused_by_the_guest_changes_nothing(bench: Bench) -> None:
    first, second = bench.deferred(TARGETS[0]), bench.deferred(TARGETS[1])
    second.error = errors.NotReady("the handler cannot limit")
    with pytest.raises(errors.NotReady, match="the handler cannot limit"):
        await bench.change()
    assert (bench.limits, first.applied, second.applied) == (OLD, OLD, OLD)
    assert bench.record.limits_before is None


@pytest.mark.parametrize("error", [errors.NotReady("busy"), errors.PeerUnavailable("away")])
async def test_modify_refused_and_not_restored_keeps_the_intent(
    bench: Bench, error: errors.CrustError
) -> None:
    first, second = bench.deferred(TARGETS[0]), bench.deferred(TARGETS[1])
    second.error = errors.NotReady("the handler cannot limit")
    first.error_when_limited = error
    with raised("LimitsNotRestored"):
        await bench.change()
    assert (bench.limits, first.applied) == (AFTER, AFTER)
    assert bench.record.limits_before == Limits(**asdict(OLD))
    first.error = second.error = first.error_when_limited = None
    await bench.change()
    assert (bench.limits, second.applied) == (AFTER, AFTER)
    assert bench.record.limits_before is None


@pytest.mark.parametrize("retry", [NEW, ()], ids=["of the CO", "of the driver"])
async def test_modify_with_unreachable_guest_keeps_the_intent_for_a_retry(
    bench: Bench, retry: Changes
) -> None:
    guest, modifier = bench.deferred(), bench.state.controller.modifier
    bench.state.stores.access.attach(bench.volume_id)
    assert modifier.interrupted() == ()
    guest.error = errors.PeerUnavailable("the handler is absent")
    with pytest.raises(errors.PeerUnavailable):
        await bench.change()
    assert bench.record.limits_before == Limits(**asdict(OLD))
    assert modifier.interrupted() == (bench.volume_id,)
    guest.error = None
    await bench.change(retry)
    assert (bench.limits, guest.applied) == (AFTER, AFTER)
    assert bench.record.limits_before is None
    assert modifier.interrupted() == ()


async def test_modify_retry_refused_restores_the_limits_before_the_first_try(bench: Bench) -> None:
    guest = bench.deferred()
    guest.error = errors.PeerUnavailable("the handler is absent")
    with pytest.raises(errors.PeerUnavailable):
        await bench.change()
    guest.error = errors.NotReady("this handler cannot limit")
    with pytest.raises(errors.NotReady):
        await bench.change()
    assert bench.limits == OLD
    assert bench.record.limits_before is None


async def test_modify_during_a_publish_is_aborted(bench: Bench) -> None:
    bench.deferred()
    bench.guests.by_target.clear()
    with raised("PublishInProgress"):
        await bench.change()
    assert bench.limits == OLD


async def test_modify_without_a_runtime_socket_is_refused_before_any_write(bench: Bench) -> None:
    bench.deferred()
    unreachable = replace(bench.state.node.io_limits, guests=guests.Guests())
    modifier = replace(bench.state.controller.modifier, enforcement=unreachable)
    with crashes.at_call(0, killed), raised("NoRuntimeSocket"):
        await modifier.modify(bench.volume_id, NEW)
    assert bench.limits == OLD


async def test_modify_refused_by_the_kernel_changes_nothing(bench: Bench) -> None:
    guest = bench.deferred()
    bench.state.stores.access.attach(bench.volume_id)
    bench.throttle.failure = errors.RuntimeFailed("the kernel says no")
    with pytest.raises(errors.RuntimeFailed, match="the kernel says no"):
        await bench.change()
    assert (bench.limits, guest.applied, bench.guests.asked) == (OLD, OLD, [])


async def test_expand_changes_no_limits_and_does_not_call_the_guest(bench: Bench) -> None:
    bench.deferred()
    wanted = volumes.CapacityRange(128 * MIB)
    assert driver_state.expand(bench.state, bench.volume_id, wanted) == (128 * MIB, True)
    assert (bench.guests.asked, bench.limits) == ([], OLD)


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("defer", ["always", "runtime-class", ""])
async def test_expand_that_nobody_would_use_grows_nothing(
    bench: Bench, defer: str, *, grows: bool
) -> None:
    """A pod on the host may mount a volume of another class, and grow it."""
    record, stores = bench.record, bench.state.stores
    parameters = {**record.parameters, **({"crust.dev/defer": defer} if defer else {})}
    stores.volume_records.save(record.replaced(parameters=parameters))
    content = stores.content_records.load(bench.volume_id)
    stores.content_records.save(content.replaced(nobody_grows=not grows))
    wanted = volumes.CapacityRange(128 * MIB)
    if grows or defer != "always":
        assert driver_state.expand(bench.state, bench.volume_id, wanted)[0] == 128 * MIB
        return
    with raised("NobodyGrowsFilesystem"):
        driver_state.expand(bench.state, bench.volume_id, wanted)
    assert bench.record.capacity_bytes == 64 * MIB
    assert stores.provisioning.image_bytes(bench.volume_id) == 64 * MIB


async def test_create_repeated_with_other_limits_is_a_conflict(bench: Bench) -> None:
    provisioner = bench.state.controller.provisioner
    plain = driver_state.create(required=64 * MIB)
    same = replace(plain, limits=(("read_iops", 100), ("write_iops", 200)))
    assert (await provisioner.create(same)).volume_id == bench.volume_id
    with pytest.raises(VolumeExistsDifferently, match="mutable_parameters"):
        await provisioner.create(plain)


async def test_create_mutable_parameters_override_the_storage_class(bench: Bench) -> None:
    sent = {"readIOPS": "300", "writeIOPS": "400"}
    request = replace(driver_state.create("other", sent=sent), limits=(("read_iops", 30),))
    made = await bench.state.controller.provisioner.create(request)
    record = bench.state.stores.volume_records.load(made.volume_id)
    assert record.limits.value == volumes.IoLimits(read_iops=30, write_iops=400)


async def test_validate_compares_with_the_present_limits(bench: Bench) -> None:
    async def why(**sent: str) -> str:
        lister = bench.state.controller.lister
        return await asyncio.to_thread(lister.why_not, bench.volume_id, (mount(),), {}, {}, sent)

    assert await why(readIOPS="100") == ""
    assert await why(readIOPS="100", writeIOPS="200", readBytesPerSecond="0") == ""
    assert "mutable_parameters" in await why(readIOPS="101")
    assert "not known" in await why(iops="100")
    await bench.change()
    assert await why(readIOPS="50") == ""


async def test_modify_interrupted_without_a_guest_counts_as_applied(bench: Bench) -> None:
    """The start has set it, so a refusal of the next change goes back to it and not to what was before."""
    record = bench.record
    interrupted = record.replaced(limits=Limits(read_iops=70), limits_before=record.limits)
    bench.state.stores.volume_records.save(interrupted)
    bench.state.stores.access.attach(bench.volume_id)
    assert bench.state.controller.modifier.interrupted() == ()
    bench.throttle.failure = errors.RuntimeFailed("the kernel says no")
    with pytest.raises(errors.RuntimeFailed):
        await bench.change()
    assert bench.limits == volumes.IoLimits(read_iops=70)


async def restarted(bench: Bench, root: Path) -> None:
    """The driver starts again, and does what it does then."""
    bench.state = driver_state.opened(
        root,
        backend=cast("MemoryBackend", bench.state.stores.provisioning),
        runtime_guests=bench.guests,
        throttle=bench.throttle,
    )
    modifier = bench.state.controller.modifier
    for volume_id in await asyncio.to_thread(modifier.interrupted):
        with contextlib.suppress(errors.NotReady):
            await modifier.modify(volume_id, ())


async def cut_short(
    bench: Bench, root: Path, act: Callable[[int], Awaitable[None]], fault: Callable[[str], None]
) -> AsyncIterator[int]:
    """The numbers of the calls of `act` that meet the fault, in turn; after each the driver has started again."""
    for number in itertools.count():
        await bench.change(tuple(asdict(OLD).items()))
        failing = contextlib.suppress(Killed, errors.NotReady, errors.Exhausted)
        with crashes.at_call(number, fault) as count, failing:
            await act(number)
        if count() <= number:
            break
        await restarted(bench, root)
        yield number
    assert number > 5


@pytest.mark.parametrize("refuses", [False, True], ids=["agrees", "refuses"])
async def test_modify_killed_anywhere_leaves_record_and_guests_equal_after_start(
    bench: Bench, tmp_path: Path, *, refuses: bool
) -> None:
    first, second = bench.deferred(TARGETS[0]), bench.deferred(TARGETS[1])
    bench.state.stores.access.attach(bench.volume_id)
    seen = set()

    async def change(_: int) -> None:
        second.error = errors.NotReady("the handler cannot limit") if refuses else None
        await bench.change()

    async for _ in cut_short(bench, tmp_path, change, killed):
        assert bench.record.limits_before is None
        assert bench.limits == first.applied
        assert refuses or bench.limits == second.applied
        seen.add(bench.limits)
        second.error = None
    assert seen == ({OLD} if refuses else {OLD, AFTER})


@pytest.mark.parametrize("fault", [killed, crashes.no_space])
async def test_modify_cut_short_anywhere_is_finished_by_a_retry(
    bench: Bench, tmp_path: Path, fault: Callable[[str], None]
) -> None:
    guest = bench.deferred()
    backend = cast("MemoryBackend", bench.state.stores.provisioning)
    backend.attach(bench.volume_id)

    def grow(number: int) -> tuple[int, bool]:
        wanted = volumes.CapacityRange(64 * MIB * (number + 2))
        return driver_state.expand(bench.state, bench.volume_id, wanted)

    async def grow_and_change(number: int) -> None:
        grow(number)
        await bench.change()

    async for number in cut_short(bench, tmp_path, grow_and_change, fault):
        assert bench.record.capacity_bytes <= backend.images[bench.volume_id]
        assert bench.limits == guest.applied
        assert grow(number) == (64 * MIB * (number + 2), True)
        await bench.change()
        assert (bench.limits, guest.applied) == (AFTER, AFTER)


async def test_unreadable_record_does_not_block_modify_of_other_volumes(bench: Bench) -> None:
    bench.deferred()
    bench.state.stores.access.attach(bench.volume_id)
    Path(bench.state.stores.volume_records._store.shown(bench.volume_id)).write_text("not JSON")
    assert bench.state.controller.modifier.interrupted() == ()
