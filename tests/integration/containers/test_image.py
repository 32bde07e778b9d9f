"""The image of `make image`: containers of it are a node, from create to delete."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import crust
from tests.integration.containers.conftest import Pods, kubelet_of
from tests.support.containers import CHECKOUT, Containerd

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]  # it installs a small Debian


@pytest.fixture(scope="module")
def image(containerd: Containerd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root file system of the image, as containerd mounts it."""
    output = tmp_path_factory.mktemp("image") / "crust-csi.tar"
    build = (sys.executable, str(CHECKOUT / "deploy/image/build.py"), f"--output={output}")
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    root = containerd.load_image(output, "crust-csi")
    output.unlink()
    return root


async def test_volume_lives_from_create_to_delete_in_containers_of_the_image(
    pods: Pods, image: Path
) -> None:
    pods.image = image
    await asyncio.to_thread(pods.start_all)
    target = pods.target("pod-1")
    async with kubelet_of(pods) as kubelet, pods.handler():
        volume_id = await kubelet.volume("v-1")
        await kubelet.publish(volume_id, target, defer=False)
        await kubelet.co.unpublish(volume_id, target)
        await kubelet.publish(volume_id, target, defer=True)
        assert pods.entry(target) is not None
        await kubelet.co.unpublish(volume_id, target)
        await kubelet.delete(volume_id)


def test_image_has_this_version_and_the_tools_of_every_filesystem(
    containerd: Containerd, image: Path
) -> None:
    shown = subprocess.run(
        ["chroot", image, "/opt/crust/bin/crust", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert crust.__version__ in shown.stdout
    tools = ("sbin/mkfs.ext4", "sbin/mkfs.xfs", "sbin/mkfs.btrfs", "usr/bin/bwrap", "usr/bin/tini")
    assert [each for each in tools if not (image / each).exists()] == []
    assert not list((image / "etc/apt").glob("sources.list*"))  # mirrors, perhaps with a login
