"""Claims on real block devices: exactly one sandbox has the volume, exactly as long as it lives."""

import asyncio
import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from crust.core import errors, volumes
from crust.handoff import claims
from crust.handoff.claims import HeldBySandbox, NotPublished, State
from crust.handoff.record import UnreadableHandoffRecord
from crust.handoff.store import Store
from crust.host.block import devices, holders, openers, users
from crust.host.mounts import mount_api
from crust.runtime_handler import claims as coroutines
from crust.runtime_handler.blocking import (
    Claim,
    ClaimLost,
    NotHandedOver,
    adopt_volume,
    claim_volume,
    claim_volumes,
    process_of,
)
from tests.integration.runtime_handler.conftest import (
    ONE,
    TWO,
    MakeDevice,
    StartHypervisor,
    record_of,
    vm_process,
)
from tests.support.faults import crashes
from tests.support.raised import raised
from tests.support.records.records import HANDLER, TARGET

pytestmark = pytest.mark.root

FEATURES = frozenset(volumes.HandlerFeature)
OTHER = volumes.TargetPath.parse("/var/lib/kubelet/pods/other/mount")


def _claim(
    store: Store, sandbox: volumes.SandboxId = ONE, target: volumes.TargetPath = TARGET
) -> Claim:
    return claim_volume(store.root, target, sandbox, HANDLER, features=FEATURES)


def _is_free(store: Store, path: str) -> bool:
    """Whether nobody has the entry's lock or the device."""
    if claims.is_held(store.layout.entry(TARGET)):
        return False
    os.close(devices.open_exclusive(path))
    return True


@pytest.mark.spec("H-29")
def test_claim_names_its_sandbox_and_holds_the_device_exclusively(
    store: Store, device: MakeDevice, tmp_path: Path
) -> None:
    volume = device("a")
    subprocess.run(["mkfs.ext4", "-q", volume.path], check=True, timeout=30)
    store.write(record_of(volume, TARGET))
    with _claim(store) as claim:
        claim.report_mounted()
        held = claims.read(store.layout.entry(TARGET))
        assert held is not None
        assert (held.sandbox_id, held.state, held.live) == (ONE, State.MOUNTED, True)
        (tmp_path / "mnt").mkdir()
        with pytest.raises(errors.NotReady):
            mount_api.mount_device(volume.path, f"{tmp_path}/mnt", "ext4", ())
        formatting = subprocess.run(
            ["mkfs.ext4", "-q", "-F", volume.path], capture_output=True, check=False, timeout=30
        )
        assert formatting.returncode != 0
    assert claims.read(store.layout.entry(TARGET)) is None
    assert _is_free(store, volume.path)


def test_second_sandbox_is_refused_by_name_of_first(store: Store, device: MakeDevice) -> None:
    store.write(record_of(device("a"), TARGET))
    with _claim(store), pytest.raises(HeldBySandbox, match="sandbox-1 of kata"):
        _claim(store, TWO)


def test_volumes_of_a_container_are_claimed_by_one_look(
    store: Store, device: MakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look begins when each of them is locked."""
    for target in (TARGET, OTHER):
        store.write(record_of(device(target.digest[:8]), target))
    looks = list[set[volumes.TargetPath]]()

    def look() -> openers.Openers:
        paths = {target: store.layout.entry(target) for target in (TARGET, OTHER)}
        looks.append({target for target in paths if claims.is_held(paths[target])})
        return {}

    monkeypatch.setattr(users, "openers", look)
    taken = claim_volumes(store.root, (TARGET, OTHER), ONE, HANDLER, features=FEATURES)
    assert looks == [{TARGET, OTHER}]
    for claim, target in zip(taken, (TARGET, OTHER), strict=True):
        held = claims.read(store.layout.entry(target))
        assert held is not None
        assert (claim.record.target, held.sandbox_id, held.live) == (target, ONE, True)
        claim.release()


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "unusable"])
def test_no_volume_is_claimed_if_one_is_refused(
    store: Store, device: MakeDevice, *, is_held: bool
) -> None:
    """The dead claim of the volume that could be claimed is as before."""
    free, other = device("a"), device("b")
    store.write(record_of(free, TARGET))
    store.write(record_of(other, OTHER))
    with _claim(store) as claim:
        claim.close()
    dead = claims.read(store.layout.entry(TARGET))
    with contextlib.ExitStack() as stack:
        if is_held:
            stack.enter_context(_claim(store, TWO, OTHER))
        else:
            stack.callback(os.close, os.open(other.path, os.O_RDWR))
        with pytest.raises((HeldBySandbox, holders.DeviceInUse)):
            claim_volumes(store.root, (TARGET, OTHER), TWO, HANDLER, features=FEATURES)
        assert claims.read(store.layout.entry(TARGET)) == dead
        assert _is_free(store, free.path)


@pytest.mark.spec("H-25")
def test_claim_lives_as_long_as_the_hypervisor(
    store: Store, device: MakeDevice, hypervisor_of: StartHypervisor
) -> None:
    volume = device("a")
    store.write(record_of(volume, TARGET))
    claim = _claim(store)
    with hypervisor_of(claim) as hypervisor:
        assert claim.fds == ()
        assert not claims.is_held(store.layout.entry(OTHER))
        with pytest.raises(HeldBySandbox):
            claim.release()
        with pytest.raises(holders.DeviceInUse):
            devices.open_exclusive(volume.path)
        hypervisor.kill()
        assert _is_free(store, volume.path)
        dead = claims.read(store.layout.entry(TARGET))
        assert dead is not None
        assert (dead.sandbox_id, dead.live) == (ONE, False)
    claim.release()
    claim.release()
    assert claims.read(store.layout.entry(TARGET)) is None


@pytest.mark.spec("H-28")
def test_a_device_that_the_host_has_mounted_is_not_claimed(
    store: Store, device: MakeDevice, tmp_path: Path
) -> None:
    volume = device("a")
    subprocess.run(["mkfs.ext4", "-q", volume.path], check=True, timeout=30)
    store.write(record_of(volume, TARGET))
    store.write(record_of(volume, OTHER, readonly=True))
    (tmp_path / "mnt").mkdir()
    mount_api.mount_device(volume.path, f"{tmp_path}/mnt", "ext4", ())
    try:
        for target in (TARGET, OTHER):
            with pytest.raises(errors.NotReady, match="mnt"):
                _claim(store, ONE, target)
            assert claims.read(store.layout.entry(target)) is None
    finally:
        mount_api.unmount(f"{tmp_path}/mnt")
    _claim(store).release()


@pytest.mark.spec("H-23")
def test_claim_refuses_a_device_that_was_attached_again(store: Store, device: MakeDevice) -> None:
    """Under the same number, as it is unless others on the machine attach or detach something meanwhile."""
    meant, again = device("a").identity, device("a")
    number = replace(again.identity, disk_sequence=meant.disk_sequence)
    store.write(record_of(replace(again, identity=number), TARGET))
    with raised("DeviceChanged", match=str(again.identity)):
        _claim(store)
    assert _is_free(store, again.path)
    assert claims.read(store.layout.entry(TARGET)) is None


@pytest.mark.parametrize("path", ["/dev/null", "/etc/hostname", "/dev/crust-is-not-there"])
def test_claim_refuses_a_path_that_is_not_a_block_device(
    store: Store, device: MakeDevice, path: str
) -> None:
    volume = device("a")
    record = record_of(volume, TARGET)
    text = record.to_bytes().replace(volume.path.encode(), path.encode())
    store.write(record)
    Path(store.layout.entry(TARGET).record).write_bytes(text)
    with pytest.raises((errors.InvalidRequest, errors.NotFound)):
        _claim(store)
    assert _is_free(store, volume.path)


def test_claim_refuses_absent_foreign_and_unreadable_entries(
    store: Store, device: MakeDevice
) -> None:
    volume = device("a")
    with pytest.raises(NotPublished):
        _claim(store)
    store.write(record_of(volume, TARGET))
    with raised("WrongHandler", match="kata"):
        claim_volume(store.root, TARGET, ONE, volumes.HandlerName("other"))
    assert _is_free(store, volume.path)
    Path(store.layout.entry(TARGET).record).write_text("{}")
    with pytest.raises(UnreadableHandoffRecord):
        _claim(store)
    assert _is_free(store, volume.path)


def test_a_restarted_handler_adopts_the_claims_of_its_own_sandboxes(
    store: Store, device: MakeDevice, hypervisor_of: StartHypervisor
) -> None:
    store.write(record_of(device("a"), TARGET))
    with hypervisor_of(_claim(store)) as hypervisor:
        adopted = adopt_volume(store.root, TARGET, ONE, HANDLER, hypervisor.holder_pid)
        adopted.report_error("the guest lost the filesystem")
        adopted.close()
        written = claims.read(store.layout.entry(TARGET))
        assert written is not None
        assert (written.state, written.error) == (State.ERROR, "the guest lost the filesystem")
        with pytest.raises(ClaimLost, match="sandbox-1 has it"):
            adopt_volume(store.root, TARGET, TWO, HANDLER, hypervisor.holder_pid)
        with raised("WrongHandler"):
            adopt_volume(
                store.root, TARGET, ONE, volumes.HandlerName("other"), hypervisor.holder_pid
            )
        with pytest.raises(HeldBySandbox):
            adopted.release()
        hypervisor.kill()
        with pytest.raises(ClaimLost, match="ended"):
            adopt_volume(store.root, TARGET, ONE, HANDLER, hypervisor.holder_pid)
    adopted.release()
    assert claims.read(store.layout.entry(TARGET)) is None


@pytest.mark.spec("H-27")
def test_adopted_claim_cannot_end_before_it_is_written(
    store: Store, device: MakeDevice, hypervisor_of: StartHypervisor
) -> None:
    """The hypervisor ends between the adoption and the write: another sandbox must not come in between."""
    store.write(record_of(device("a"), TARGET))
    with hypervisor_of(_claim(store)) as hypervisor:
        adopted = adopt_volume(store.root, TARGET, ONE, HANDLER, hypervisor.holder_pid)
        hypervisor.kill()
    with pytest.raises(HeldBySandbox, match="sandbox-1"):
        _claim(store, TWO)
    adopted.report_mounted()
    adopted.close()
    with _claim(store, TWO):
        written = claims.read(store.layout.entry(TARGET))
        assert written is not None
        assert written.sandbox_id == TWO


@pytest.mark.spec("H-27")
def test_adopt_refuses_a_process_that_does_not_hold_the_lock(
    store: Store, device: MakeDevice
) -> None:
    """Its own hypervisor is dead, and a held lock under its name alone proves nothing: it is another process's."""
    store.write(record_of(device("a"), TARGET))
    path = store.layout.entry(TARGET).claim_lock
    with _claim(store), open(path, "r+b") as same_file, open(path, "rb") as readable:
        program = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        fds = (same_file.fileno(), readable.fileno())
        with subprocess.Popen(program, stdin=subprocess.PIPE, pass_fds=fds) as other:
            with pytest.raises(ClaimLost, match="does not hold the lock"):
                adopt_volume(store.root, TARGET, ONE, HANDLER, other.pid)
            other.kill()
        assert claims.is_held(store.layout.entry(TARGET))
    assert not claims.is_held(store.layout.entry(TARGET))


@pytest.mark.spec("H-25")
def test_claim_is_not_handed_over_to_process_without_lock(store: Store, device: MakeDevice) -> None:
    """A forgotten `pass_fds`: the VM would run without a claim, and the next sandbox would be a second writer."""
    store.write(record_of(device("a"), TARGET))
    claim = _claim(store)
    with vm_process() as process:
        with pytest.raises(NotHandedOver, match=str(process.pid)):
            claim.hand_over(process.pid)
        with pytest.raises(HeldBySandbox, match="sandbox-1"):
            _claim(store, TWO)
    with vm_process(*claim.fds[1:]) as process, pytest.raises(NotHandedOver):
        claim.hand_over(process.pid)  # it has the device alone
    with vm_process(*claim.fds) as process:
        claim.hand_over(process.pid)
        assert claim.fds == ()
        with pytest.raises(HeldBySandbox, match="sandbox-1"):
            _claim(store, TWO)


@pytest.mark.spec("H-29")
def test_claim_left_with_its_error_names_no_process(store: Store, device: MakeDevice) -> None:
    """The VM runs on, and has given the device back: another sandbox may have it."""
    store.write(record_of(device("a"), TARGET))
    with vm_process() as process:
        named = process_of(process.pid)
        claim = claim_volume(store.root, TARGET, ONE, HANDLER, process=named)
        written = claims.read(store.layout.entry(TARGET))
        assert written is not None
        assert (written.pid, written.process) == (process.pid, named)
        claim.release(error="the guest cannot mount it")
        left = claims.read(store.layout.entry(TARGET))
        assert left is not None
        assert (left.state, left.process) == (State.ERROR, None)
        _claim(store, TWO).release()


@pytest.mark.spec("H-23")
def test_claim_that_fails_leaves_the_dead_claim(store: Store, device: MakeDevice) -> None:
    store.write(record_of(device("a"), TARGET))
    _claim(store).close()
    dead = claims.read(store.layout.entry(TARGET))
    with raised("WrongHandler"):
        claim_volume(store.root, TARGET, TWO, volumes.HandlerName("other"))
    assert claims.read(store.layout.entry(TARGET)) == dead
    with _claim(store, TWO):
        pass
    assert claims.read(store.layout.entry(TARGET)) is None


@pytest.mark.spec("H-24")
def test_report_does_not_overwrite_another_sandboxs_claim(store: Store, device: MakeDevice) -> None:
    store.write(record_of(device("a"), TARGET))
    old = _claim(store)
    old.close()  # the hypervisor is dead
    with _claim(store, TWO):
        with pytest.raises(ClaimLost, match="handed over"):
            old.report_mounted()
        with pytest.raises(HeldBySandbox, match="sandbox-2"):
            old.release()
    written = claims.read(store.layout.entry(TARGET))
    assert written is None


def test_release_after_unpublish_is_ok(store: Store, device: MakeDevice) -> None:
    store.write(record_of(device("a"), TARGET))
    claim = _claim(store)
    claim.close()
    with store.begin_removal(TARGET) as unpublish:
        unpublish.complete()
    claim.release()
    assert store.scan() == ()


def test_handler_killed_at_any_call_of_claim_leaves_volume_free(
    store: Store, device: MakeDevice
) -> None:
    volume = device("a")
    store.write(record_of(volume, TARGET))
    points = 0
    for _ in crashes.crash_points(lambda _n: None, lambda _n: _claim(store).close()):
        points += 1
        assert _is_free(store, volume.path)
        written = claims.read(store.layout.entry(TARGET))
        assert written is None or not written.live
    assert points > 3
    _claim(store, TWO).release()


def test_claim_without_space_fails_and_leaves_the_volume_free(
    store: Store, device: MakeDevice
) -> None:
    volume = device("a")
    store.write(record_of(volume, TARGET))
    made: list[Claim] = []

    def release(_number: int) -> None:
        while made:  # of a point that does not matter to a claim, such as reading who had it before
            made.pop().release()

    points = 0
    for _, error in crashes.failure_points(release, lambda _n: made.append(_claim(store))):
        points += 1
        assert isinstance(error, errors.Exhausted)
        assert _is_free(store, volume.path)
    assert points > 3
    release(0)


def test_a_release_that_fails_anywhere_still_frees_the_volume(
    store: Store, device: MakeDevice
) -> None:
    volume = device("a")
    store.write(record_of(volume, TARGET))
    made: list[Claim] = []
    for _, error in crashes.failure_points(
        lambda _n: made.append(_claim(store)), lambda _n: made[-1].release()
    ):
        assert isinstance(error, errors.Exhausted)
        assert _is_free(store, volume.path)
        written = claims.read(store.layout.entry(TARGET))
        assert written is None or not written.live
    assert len(made) > 1


@pytest.mark.spec("H-38")
@pytest.mark.parametrize("readonly", [False, True])
def test_group_that_kubelet_gave_to_guard_mount_becomes_volumes(
    store: Store, device: MakeDevice, tmp_path: Path, *, readonly: bool
) -> None:
    """What a kubelet does with fsGroup when the driver has no VOLUME_MOUNT_GROUP: chgrp, g+rwx and setgid."""
    target = volumes.TargetPath.parse(f"{tmp_path}/mount")
    Path(target.text).mkdir()
    mount_api.mount_guard(target.text)
    store.write(record_of(device("a"), target, readonly=readonly))
    with _claim(store, target=target) as claim:
        assert claim.record.mount.group is None
    os.chown(target.text, -1, 4059)
    os.chmod(target.text, 0o2775)
    with _claim(store, target=target) as claim:
        group = claim.record.mount.group
        assert group == (None if readonly else volumes.GroupChange(4059))
        adopted = adopt_volume(store.root, target, ONE, HANDLER, os.getpid())
        assert adopted.record == claim.record
        adopted.close()
    mount_api.unmount(target.text)


@pytest.mark.spec("H-38")
def test_entry_of_a_co_is_not_claimed_without_its_guard(
    store: Store, device: MakeDevice, tmp_path: Path
) -> None:
    """The guard was lost, and with it the pod's group, until the proxy mounts it again."""
    target = volumes.TargetPath.parse(f"{tmp_path}/mount")
    Path(target.text).mkdir()
    store.write(record_of(device("a"), target).replaced(request="1" * 64))
    with raised("GuardMissing", match=target.text):
        _claim(store, target=target)
    assert claims.read(store.layout.entry(target)) is None
    mount_api.mount_guard(target.text, group=3000)
    with _claim(store, target=target) as claim:
        assert claim.record.mount.group == volumes.GroupChange(3000)
        mount_api.unmount(target.text)
        adopted = adopt_volume(store.root, target, ONE, HANDLER, os.getpid())
        adopted.close()


@pytest.mark.spec("H-38")
def test_group_of_the_record_has_priority_over_the_guard_mounts(
    store: Store, device: MakeDevice, tmp_path: Path
) -> None:
    target = volumes.TargetPath.parse(f"{tmp_path}/mount")
    Path(target.text).mkdir()
    mount_api.mount_guard(target.text)
    plain = record_of(device("a"), target)
    wanted = volumes.GroupChange(7, volumes.GroupPolicy.ON_ROOT_MISMATCH)
    store.write(plain.replaced(replace(plain.mount, group=wanted)))
    os.chown(target.text, -1, 4059)
    with _claim(store, target=target) as claim:
        assert claim.record.mount.group == wanted
    mount_api.unmount(target.text)


def test_writable_volume_is_mounted_only_when_it_was_grown(
    store: Store, device: MakeDevice
) -> None:
    for readonly in (False, True):
        target = volumes.TargetPath(f"{TARGET.text}-{readonly}")
        grown: list[volumes.TargetPath] = []
        record = record_of(device(str(readonly)), target)
        store.write(record.replaced(replace(record.mount, readonly=readonly)))

        async def grow() -> None:
            grown.append(target)  # noqa: B023 - called before the next round

        async def fails() -> None:
            raise errors.RuntimeFailed("the guest cannot grow it")

        claim = _claim(store, ONE, target)
        if not readonly:
            with pytest.raises(errors.RuntimeFailed):
                asyncio.run(coroutines.Claim(claim).grow_and_report(fails))
            assert claim_of(store, target).state is State.CLAIMED
        asyncio.run(coroutines.Claim(claim).grow_and_report(grow))
        assert grown == ([] if readonly else [target])
        assert claim_of(store, target).state is State.MOUNTED
        claim.release()


def claim_of(store: Store, target: volumes.TargetPath) -> claims.Claim:
    entry = store.read(target)
    assert entry is not None
    assert entry.claim is not None
    return entry.claim
