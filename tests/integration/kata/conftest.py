"""A node with a published volume, a sandbox without Kata, and the bridge between them."""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from crust.core import errors, volumes
from crust.handoff import claims
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.host.block import devices
from crust.host.mounts import mount_api
from crust.kata import entry, gate, grants, nri
from crust.kata.evidence import KataBuilds
from crust.kata.go_runtime import GoRuntime
from crust.kata.preflight import Configurations
from crust.kata.rust_runtime import RustRuntime
from crust.kata.settings import KataRuntime
from crust.runtime_handler.blocking import keepers
from tests.integration.conftest import MakeDevice as MakeDevice
from tests.support import processes, trees
from tests.support.kata import sandbox
from tests.support.records.records import HANDLER, MOUNT, a_record

ONE, TWO = (f"sandbox-{os.getpid()}-{number}" for number in (1, 2))
"""Shims are found by them, also those of the tests in another worker."""
FIT = "[hypervisor.clh]\ndisable_block_device_use = false\nblock_device_driver = 'virtio-blk'\n"


@dataclass
class KataNode:
    """What `crust kata` works on, below one short directory."""

    directory: Path
    store: Store
    entries: entry.KataEntries
    configuration: Path
    shim: Path | None = None
    problems: dict[str, errors.CrustError | None] = field(default_factory=dict)

    @property
    def sandboxes(self) -> Path:
        """Kata's state, /run/vc/sbs on a node."""
        return self.directory / "sbs"

    @property
    def kubelet(self) -> Path:
        """The kubelet's root."""
        return self.directory / "kubelet"

    def target(self, name: str) -> volumes.TargetPath:
        """A target's path."""
        return volumes.TargetPath.parse(f"{self.kubelet}/{name}/mount")

    def publish(self, name: str, device: str, **mount: object) -> Record:
        """Guard and entry, as the proxy leaves them, and the placeholder."""
        target = self.target(name)
        os.makedirs(target.text)
        mount_api.mount_guard(target.text)
        made = a_record(target, readonly=bool(mount.get("readonly")))
        source = volumes.BlockSource(device, devices.identify(device))
        fields = {"source": source, "group": None, **mount}
        record = made.replaced(replace(MOUNT, **fields))  # type: ignore[arg-type]
        self.store.write(record)
        self.entries.place(entry.name_of(target.text), record)
        return record

    def bridge(self, handler: str = HANDLER) -> gate.KataGate:
        """A bridge that has just started; the claims are the keepers'."""
        kata = KataRuntime(
            name=handler, configuration=str(self.configuration), shim=str(self.shim or "")
        )
        configurations = Configurations([kata])
        return gate.KataGate(
            self.grants(), self.builds(), configurations, "runc", self.problems.__setitem__
        )

    def builds(self) -> KataBuilds:
        """The builds of Kata on this node."""
        rust = RustRuntime(str(self.directory / "rs"), str(self.directory / "shares"))
        return KataBuilds([GoRuntime(str(self.sandboxes)), rust])

    def grants(self) -> grants.Grants:
        """The claims of this node."""
        return grants.Grants(self.store, self.directory / "keepers", self.entries)

    def kind(self, record: Record) -> entry.Kind:
        """What Kata finds at the record's target."""
        return self.entries.kind(entry.name_of(record.target.text), record)

    def claim(self, record: Record) -> claims.Claim | None:
        """The record's claim."""
        return claims.read(self.store.layout.entry(record.target))


@contextmanager
def made_node() -> Iterator[KataNode]:
    """An empty node; its keepers have ended with their sandboxes before it goes."""
    directory = Path(tempfile.mkdtemp(prefix="crust-"))
    store = Store(f"{directory}/volumes")
    store.open()
    for name in ("sbs", "keepers", "kubelet"):
        (directory / name).mkdir()
    configuration = directory / "configuration.toml"
    configuration.write_text(FIT)
    entries = entry.KataEntries(f"{directory}/direct-volumes")
    entries.open()
    try:
        yield KataNode(directory, store, entries, configuration)
    finally:
        for target in (directory / "kubelet").glob("*/mount"):
            mount_api.unmount(str(target))
        trees.remove(directory)


@pytest.fixture
def node() -> Iterator[KataNode]:
    """An empty node."""
    with made_node() as made:
        yield made


@pytest.fixture
def one(node: KataNode) -> Iterator[sandbox.StandInSandbox]:
    """The first sandbox; after it, its keeper has ended too."""
    with running(node, ONE) as made:
        yield made


@pytest.fixture
def two(node: KataNode) -> Iterator[sandbox.StandInSandbox]:
    """The second sandbox."""
    with running(node, TWO) as made:
        yield made


@contextmanager
def running(node: KataNode, id_: str) -> Iterator[sandbox.StandInSandbox]:
    """A sandbox; after it, its keeper has ended too."""
    with sandbox.running(node.sandboxes, id_) as made:
        try:
            yield made
        finally:
            end(node, made)


@contextmanager
def running_rust(
    node: KataNode, id_: str, hypervisor: str = "clh"
) -> Iterator[sandbox.StandInRustSandbox]:
    """The same of runtime-rs."""
    directory = node.directory
    with sandbox.running_rust(directory / "rs", directory / "shares", id_, hypervisor) as made:
        try:
            yield made
        finally:
            end(node, made)


def keeper_pids(node: KataNode, sandbox_id: str) -> tuple[int, ...]:
    """Keeper and standby of a sandbox; none if it has none."""
    try:
        with keepers.connect(node.grants().socket(sandbox_id)) as line:
            return line.pids
    except keepers.KeeperGone:
        return ()


def end(node: KataNode, of: sandbox.StandInSandbox) -> None:
    """Kill the machine, and wait until its keeper has ended."""
    with processes.ending(*keeper_pids(node, of.id)):
        of.kill()


def pod(id_: str = ONE, *, handler: str = HANDLER, pid: int = 0) -> nri.Pod:
    """A pod as the plugin has it."""
    return nri.Pod(id_, "shop/web", handler, pid)


def container(
    *sources: str, id_: str = "container-0001", pod_id: str = ONE, name: str = "app", **state: bool
) -> nri.Container:
    """A container that mounts the sources at /data0, /data1, …"""
    mounts = (nri.Mount(source, f"/data{at}") for at, source in enumerate(sources))
    return nri.Container(id_, pod_id, name, tuple(mounts), **state)


def soon(seconds: float = 60.0) -> float:
    """A deadline that no test meets, unless it wants to."""
    return time.monotonic() + seconds


def lives(process: "subprocess.Popen[str]") -> bool:
    """Whether it has not ended."""
    return process.poll() is None
