"""The image of `make image`: containers of it are a node, from create to delete, and the pods of the chart.

But for the test with a cluster of Ceph, the network of the containers leads nowhere: what needs a cluster starts,
says what it misses, and is alive meanwhile.
"""

import asyncio
import base64
import importlib.metadata
import json
import os
import re
import stat
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.blockdriver.engines.files import pool
from crust.host.mounts import mount_api, mountinfo
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from examples.cluster.ceph_cluster import CephCluster
from tests.integration.containers.conftest import ANSWER_S, CAPABILITY, Pods
from tests.support import chart, environments
from tests.support.co import Co, stage_request
from tests.support.containers import (
    CHECKOUT,
    HOST_TO_CONTAINER,
    Container,
    Containerd,
)
from tests.support.faults.refusals import refused
from tests.support.forms import node_list, of_guests, pod
from tests.support.forms.form import staged
from tests.support.forms.pod import CephPods, Pod
from tests.support.pages.page_blocks import blocks
from tests.support.rendered_pods import RenderedPod

# The first test waits for the build, which installs a small Debian: five minutes beside other work.
pytestmark = [pytest.mark.root, pytest.mark.timeout(3600)]

CEPH = chart.choice("ceph").replace("fenceLostNodes: true", "fenceLostNodes: false")
"""Without the Kubernetes API, which is not there."""
NOBODY = 65534
KEY = base64.b64encode(bytes([1, 0, *[0] * 8, 16, 0, *range(16)])).decode()
"""A key in Ceph's form."""
VOLUME = f"{'0' * 16}-{'0' * 40}"


@dataclass(frozen=True, slots=True)
class Built:
    """What `make image` writes."""

    tar: Path
    labels: dict[str, str]
    bill: dict[str, Any]


def labels(tar: Path) -> dict[str, str]:
    """Those of the image in an OCI archive."""
    with tarfile.open(tar) as archive:

        def read(name: str) -> Any:
            member = archive.extractfile(name)
            assert member is not None
            return json.load(member)

        def blob(descriptor: Any) -> Any:
            return read(f"blobs/{descriptor['digest'].replace(':', '/')}")

        (manifest,) = read("index.json")["manifests"]
        found: dict[str, str] = blob(blob(manifest)["config"])["config"]["Labels"]
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    output = tmp_path_factory.mktemp("image") / "crust-csi.tar"
    build = (sys.executable, str(CHECKOUT / "deploy/image/build.py"), f"--output={output}")
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    bill = json.loads(output.with_suffix(".cdx.json").read_text(encoding="utf-8"))
    return Built(output, labels(output), bill)


@pytest.fixture(scope="module")
def image(containerd: Containerd, built: Built) -> Path:
    """The root file system of the image, as containerd mounts it."""
    imported = page_line("images import ")
    root = containerd.load_image(built.tar, imported[imported.index("--base-name") + 1])
    # what a kubelet looks for when a pod says crust-csi:<version>
    (name,) = containerd.ctr("images", "list", "--quiet").split()
    assert name == f"docker.io/library/crust-csi:{environments.version().replace('+', '-')}"
    built.tar.unlink()
    return root


async def test_volume_lives_in_containers_of_the_image(pods: Pods, image: Path) -> None:
    pods.image = image
    await pods.start()
    target = pods.places.target("pod-1")
    async with pods.handler():
        volume_id = await pods.volume()
        await pods.publish(volume_id, target, defer=False)
        mounted = mountinfo.at(target)
        assert mounted is not None, "on the host"
        assert mounted.fs_type == "ext4"
        await pods.unpublish(volume_id, target)
        await pods.publish(volume_id, target)
        assert pods.entry(target) is not None


@pytest.mark.vm
async def test_pod_of_the_image_publishes_to_a_guest(containerd: Containerd, image: Path) -> None:
    with pod.serving(containerd, chart.choice("local"), Pod, image) as node:
        await node_list.deferred_publish_and_unpublish(node)
        await of_guests.guests(node)


def page_line(begins: str) -> list[str]:
    """The words of a line with containerd's client that an operator runs on a node of pods."""
    client = "ctr --namespace k8s.io "
    lines = "\n".join(blocks("operations.md")).splitlines()
    (line,) = (line for line in lines if line.startswith(client + begins))
    return line.removeprefix(client).split()


def asked(node: Pod) -> "subprocess.CompletedProcess[str]":
    """The page's question to the image, whether it reads what the node has."""
    tag = environments.version().replace("+", "-")
    words = [word.replace("<version>", tag) for word in page_line("run ")]
    words = [re.sub("src=([^,]+)", lambda at: f"src={node.at(at[1])}", word) for word in words]
    containerd = node.containerd
    client = ("ctr", f"--address={containerd.base}/c.sock", f"--namespace={containerd.namespace}")
    return subprocess.run((*client, *words), capture_output=True, text=True, check=False)


async def test_image_names_what_it_does_not_read_before_a_rollout(
    containerd: Containerd, image: Path
) -> None:
    """It is the way back to an image, after a later one has raised the pool's schema under a volume in use."""
    with pod.serving(containerd, chart.choice("local"), Pod, image) as node:
        identity = node.at("/var/lib/crust/block/pool.json")
        async with staged(node) as volume:
            await volume.publish()
            with node.sandbox():
                done = await asyncio.to_thread(asked, node)
                assert done.returncode == 0, done
                written = identity.read_text()
                own, raised = (f'"schema":{number}' for number in (pool.SCHEMA, pool.SCHEMA + 1))
                identity.write_text(written.replace(own, raised))
                done = await asyncio.to_thread(asked, node)
                assert done.returncode == 1, done
                assert f"schema {pool.SCHEMA + 1}," in done.stderr, done
                # who does not ask: the pod is not ready, and what is in use stays
                await restarted(node)
                unread = volume.co.create("other")
                await refused(unread, grpc.StatusCode.UNAVAILABLE, "UnknownPoolLayout")
                status, text = await asyncio.to_thread(
                    node.containers["crust-node"].answer, "/readyz"
                )
                assert status == 503
                assert "UnknownPoolLayout" in text
                assert node.is_mounted()
                identity.write_text(written)
                await restarted(node)
                unpublish = volume.unpublish()
                await refused(unpublish, grpc.StatusCode.FAILED_PRECONDITION, "HeldBySandbox")
            await volume.unpublish()


async def restarted(node: Pod) -> None:
    await asyncio.to_thread(node.kill, "crust-node")
    await asyncio.to_thread(node.containers["crust-node"].wait_for, "proxy serves")


@pytest.mark.vm
async def test_pods_for_ceph_publish_an_image_to_a_guest(
    containerd: Containerd, image: Path, ceph: CephCluster
) -> None:
    """As the controllers' user, which may not read a directory of root's."""
    namespace = ceph.make_namespace()
    pods = partial(CephPods, ceph=ceph, namespace=namespace)
    with pod.serving(containerd, pod.of_ceph(ceph, namespace), pods, image) as node:
        await of_guests.guests(node)
        await of_guests.snapshot_and_clone(node)


def test_image_has_this_version_and_all_tools(containerd: Containerd, image: Path) -> None:
    shown = subprocess.run(
        ["chroot", image, "/opt/crust/bin/crust", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert environments.version() in shown.stdout
    tools = ("sbin/mkfs.ext4", "sbin/mkfs.xfs", "sbin/mkfs.btrfs", "usr/bin/bwrap", "usr/bin/tini")
    assert [tool for tool in tools if not (image / tool).exists()] == []
    assert not (image / "etc/apt").exists()  # mirrors, perhaps with a login


ABSENT = re.compile(
    r"/(s?bin/(apt|apt-get|dpkg|perl[0-9.]*|pip[0-9.]*|su|mount|passwd|login|nsenter)"
    r"|(pip|setuptools)(-[^/]+)?(\.dist-info|\.whl)?)$"
)
"""What a container of crust never runs: tools of packages, and programs that enter namespaces or change the user."""


def test_image_has_no_program_that_only_an_intruder_needs(image: Path) -> None:
    found = []
    for directory, directories, files in os.walk(image):
        for path in (f"{directory}/{name}" for name in (*directories, *files)):
            status = os.lstat(path)
            is_privileged = status.st_mode & (stat.S_ISUID | stat.S_ISGID) or (
                stat.S_ISREG(status.st_mode) and "security.capability" in os.listxattr(path)
            )
            if is_privileged or ABSENT.search(path):
                found.append(path)
    assert found == []


def debian_packages(image: Path, field: str) -> dict[str, str]:
    """A field of each package that the image's list has, by its name."""
    listed = subprocess.run(
        ["dpkg-query", f"--root={image}", "--show", f"--showformat=${{Package}} ${{{field}}}\n"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(line.split() for line in listed.stdout.splitlines())


def test_labels_of_image_are_those_of_its_commit(built: Built) -> None:
    seconds, commit = (
        environments.do("git", "-C", CHECKOUT, "log", "-1", f"--format=%{field}").strip()
        for field in ("ct", "H")
    )
    assert built.labels == {
        f"org.opencontainers.image.{name}": value
        for name, value in {
            "title": "crust-csi",
            "version": environments.version(),
            "revision": commit,
            "licenses": "Apache-2.0",
            "base.name": "debian:bookworm",
            "created": datetime.fromtimestamp(int(seconds), UTC).isoformat(),
        }.items()
    }


def test_bill_of_image_has_all_that_is_in_it(image: Path, built: Built) -> None:
    named: dict[str, dict[str, str]] = {"deb": {}, "pypi": {}}
    for component in built.bill["components"]:
        kind = component["purl"].removeprefix("pkg:").partition("/")[0]
        named[kind][component["name"]] = component["version"]
    assert named["deb"] == debian_packages(image, "Version")
    site = str(next(image.glob("opt/crust/lib/python3*/site-packages")))
    installed = {
        re.sub(r"[-_.]+", "-", each.name).lower(): each.version
        for each in importlib.metadata.distributions(path=[site])
    }
    own = built.bill["metadata"]["component"]
    assert named["pypi"] | {own["name"]: own["version"]} == installed


def test_image_keeps_the_licence_of_each_package(image: Path) -> None:
    documents = image / "usr/share/doc"
    left = {
        name
        for name in debian_packages(image, "Version")
        if not (documents / name / "copyright").is_file()
    }
    assert left == set()
    assert list(image.glob("opt/crust/lib/python3*/site-packages/crust_csi-*/licenses/LICENSE"))


def test_image_names_its_packages_and_no_removed_one(image: Path) -> None:
    """A scanner for known faults reads this list."""
    packages = debian_packages(image, "db:Status-Status")
    assert {"e2fsprogs", "python3.11", "libssl3"} <= set(packages)
    assert set(packages.values()) == {"installed"}
    assert not {"apt", "dpkg", "perl-base", "python3-pip-whl"} & set(packages)


def given(pods: Pods, directory: str, files: dict[str, str]) -> Path:
    """A directory of the controller's user, as a pod gets one from a Secret or as an emptyDir."""
    path = pods.root / directory
    path.mkdir(mode=0o700)
    for name, text in files.items():
        (path / name).write_text(text)
        (path / name).chmod(0o600)
        os.chown(path / name, NOBODY, NOBODY)
    os.chown(path, NOBODY, NOBODY)
    return path


def controller(pods: Pods, image: Path) -> Container:
    """The container of the Deployment: its user, and no capability."""
    volumes = {"ceph": {"key": KEY}, "csi": {}, "run": {}}
    given_volumes = {name: given(pods, f"volume-{name}", files) for name, files in volumes.items()}
    pod = RenderedPod(CEPH, "crust-rbd-controller", given_volumes, pods.root)
    return pod.start(pods.containerd, image)


async def test_controller_without_monitors_says_so(pods: Pods, image: Path) -> None:
    started = await asyncio.to_thread(controller, pods, image)
    await asyncio.to_thread(started.wait_for, "driver serves")
    async with channel.connect(f"{pods.root}/volume-csi/crust/csi.sock") as connected:
        await refused(
            Co(connected, ANSWER_S).create("v-1", CAPABILITY),
            grpc.StatusCode.UNAVAILABLE,
            "no monitor of [v2:192.0.2.1:3300,v1:192.0.2.1:6789] answered",
        )
    assert await asyncio.to_thread(started.answer, "/healthz") == (200, "ok\n\n")
    status, text = await asyncio.to_thread(started.answer, "/readyz")
    assert status == 503
    assert "PoolNotOpened" in text


async def test_node_of_ceph_volumes_uses_the_key_of_each_call(
    pods: Pods, image: Path, kubelet: Path
) -> None:
    started = await asyncio.to_thread(pods.rendered(CEPH).start, pods.containerd, image)
    await asyncio.to_thread(started.wait_for, "proxy serves")
    assert (await asyncio.to_thread(started.answer, "/readyz"))[0] == 200
    stage = stage_request(VOLUME, "/var/lib/kubelet/staging", CAPABILITY)
    async with channel.connect(f"{kubelet}/plugins/rbd.csi.crust.dev/csi.sock") as connected:
        stub = csi_pb2_grpc.NodeStub(connected)
        call = stub.NodeStageVolume(stage, timeout=ANSWER_S)
        await refused(call, grpc.StatusCode.FAILED_PRECONDITION, "CephKeyMissing")
        stage.secrets.update({"userID": "crust-node", "userKey": KEY})
        call = stub.NodeStageVolume(stage, timeout=ANSWER_S)
        words = "no monitor of [v2:192.0.2.1:3300,v1:192.0.2.1:6789] answered"
        await refused(call, grpc.StatusCode.UNAVAILABLE, words)
    assert KEY not in started.text()


async def test_one_pod_serves_local_and_ceph_volumes(
    pods: Pods, image: Path, kubelet: Path
) -> None:
    values = CEPH.replace("local: {enabled: false}\n", "")
    started = await asyncio.to_thread(pods.rendered(values).start, pods.containerd, image)
    await asyncio.to_thread(started.wait_for, "proxy serves")
    assert (pods.root / "pool/block/pool.json").exists(), started.text()
    assert (await asyncio.to_thread(started.answer, "/readyz"))[0] == 200
    for name in ("block.csi.crust.dev", "rbd.csi.crust.dev"):
        async with channel.connect(f"{kubelet}/plugins/{name}/csi.sock") as connected:
            identity = csi_pb2_grpc.IdentityStub(connected)
            info = await identity.GetPluginInfo(csi_pb2.GetPluginInfoRequest(), timeout=ANSWER_S)
            assert info.name == name
            assert info.manifest["crust.dev/attaches"] == "false"
        assert (kubelet / f"plugins_registry/{name}-reg.sock").is_socket()
    await asyncio.to_thread(started.kill, "TERM")


async def test_volume_is_deferred_guarded_on_the_host_and_deleted(pods: Pods) -> None:
    await pods.start()
    async with pods.handler():
        volume_id, target = await pods.published_volume()
        guard = mountinfo.at(target)
        assert guard is not None
        assert mount_api.is_guard(guard)
        assert pods.record(target).key.volume_id == volume_id
        with pods.sandbox(target):
            assert (await pods.co.stats(volume_id, target)).usage
            unpublish = pods.unpublish(volume_id, target)
            await refused(unpublish, grpc.StatusCode.FAILED_PRECONDITION, "box-1")


async def test_killed_proxy_finds_deferred_volumes_and_their_claims(pods: Pods) -> None:
    await pods.start()
    async with pods.handler():
        volume_id, target = await pods.published_volume()
        with pods.sandbox(target):
            await pods.stop("proxy")
            guard = mountinfo.at(target)  # it was made in a namespace that is gone
            assert guard is not None
            assert mount_api.is_guard(guard)
            await pods.start("proxy")
            assert (await pods.co.stats(volume_id, target)).usage
            unpublish = pods.unpublish(volume_id, target)
            await refused(unpublish, grpc.StatusCode.FAILED_PRECONDITION, "box-1")


async def test_second_proxy_is_refused_whatever_its_run_directory(pods: Pods) -> None:
    """Each proxy has the lock of its own run directory: the kubelet's socket is what they share."""
    await pods.start()
    same = await asyncio.to_thread(pods.start_pod, "proxy", name="same")
    await asyncio.to_thread(same.wait_for, "waits for another process to end")
    assert "LockHeld" in same.text()
    flags = (f"--run-dir={pods.run}/other", f"--volumes-root={pods.run}/other/volumes")
    other = await asyncio.to_thread(pods.start_pod, "proxy", *flags, name="other")
    await asyncio.to_thread(other.wait_for, "already listens on it")
    await asyncio.to_thread(other.wait_ended)
    await pods.volume("still-served")
    await asyncio.to_thread(pods.value("proxy").kill, "TERM")
    await asyncio.to_thread(same.wait_for, "proxy serves")
    await pods.volume("served-by-the-successor")


@pytest.mark.parametrize("program", ["proxy", "driver"])
@pytest.mark.parametrize("propagation", [HOST_TO_CONTAINER, "rprivate"])
async def test_start_is_refused_where_mounts_would_not_reach_the_host(
    pods: Pods, program: str, propagation: str
) -> None:
    started = await asyncio.to_thread(pods.start_pod, program, kubelet=propagation)
    await asyncio.to_thread(started.wait_for, "mountPropagation Bidirectional")
    await asyncio.to_thread(started.wait_ended)
    assert "MountsNotPropagated" in started.text()


async def test_registration_socket_names_the_hosts_path(pods: Pods) -> None:
    registry = pods.kubelet / "plugins_registry"
    registry.mkdir()
    started = await asyncio.to_thread(pods.start_pod, "proxy", f"--plugins-registry={registry}")
    await asyncio.to_thread(started.wait_for, "proxy serves")
    async with channel.connect(f"{registry}/block.csi.crust.dev-reg.sock") as connected:
        get_info: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connected.unary_unary(
            "/pluginregistration.Registration/GetInfo"
        )
        assert pods.places.csi.encode() in await get_info(b"", timeout=ANSWER_S)
