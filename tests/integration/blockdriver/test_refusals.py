"""Refused calls, and that they changed nothing."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.blockdriver.host import fs_group
from crust.blockdriver.node import node_unpublish
from crust.blockdriver.node.publish import node_publish, publish_rules
from crust.core import errors, volumes
from crust.host.block import devices, holders, openers, signatures
from crust.host.files import target_paths
from crust.host.mounts import mount_api, mountinfo
from crust.rpc.call import Call
from tests.support.co import encoded, stage_request
from tests.support.drivers.block_driver import MIB, Bench, block, is_there, mount
from tests.support.raised import raised

pytestmark = pytest.mark.root


async def test_unpublish_of_another_volume_at_the_target_is_refused(bench: Bench) -> None:
    volume, other = await bench.create("one"), await bench.create("two")
    target = bench.target("pod-a")
    await bench.up(volume.volume_id, target)
    with pytest.raises(errors.Conflict, match=volume.volume_id):
        await bench.unpublish(other.volume_id, target)


async def test_unpublish_of_a_busy_volume_names_its_user(bench: Bench) -> None:
    volume_id, target = await bench.published()
    with (
        (Path(target) / "open").open("w"),
        pytest.raises(holders.DeviceInUse, match=str(os.getpid())),
    ):
        await bench.unpublish(volume_id, target)


async def test_publish_with_a_refused_mount_option_leaves_nothing(bench: Bench) -> None:
    volume_id, target = await bench.staged(), bench.target("pod-a")
    with pytest.raises(errors.InvalidRequest, match="bogus"):
        await bench.publish(volume_id, target, mount("ext4", "bogus"))
    assert not is_there(target)
    await bench.publish(volume_id, target)


async def test_stage_never_formats_a_device_that_a_process_writes(bench: Bench) -> None:
    volume = await bench.create()
    volume_id = volumes.VolumeId(volume.volume_id)
    attachment = bench.driver.stores.access.attach(volume_id)  # by a stage that was interrupted
    with (
        open(attachment.host_device.path, "r+b", buffering=0),
        raised("DeviceInUse", match=str(os.getpid())),
    ):
        await bench.stage(volume_id)
    assert bench.driver.stores.content_records.load(volume_id).state == "new"
    await bench.stage(volume_id)


@pytest.mark.parametrize("kind", ["mount", "block"])
async def test_host_publish_beside_a_lost_guest_is_refused(bench: Bench, kind: str) -> None:
    """Keepers and bridge died, and the entry is gone: the virtual machine still writes to the device."""
    capability = block() if kind == "block" else mount()
    volume_id, target = (await bench.create()).volume_id, bench.target("pod-a")
    await bench.stage(volume_id)
    await bench.publish(volume_id, target, deferred=True)
    await bench.unpublish(volume_id, target)
    if kind == "block":
        await bench.unstage(volume_id)
        await bench.stage(volume_id, capability)
    with (
        open(bench.host_device(volume_id).path, "r+b", buffering=0),
        pytest.raises(holders.DeviceInUse, match=rf"\[{os.getpid()}\] by fd"),
    ):
        await bench.publish(volume_id, target, capability)
    assert not is_there(target)
    await bench.publish(volume_id, target, capability)


async def test_host_publish_of_volume_without_guests_looks_at_no_process(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume_id = await bench.staged()

    def refuse() -> openers.Openers:
        raise AssertionError("the open files of all processes were looked at")

    monkeypatch.setattr(openers, "_openers", refuse)
    await bench.publish(volume_id, bench.target("pod-a"))


async def test_stage_never_formats_data_in_the_page_cache_alone(bench: Bench) -> None:
    volume = await bench.create()
    attachment = bench.driver.stores.access.attach(volumes.VolumeId(volume.volume_id))
    foreign = b"a foreign backup superblock"
    with open(attachment.host_device.path, "r+b", buffering=0) as device:
        os.pwrite(device.fileno(), foreign, 32 * MIB)
        with raised("ContentInDoubt"):
            await bench.stage(volume.volume_id)
        assert os.pread(device.fileno(), len(foreign), 32 * MIB) == foreign


async def test_first_stage_of_volume_without_data_reads_nothing_of_device(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("the device was probed")

    await bench.stage((await bench.create("before")).volume_id)  # mkfs is tried out at the first
    volume = await bench.create()
    with monkeypatch.context() as patched:
        for module, name in (
            (signatures, "probe"),
            (devices, "is_blank"),
        ):
            patched.setattr(module, name, refused)
        await bench.stage(volume.volume_id)
    await bench.publish(volume.volume_id, bench.target("pod-a"))


async def test_stage_of_a_formatted_volume_that_reads_blank_is_refused(bench: Bench) -> None:
    volume_id = await bench.staged()
    await bench.unstage(volume_id)
    image = bench.image(volume_id)
    os.truncate(image, 0)
    os.truncate(image, 64 * MIB)
    with raised("ContentInDoubt", errors.PeerUnavailable, match="ext4 was made"):
        await bench.stage(volume_id)  # a CO forgets nothing: the device is attached


async def test_stage_makes_no_filesystem_that_the_guests_cannot_mount(bench: Bench) -> None:
    wanted = mount("xfs")
    volume_id = (await bench.create("v", wanted, size=320 * MIB)).volume_id
    request = stage_request(volume_id, bench.staging(volume_id), encoded(wanted))
    old = Call("NodeStageVolume", (("crust-guest-kernel", "5.4.0"),))
    with raised("GuestKernelTooOld", match="5.4.0"):
        await bench.driver.node.NodeStageVolume(request, old)
    assert devices.is_blank(str(bench.image(volume_id)))
    await bench.stage(volume_id, wanted)
    await bench.driver.node.NodeStageVolume(request, old)  # it exists: nothing is made
    await bench.unstage(volume_id)
    await bench.driver.node.NodeStageVolume(request, old)
    await bench.unstage(volume_id)


async def test_stage_with_another_filesystem_is_refused(bench: Bench) -> None:
    volume_id = await bench.staged(size=320 * MIB)
    with raised("StagedDifferently"):
        await bench.stage(volume_id, mount("xfs"))
    await bench.unstage(volume_id)
    with raised("FormattedDifferently"):
        await bench.stage(volume_id, mount("xfs"))


async def test_publish_outside_the_roots_or_through_links_is_refused(bench: Bench) -> None:
    volume_id = await bench.staged()
    (bench.root / "elsewhere").mkdir()
    (bench.root / "pods" / "link").symlink_to(bench.root / "elsewhere")
    with pytest.raises(target_paths.SymlinkInPath):
        await bench.publish(volume_id, f"{bench.root}/pods/link/mount")
    with raised("PathOutsideRoots"):
        await bench.publish(volume_id, "/etc/crust-test-target")
    assert mountinfo.below(str(bench.root)) == ()
    with raised("StagingPathMissing"):
        await bench.stage(volume_id, path=f"{bench.root}/staging/absent")


async def test_stage_at_path_outside_the_roots_attaches_nothing(
    bench: Bench, tmp_path_factory: pytest.TempPathFactory
) -> None:
    volume_id = (await bench.create()).volume_id
    outside = tmp_path_factory.mktemp("outside")
    for path in (str(outside), "/etc", f"{bench.root}2/staging"):
        with raised("PathOutsideRoots"):
            await bench.stage(volume_id, path=path)
        await bench.unstage(volume_id, path=path)  # nothing is there, which is a success
    with raised("NotStaged"):
        await bench.publish(volume_id, bench.target("mount"))


async def test_unpublish_outside_the_roots_or_through_a_link_unmounts_nothing(
    bench: Bench, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (bench.root / "pods" / "link").symlink_to(outside)
    (outside / "mount").mkdir()
    mount_api.bind(str(bench.root / "staging"), str(outside / "mount"))
    try:
        with raised("PathOutsideRoots"):
            await bench.unpublish("some-unknown-volume", f"{outside}/mount")
        with pytest.raises(target_paths.SymlinkInPath):
            await bench.unpublish("some-unknown-volume", f"{bench.root}/pods/link/mount")
        assert mountinfo.at(f"{outside}/mount") is not None
    finally:
        mount_api.unmount(f"{outside}/mount")


async def test_raw_publish_on_an_empty_directory_removes_no_data(bench: Bench) -> None:
    """The refusal said that nothing was removed; the empty directory is, so that the retry passes."""
    volume = await bench.create(capability=block())
    target = bench.target("pod-a")
    await bench.stage(volume.volume_id, block())
    Path(target).mkdir()
    with pytest.raises(target_paths.TargetConflict, match="no data was removed"):
        await bench.publish(volume.volume_id, target, block())
    await bench.publish(volume.volume_id, target, block())


async def test_publish_on_target_with_files_or_foreign_mount_is_refused(bench: Bench) -> None:
    volume_id = await bench.staged()
    target = Path(bench.target("pod-a"))
    target.mkdir()
    (target / "precious").write_text("kept")
    with pytest.raises(target_paths.TargetConflict):
        await bench.publish(volume_id, str(target))
    assert (target / "precious").read_text() == "kept"
    (target / "precious").unlink()
    mount_api.mount_guard(str(target))
    with pytest.raises(node_publish.TargetOccupied, match="guard mount"):
        await bench.publish(volume_id, str(target))
    mount_api.unmount(str(target))


async def test_publish_on_another_volumes_target_is_refused(bench: Bench) -> None:
    first, second = await bench.create("one"), await bench.create("two")
    target = bench.target("pod-a")
    for volume in (first, second):
        await bench.stage(volume.volume_id)
    await bench.publish(first.volume_id, target)
    with pytest.raises(publish_rules.TargetPublishedDifferently, match=first.volume_id):
        await bench.publish(second.volume_id, target)
    mount_api.unmount(target)  # without the driver: its node state is stale, and the kernel decides
    await bench.publish(second.volume_id, target)


@pytest.mark.parametrize("forgotten", [False, True])
async def test_unstage_of_a_bound_raw_device_is_refused(bench: Bench, *, forgotten: bool) -> None:
    """Its number is given to the next volume, and an opener of the old node would read that volume's bytes."""
    volume = await bench.create(capability=block())
    target, kubelets = bench.target("pod-a"), bench.root / "kubelets"
    kubelets.touch()
    await bench.up(volume.volume_id, target, block())
    mount_api.bind(target, str(kubelets))
    if forgotten:
        for path in bench.root.glob("run/*/*/*"):
            path.unlink()
        bench.restart()
    await bench.unpublish(volume.volume_id, target)
    with pytest.raises(node_unpublish.StillPublished, match=str(kubelets)):
        await bench.unstage(volume.volume_id)
    mount_api.unmount(str(kubelets))


async def test_unpublish_leaves_a_mount_of_somebody_else(bench: Bench, tmp_path: Path) -> None:
    volume_id, target = await bench.staged(), bench.target("pod-a")
    Path(target).mkdir()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    mount_api.bind(str(foreign), target)
    with raised("ForeignMountAtTarget"):
        await bench.unpublish(volume_id, target)
    assert mountinfo.at(target) is not None
    mount_api.unmount(target)


async def test_failed_publish_leaves_mount_that_replaced_its_own(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped = mount(group=volumes.GroupChange(5000, volumes.GroupPolicy.ALWAYS))
    volume, target = await bench.create(), bench.target("pod-a")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    await bench.stage(volume.volume_id)

    def replaced(*_: object) -> Iterator[bool]:
        yield True
        mount_api.unmount(target)
        mount_api.bind(str(foreign), target)
        raise errors.RuntimeFailed("the first error")

    with monkeypatch.context() as patched:
        patched.setattr(fs_group, "steps", replaced)
        with pytest.raises(errors.RuntimeFailed, match="the first error"):
            await bench.publish(volume.volume_id, target, grouped)
    assert os.path.samefile(target, foreign)
    mount_api.unmount(target)


@pytest.mark.parametrize("known", ["new", "lost"])
async def test_publish_failed_after_mount_undoes_its_own_with_first_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    """With its node state lost, the mount at the target is one that a pod may be using."""
    grouped = mount(group=volumes.GroupChange(5000, volumes.GroupPolicy.ALWAYS))
    volume_id, target = await bench.staged(), bench.target("pod-a")
    if known == "lost":
        await bench.publish(volume_id, target, grouped)
        bench.driver.stores.node_state.forget_published(
            volumes.VolumeId(volume_id), volumes.TargetPath(target)
        )

    def fail(*_: object) -> Iterator[bool]:
        yield True
        raise errors.RuntimeFailed("the first error")

    def fail_too(*_: object) -> None:
        raise errors.RuntimeFailed("the second error")

    with monkeypatch.context() as patched:
        patched.setattr(fs_group, "steps", fail)
        for _ in range(2):
            with pytest.raises(errors.RuntimeFailed, match="the first error"):
                await bench.publish(volume_id, target, grouped)
            assert (mountinfo.at(target) is not None) == (known == "lost")
        patched.setattr(target_paths, "remove", fail_too)
        with pytest.raises(errors.RuntimeFailed, match="the first error"):
            await bench.publish(volume_id, target, grouped)
    await bench.publish(volume_id, target, grouped)
