"""A kubelet's own actions around the calls: binds and loop devices, files, retries with fresh tokens."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from crust.core import volumes
from crust.host.block import devices
from crust.host.mounts import mount_api, mountinfo
from tests.support.drivers.block_driver import MIB, Bench, block, is_there

pytestmark = pytest.mark.root

TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"


@contextmanager
def held(path: str) -> Iterator[None]:
    """With the loop device by which a kubelet holds a raw volume's device."""
    argv = ["losetup", "--find", "--show", path]
    holder = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    try:
        yield
    finally:
        subprocess.run(["losetup", "--detach", holder], check=True)


async def test_kubelet_maps_and_unmaps_a_raw_volume(bench: Bench) -> None:
    volume_id = (await bench.create(capability=block())).volume_id
    kubelets = bench.root / "volumeDevices"
    (kubelets / "publish").mkdir(parents=True)
    (kubelets / "dev").mkdir()
    target, bound = f"{kubelets}/publish/pod-uid", kubelets / "dev" / "pod-uid"
    await bench.stage(volume_id, block())
    await bench.publish(volume_id, target, block())
    bound.touch()
    mount_api.bind(target, str(bound))

    with held(str(bound)):
        for path in (target, str(bound)):
            stats = await bench.stats(volume_id, path)
            assert stats.usage == (volumes.VolumeUsage(volumes.UsageUnit.BYTES, 64 * MIB, 0, 0),)
        await bench.grow(volume_id, 128 * MIB)
        assert devices.size_bytes(str(bound)) == 128 * MIB
        assert await bench.expand(volume_id, target, 128 * MIB) == 128 * MIB
        bench.restart()
        await bench.publish(volume_id, target, block())

    mount_api.unmount(str(bound))
    await bench.unpublish(volume_id, target)
    await bench.unstage(volume_id)
    assert not is_there(target)
    await bench.delete(volume_id)


async def test_publish_repeated_with_fresh_tokens_succeeds(bench: Bench) -> None:
    volume_id, target = await bench.staged(), bench.target("pod-a")
    await bench.publish(volume_id, target, context={TOKENS: "first", "crust.dev/defer": "never"})
    before = mountinfo.at(target)
    with (Path(target) / "open").open("w"):
        for token in ("second", "third"):
            bench.restart()
            context = {TOKENS: token, "crust.dev/defer": "never"}
            await bench.publish(volume_id, target, context=context)
    assert mountinfo.at(target) == before
    written = b"".join(path.read_bytes() for path in bench.root.glob("run/*/*/*.json"))
    assert b"first" not in written
    assert b"third" not in written


async def test_unpublish_leaves_only_the_kubelets_file_in_the_pod_directory(bench: Bench) -> None:
    """It is removed by rmdir alone; anything of ours would keep the pod there for good."""
    volume_id = (await bench.create()).volume_id
    target = Path(bench.target("pod-a"))
    (target.parent / "vol_data.json").write_text("{}")
    await bench.stage(volume_id)
    for deferred in (False, True):
        await bench.publish(volume_id, str(target), deferred=deferred)
        assert set(os.listdir(target.parent)) <= {"vol_data.json", "mount"}
        bench.restart()
        await bench.unpublish(volume_id, str(target))
        assert os.listdir(target.parent) == ["vol_data.json"]
    assert os.listdir(bench.staging(volume_id)) == []


async def test_unpublish_after_a_reboot_succeeds_without_node_state(bench: Bench) -> None:
    """After a reboot nothing is mounted or attached, and the kubelet takes down what its files say was up."""
    volume_id = (await bench.create()).volume_id
    target = Path(bench.target("pod-a"))
    target.mkdir()
    await bench.unpublish(volume_id, str(target))
    assert not target.exists()
    await bench.unstage(volume_id)
    await bench.unstage(volume_id, path=f"{bench.root}/staging/removed-meanwhile")
    await bench.delete(volume_id)
    await bench.unpublish(volume_id, str(target))
    await bench.unstage(volume_id)
