"""crust as the pod that the chart renders, run by containerd on a node without a kubelet.

The node's root is this machine's own file system, under an overlay, with a kubelet's root whose mounts are shared as
they are under systemd. Its processes and devices are this machine's.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import grpc

from crust.core.volumes import HandlerFeature
from crust.handoff.record import Record
from crust.host.block import loop
from crust.rpc import channel
from examples.cluster.ceph_cluster import POOL, CephCluster
from examples.drivers import minimal
from tests.support import chart, page_pods, trees
from tests.support.co import Co
from tests.support.containers import CHECKOUT, Container, Containerd
from tests.support.drivers import remnants
from tests.support.environments import do
from tests.support.faults.refusals import repeated, until_probe
from tests.support.forms.form import ANSWER_S, KUBELET, VENDORS_SOCKET, Form
from tests.support.page_pods import PagePod
from tests.support.rendered_pods import RenderedPod

_NODE_DIRECTORIES = (KUBELET, "/run/crust", "/var/lib/crust")
"""Where the pod has directories of the host that are the node's own, and not this machine's."""
_NOBODY = 65534
"""The user of the controllers."""
EXT4_INCOMPATIBLE, EXT4_RECOVER = 1024 + 0x60, 0x4
"""fs/ext4/ext4.h: `s_feature_incompat`, and the bit that says that the journal is to be replayed."""


@dataclass
class Pod(Form):
    """A node whose pod of the chart serves. Where process 1 has more rights than tests it cannot be looked at."""

    unseen = "" if os.access("/proc/1/root/", os.X_OK) else "/proc/1/root"

    directory: Path
    containerd: Containerd
    values: str
    image: Path | None = None
    """The root file system of the image; without one that of this checkout."""
    containers: dict[str, Container] = field(default_factory=dict, init=False)

    @property
    def processes(self) -> tuple[str, ...]:
        return ("crust-node",)

    def start(self, process: str) -> Container:
        """Start the container as a kubelet does."""
        return self.rendered(process).start(self.containerd, self.image)

    def rendered(self, process: str) -> RenderedPod:
        return RenderedPod(self.values, process, self.on_node, self.directory)

    @property
    def on_node(self) -> dict[str, Path]:
        """What the pod has of the node, and not of this machine."""
        return {path: self.at(path) for path in _NODE_DIRECTORIES}

    def at(self, path: str) -> Path:
        """A path of the node, seen from outside."""
        return self.root / path[1:]

    def kill(self, process: str) -> None:
        self.containers[process].kill()
        self.serve(process)

    def serve(self, process: str) -> None:
        """Start the container; it may not serve yet when this returns."""
        self.containers[process] = self.start(process)

    def reboot(self) -> None:
        for process in reversed(self.processes):
            self.containers[process].kill()
        kubelet = str(self.at(KUBELET))
        remnants.remove(kubelet, keep=kubelet)
        for device in _devices(self):
            loop.detach(device)
        for path in self.at("/run/crust").iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for process in self.processes:
            self.serve(process)

    @property
    def root(self) -> Path:
        return self.directory / "r"

    @property
    def python(self) -> str:
        return sys.executable

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        entering = self._entering(command)
        return subprocess.run(entering, capture_output=True, text=True, check=False)

    @contextmanager
    def running(self, *command: str) -> Iterator["subprocess.Popen[str]"]:
        process = subprocess.Popen(
            self._entering(command),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        with process:
            try:
                yield process
            finally:
                process.kill()

    def crust(self, *words: str) -> "subprocess.CompletedProcess[str]":
        container = self.containers[self.processes[-1]]
        return container.execute(sys.executable, "-m", "crust", *words)

    def _entering(self, command: tuple[str, ...]) -> list[str]:
        return ["chroot", str(self.root), *command]


@dataclass
class CephPods(Pod):
    """A node of the chart's driver for Ceph, and its controllers' pod. Their network is the node's."""

    driver = "rbd.csi.crust.dev"
    features = frozenset(HandlerFeature)
    ceph: CephCluster = field(kw_only=True)
    namespace: str = field(kw_only=True)

    def __post_init__(self) -> None:
        guest = f"guest-{self.namespace}"
        self.secrets = {"userID": guest, "userKey": self.ceph.node(guest, self.namespace)}

    @property
    def processes(self) -> tuple[str, ...]:
        return ("crust-rbd-controller", "crust-node")

    def rendered(self, process: str) -> RenderedPod:
        given = {name: self._given(name) for name in ("ceph", "csi", "run")}
        with socket.create_server(("", 0)) as free:  # two pods of one network
            values = f"{self.values}\nmetricsPort: {free.getsockname()[1]}\n"
        pod = super().rendered(process)
        return replace(pod, values=values, node={**pod.node, **given}, host_network=True)

    def _given(self, name: str) -> Path:
        """A volume that the controllers' pod has of its own; a container before them has copied the key."""
        path = self.directory / name
        path.mkdir(exist_ok=True)
        path.chmod(0o777)
        if name == "ceph":
            key = self.ceph.controller(f"controller-{self.namespace}", self.namespace)
            (path / "key").write_text(key, encoding="ascii")
            (path / "key").chmod(0o600)
            os.chown(path / "key", _NOBODY, _NOBODY)
        return path

    @asynccontextmanager
    async def called(self, driver: str = "") -> AsyncIterator[Co]:
        """The sidecars call the controller, once the manager of the cluster has told the capacity."""
        sidecars = channel.connect(f"{self.directory}/csi/crust/csi.sock")
        async with super().called(driver) as co, sidecars as connected:
            await until_probe(connected, grpc.StatusCode.OK, within_s=ANSWER_S)
            controller = Co(connected, ANSWER_S, waits=True)
            await repeated(controller.capacity, while_named="CephStatisticsMissing")
            co.controller, co.groups = controller.controller, controller.groups
            yield co

    def needs_recovery(self, record: Record) -> bool:
        """By the superblock in the first object of the image."""
        import rbd

        assert record.image is not None
        with (
            self.ceph.ioctx(POOL, self.namespace) as ioctx,
            rbd.Image(ioctx, record.image.image) as image,
        ):
            incompatible: bytes = image.read(EXT4_INCOMPATIBLE, 4)
        return bool(int.from_bytes(incompatible, "little") & EXT4_RECOVER)


def of_ceph(ceph: CephCluster, namespace: str) -> str:
    """The chart's values for a namespace of the cluster, without the Kubernetes API."""
    text = chart.choice("ceph").replace("fenceLostNodes: true", "fenceLostNodes: false")
    user = f"controller-{namespace}"
    given = {"monitors": f'"{ceph.monitors}"', "pool": POOL, "namespace": namespace, "user": user}
    for name, value in given.items():
        text, count = re.subn(rf"(?m)^    {name}: .*$", f"    {name}: {value}", text)
        assert count == 1, name
    return text


class WrappingPod(Pod):
    """A node whose pod of the chart serves the vendor's driver alone."""

    driver = minimal.NAME


class VendorsPods(WrappingPod):
    """docs/wrapping.md: the shim is a container of the vendor's pod, without privileges, and the proxy a pod."""

    @property
    def processes(self) -> tuple[str, ...]:
        return ("crust-shim", "crust-proxy")

    def start(self, process: str) -> Container:
        return self.rendered(process).start(self.containerd, self.image, name=process)

    def rendered(self, process: str) -> RenderedPod:
        manifest = page_pods.manifests()[self.processes.index(process)]
        names = {
            "csi.example.com-inner": Path(VENDORS_SOCKET).parent.name,
            "csi.example.com": self.driver,
        }
        for of_page, own in names.items():
            manifest = manifest.replace(of_page, own)
        return PagePod(manifest, process, self.on_node, self.directory)


AnyPod = TypeVar("AnyPod", bound=Pod)


@contextmanager
def serving(
    containerd: Containerd, values: str, kind: Callable[..., AnyPod], image: Path | None = None
) -> Iterator[AnyPod]:
    """A node with the pod of these values; afterwards nothing of it may be left."""
    form = kind(Path(tempfile.mkdtemp(prefix="crust-")), containerd, values, image)
    try:
        _make_root(form)
        with ExitStack() as beside:
            if form.driver == minimal.NAME:
                beside.enter_context(form.vendors_driver())
            for process in form.processes:
                form.serve(process)
            yield form
            for process in reversed(form.processes):
                form.containers[process].kill("TERM")
        assert _devices(form) == ()
    finally:
        containerd.remove_all()
        remnants.remove(form.directory)
        for device in _devices(form):
            loop.detach(device)
        trees.remove(form.directory)


def _make_root(form: Pod) -> None:
    for name in ("r", "t", "pool"):
        (form.directory / name).mkdir()
    do("mount", "-t", "tmpfs", "tmpfs", form.directory / "t")
    for name in ("u", "w"):
        (form.directory / "t" / name).mkdir()
    layers = f"lowerdir=/,upperdir={form.directory}/t/u,workdir={form.directory}/t/w"
    do("mount", "-t", "overlay", "-o", layers, "overlay", form.root)
    for path in _NODE_DIRECTORIES:
        shutil.rmtree(form.at(path), ignore_errors=True)
        form.at(path).mkdir(parents=True)
    for path in ("/proc", "/dev", "/sys", str(CHECKOUT)):
        form.at(path).mkdir(parents=True, exist_ok=True)
        do("mount", "--rbind", path, form.at(path))
    do("mount", "--bind", form.directory / "pool", form.at("/var/lib/crust"))
    do("mount", "-t", "tmpfs", "tmpfs", form.at(KUBELET))
    do("mount", "--make-shared", form.at(KUBELET))
    form.at(f"{KUBELET}/plugins_registry").mkdir()


def _devices(form: Pod) -> tuple[loop.LoopDevice, ...]:
    """The loop devices of the pool's images: the kernel knows their paths in a container that is gone."""
    images = {path.name for path in (form.directory / "pool").rglob("*.img")}
    return loop.list_named(images.__contains__)
