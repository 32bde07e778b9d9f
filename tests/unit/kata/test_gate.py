"""The gate's decisions, with Kata and the keepers as fakes that keep state: claims, and who needs an entry."""

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from crust.core import errors, volumes
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.host import answers
from crust.kata import gate, nri
from crust.kata.entry import KataEntries
from crust.kata.evidence import KataBuild, KataBuilds, Kind, Use
from crust.kata.grants import Grants, Revocation, Sandbox, User
from crust.kata.preflight import Configurations
from crust.kata.settings import KataRuntime
from crust.runtime_handler.blocking import resolve_source
from tests.support.raised import raised
from tests.support.records.records import HANDLER, a_record

POD = nri.Pod("sandbox-0001", "shop/web", HANDLER, 0)
FIT = "[hypervisor.clh]\ndisable_block_device_use = false\nblock_device_driver = 'virtio-blk'\n"


class Keepers(Grants):
    """The claims and the needed entries of sandboxes, in memory. `on_grant` runs in each grant."""

    def __init__(self, store: Store, directory: Path) -> None:
        super().__init__(store, directory / "keepers", KataEntries(str(directory / "entries")))
        self.claimed: dict[str, str] = {}
        """The sandbox that has the claim, by the digest of the volume's target."""
        self.users: set[tuple[str, str, User]] = set()
        """Sandbox, digest and container of each needed entry."""
        self.reported: list[str] = []
        self.on_grant: Callable[[Record], None] = lambda _: None
        self.undone = threading.Event()
        self.on_withdraw: Callable[[], None] = lambda: None

    def sandbox_ids(self) -> list[str]:
        return sorted({*self.claimed.values()})

    def grant(
        self,
        sandbox: Sandbox,
        mounts: Mapping[str, Record],
        user: User,
        features: Collection[volumes.HandlerFeature],
    ) -> Revocation:
        digests = {record.digest for record in mounts.values()}
        for record in mounts.values():
            self.on_grant(record)
            if self.claimed.get(record.digest, sandbox.id) != sandbox.id:
                raise errors.NotReady.named("HeldBySandbox", "the volume is held", why="by another")
        added = digests - self.claimed.keys()
        uses = {(sandbox.id, digest, user) for digest in digests}
        self.claimed.update(dict.fromkeys(added, sandbox.id))
        self.users |= uses

        def undo() -> None:
            self.users -= uses
            for digest in added:
                del self.claimed[digest]
            self.undone.set()

        return undo

    @contextmanager
    def adopted(self, sandbox: Sandbox, records: Mapping[str, Record]) -> Iterator[list[Any]]:
        if any(self.claimed.get(digest) != sandbox.id for digest in records):
            raise errors.NotReady.named("VolumeNotClaimed", "the volume is not claimed")
        yield [
            SimpleNamespace(report_mounted=partial(self.reported.append, digest))
            for digest in records
        ]

    def withdraw(self, sandbox_id: str, needless: Callable[[User], bool]) -> None:
        self.on_withdraw()
        self.users = {
            (id_, digest, user)
            for id_, digest, user in self.users
            if id_ != sandbox_id or not needless(user)
        }

    def needing(self, sandbox_id: str) -> set[tuple[str, User]]:
        return {(digest, user) for id_, digest, user in self.users if id_ == sandbox_id}


@dataclass(frozen=True)
class FakeRuntime(KataBuild):
    """Kata's Go runtime: its machine is this process, which has what `attached` says."""

    kind: ClassVar[Kind] = Kind.GO
    attached: set[tuple[str, str]] = field(default_factory=set)
    """The container's id and the destination of each mount with its device."""
    most_mounts: int = 1

    def vm_of(self, sandbox_id: str, engine_pid: int = 0) -> int:
        return os.getpid()

    def check_attachable(
        self, sandbox_id: str, pid: int, mounts: Sequence[tuple[Record, int]], until_s: float
    ) -> None:
        if any(others >= self.most_mounts for _, others in mounts):
            raise errors.NotReady.named("VolumeInUseInSandbox", "the sandbox has it", why="twice")

    def check_mounted(
        self, sandbox_id: str, pid: int, container_id: str, mounts: Mapping[str, Record]
    ) -> None:
        if not {(container_id, destination) for destination in mounts} <= self.attached:
            raise errors.NotReady.named("VolumeNotAttached", "the machine does not have it")

    async def stats(self, record: Record, use: Use) -> volumes.VolumeStats:
        raise NotImplementedError


@dataclass
class Node:
    """The gate and what it asks."""

    directory: Path
    store: Store
    keepers: Keepers
    kata: FakeRuntime
    problems: dict[str, errors.CrustError | None] = field(default_factory=dict)

    def gate(self, *handlers: str, default: str = "runc") -> gate.KataGate:
        """A gate that has just started, with these handlers in its settings."""
        configuration = self.directory / "configuration.toml"
        configuration.write_text(FIT)
        runtimes = [
            KataRuntime(name=name, configuration=str(configuration))
            for name in handlers or (HANDLER,)
        ]
        return gate.KataGate(
            self.keepers,
            KataBuilds([self.kata]),
            Configurations(runtimes),
            default,
            self.problems.__setitem__,
        )

    def publish(self, name: str) -> Record:
        """A volume that is deferred to our handler."""
        record = a_record(f"{self.directory}/{name}/mount")
        self.store.write(record)
        return record


@pytest.fixture
def node(tmp_path: Path) -> Node:
    store = Store(str(tmp_path / "volumes"))
    store.open()
    kata = FakeRuntime(str(tmp_path / "sbs"))
    (tmp_path / "sbs" / POD.id).mkdir(parents=True)
    return Node(tmp_path, store, Keepers(store, tmp_path), kata)


def container(
    *records: Record, id_: str = "container-0001", name: str = "app", **state: Any
) -> nri.Container:
    """A container that mounts the volumes at /data0, /data1, …"""
    mounts = (nri.Mount(record.target.text, f"/data{at}") for at, record in enumerate(records))
    return nri.Container(id_, POD.id, name, tuple(mounts), **state)


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


async def test_container_without_a_deferred_volume_is_not_looked_at(node: Node) -> None:
    app = nri.Container("container-0001", POD.id, "app", (nri.Mount("/etc/hosts", "/etc/hosts"),))
    other = nri.Pod(POD.id, POD.name, "runc", 0)
    await node.gate().create(other, app, soon())
    await node.gate().start(other, app, soon())
    assert not node.keepers.claimed


@pytest.mark.parametrize("handler", ["runc", "", "kata-qemu"])
async def test_pod_of_another_runtime_never_gets_the_guard(node: Node, handler: str) -> None:
    app = container(node.publish("a"))
    for call in (node.gate().create, node.gate().start):
        with raised("WrongRuntime"):
            await call(nri.Pod(POD.id, POD.name, handler, 0), app, soon())


async def test_pod_without_a_class_has_the_engines_default_handler(node: Node) -> None:
    app, pod = container(node.publish("a")), nri.Pod(POD.id, POD.name, "", 0)
    await node.gate(default=HANDLER).create(pod, app, soon())
    assert node.keepers.claimed


async def test_volume_of_a_handler_that_settings_do_not_name(node: Node) -> None:
    """Another runtime's volume is that runtime's; in a sandbox of Kata it would be a share."""
    app, bridge = container(node.publish("a")), node.gate("kata-other")
    with raised("RuntimeNotNamed"):
        await bridge.create(POD, app, soon())
    (Path(node.kata.root) / POD.id).rmdir()
    await bridge.create(POD, app, soon())
    assert not node.keepers.claimed


async def test_create_claims_all_volumes_or_none(node: Node) -> None:
    first, second = node.publish("a"), node.publish("b")
    node.keepers.claimed[second.digest] = "sandbox-0002"
    with raised("HeldBySandbox"):
        await node.gate().create(POD, container(first, second), soon())
    assert node.keepers.claimed == {second.digest: "sandbox-0002"}
    assert not node.keepers.users
    del node.keepers.claimed[second.digest]
    await node.gate().create(POD, container(first, second), soon())
    assert {*node.keepers.claimed} == {first.digest, second.digest}


async def test_volume_whose_device_hangs_is_refused_and_no_other(node: Node) -> None:
    """The engine has given up the first call, and makes it again; each has no thread but the first."""
    hanging, other = node.publish("a"), node.publish("b")
    hangs, go_on = threading.Event(), threading.Event()

    def hang(record: Record) -> None:
        if record.digest == hanging.digest:
            hangs.set()
            assert go_on.wait(60)

    node.keepers.on_grant, bridge = hang, node.gate()
    first = asyncio.ensure_future(bridge.create(POD, container(hanging), soon()))
    assert await asyncio.to_thread(hangs.wait, 60)
    for number in range(100):
        with raised("EngineTimeOver", match="an earlier call, of container app, has not returned"):
            await bridge.create(POD, container(hanging, id_=f"container-{number}"), soon())
    await bridge.create(POD, container(other, id_="container-0002", name="other"), soon())
    assert {*node.keepers.claimed} == {other.digest}
    go_on.set()
    await first
    assert {*node.keepers.claimed} == {hanging.digest, other.digest}


async def test_mount_source_that_hangs_keeps_no_other_container(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file server that does not answer, of a container that has no volume of ours."""
    record, go_on, looks = node.publish("a"), threading.Event(), list[str]()

    def resolve(root: str, source: str) -> object:
        if source == "/dead":
            looks.append(source)
            assert go_on.wait(60)
        return resolve_source(root, source)

    monkeypatch.setattr(gate, "resolve_source", resolve)
    bridge, dead = node.gate(), (nri.Mount("/dead", "/mnt"),)
    for number in range(100):
        with raised("SystemCallTimedOut", match="a mount source of container app"):
            await bridge.create(POD, nri.Container(f"c-{number}", POD.id, "app", dead), soon(0.01))
    await bridge.create(POD, container(record, name="other"), soon())
    go_on.set()
    assert looks == ["/dead"]


async def test_ends_of_containers_share_one_thread_of_a_keeper(node: Node) -> None:
    record, bridge = node.publish("a"), node.gate()
    await bridge.create(POD, container(record), soon())
    hangs, go_on, calls = threading.Event(), threading.Event(), list[int]()

    def hang() -> None:
        calls.append(1)
        hangs.set()
        assert go_on.wait(60)

    node.keepers.on_withdraw = hang
    first = asyncio.ensure_future(bridge.ended(container(record)))
    assert await asyncio.to_thread(hangs.wait, 60)
    others = [container(record, id_=f"container-{number}") for number in range(100)]
    ends = [asyncio.ensure_future(bridge.ended(other)) for other in others]
    await asyncio.sleep(0)  # each has begun
    go_on.set()
    await asyncio.gather(first, *ends)
    assert (len(calls), node.keepers.users) == (2, set())


async def test_one_volume_in_two_containers_is_counted_for_kata(node: Node) -> None:
    record = node.publish("a")
    bridge = node.gate()
    await bridge.create(POD, container(record), soon())
    with raised("VolumeInUseInSandbox"):
        await bridge.create(POD, container(record, id_="container-0002", name="other"), soon())
    with raised("VolumeInUseInSandbox"):
        await node.gate().create(POD, container(record, record), soon())


async def test_new_attempt_of_a_container_ends_the_earlier_one(node: Node) -> None:
    """containerd tells nobody that Kata failed to create a container."""
    record, bridge = node.publish("a"), node.gate()
    await bridge.create(POD, container(record), soon())
    await bridge.create(POD, container(record, id_="container-0002"), soon())
    assert node.keepers.needing(POD.id) == {(record.digest, "container-0002/app")}
    await bridge.ended(container(record))  # the end of the first one
    assert node.keepers.needing(POD.id) == {(record.digest, "container-0002/app")}
    await bridge.ended(container(record, id_="container-0002"))
    assert not node.keepers.needing(POD.id)


async def test_start_needs_the_claim_and_the_device_in_the_machine(node: Node) -> None:
    record, bridge = node.publish("a"), node.gate()
    app = container(record)
    node.kata.attached.add((app.id, "/data0"))
    with raised("VolumeNotClaimed"):
        await bridge.start(POD, app, soon())
    await bridge.create(POD, app, soon())
    node.kata.attached.clear()
    with raised("VolumeNotAttached"):
        await bridge.start(POD, app, soon())
    assert (node.keepers.reported, bool(node.keepers.users)) == ([], True)
    node.kata.attached.add((app.id, "/data0"))
    await bridge.start(POD, app, soon())
    assert (node.keepers.reported, node.keepers.users) == ([record.digest], set())
    assert bridge.uses.of(record.digest, POD.id).container_id == app.id


async def test_sandbox_of_the_other_runtime_of_kata_is_refused(node: Node) -> None:
    rust = type("Rust", (FakeRuntime,), {"kind": Kind.RUST})
    node.kata = rust(node.kata.root)
    with raised("OtherKataRuntime"):
        await node.gate().create(POD, container(node.publish("a")), soon())


async def test_synchronize_reports_what_runs_without_its_volume(node: Node) -> None:
    app = container(node.publish("a"), is_running=True)
    await node.gate().synchronize({POD.id: POD}, [app])
    problem = node.problems["container container-0001"]
    assert problem is not None
    assert problem.error_name == "RunsWithoutVolume"


@pytest.mark.parametrize("is_seen", [True, False])
async def test_container_that_has_ended_has_no_problem(node: Node, *, is_seen: bool) -> None:
    app, bridge = container(node.publish("a"), is_running=True), node.gate()
    await bridge.synchronize({POD.id: POD}, [app])
    await (bridge.ended(app) if is_seen else bridge.synchronize({}, []))
    assert node.problems == {"container container-0001": None}


async def test_synchronize_forgets_the_use_of_an_unlisted_container(node: Node) -> None:
    """Its end was missed, and the next container of its pod would be refused for ever."""
    record, bridge = node.publish("a"), node.gate()
    app, other = container(record), container(record, id_="container-0002", name="other")
    node.kata.attached.add((app.id, "/data0"))
    await bridge.create(POD, app, soon())
    await bridge.start(POD, app, soon())
    with raised("VolumeInUseInSandbox"):
        await bridge.create(POD, other, soon())
    running = container(record, is_running=True)
    await bridge.synchronize({POD.id: POD}, [running])
    assert bridge.uses.of(record.digest, POD.id).container_id == app.id
    await bridge.synchronize({POD.id: POD}, [container(record, is_stopped=True)])
    await bridge.create(POD, other, soon())


@pytest.mark.parametrize("is_kata", [True, False])
async def test_synchronize_ends_containers_of_other_runtimes_on_guards(
    node: Node, monkeypatch: pytest.MonkeyPatch, *, is_kata: bool
) -> None:
    """Of a container of Kata the engine names the virtual machine, which other containers are in."""
    ended: list[str] = []

    def end(of: nri.Container) -> bool:
        ended.append(of.id)
        return True

    monkeypatch.setattr(gate, "end_container", end)
    app = container(node.publish("a"), is_running=True, pid=4711)
    if not is_kata:
        (Path(node.kata.root) / POD.id).rmdir()
    await node.gate().synchronize({POD.id: nri.Pod(POD.id, POD.name, "runc", 0)}, [app])
    problem = node.problems.get("container container-0001")
    assert (ended, problem is None) == (([], False) if is_kata else ([app.id], True))


async def test_synchronize_withdraws_what_no_created_container_needs(node: Node) -> None:
    first, second = node.publish("a"), node.publish("b")
    before, bridge = node.gate(), node.gate()
    await before.create(POD, container(first), soon())
    await before.create(POD, container(second, id_="container-0002", name="other"), soon())
    listed = container(first, is_created=True)
    await bridge.synchronize({POD.id: POD}, [listed])
    assert node.keepers.users == {(POD.id, first.digest, "container-0001/app")}
    assert {*node.keepers.claimed} == {first.digest, second.digest}  # a claim ends with its machine


async def test_container_that_is_created_during_synchronize_keeps_its_entry(node: Node) -> None:
    record, bridge = node.publish("a"), node.gate()
    node.keepers.claimed[record.digest] = POD.id
    goes_on, listing = threading.Event(), threading.Event()
    listed = node.keepers.sandbox_ids

    def slow() -> list[str]:
        listing.set()
        assert goes_on.wait(60)
        return listed()

    node.keepers.sandbox_ids = slow  # type: ignore[method-assign]
    running = asyncio.ensure_future(bridge.synchronize({POD.id: POD}, []))
    assert await asyncio.to_thread(listing.wait, 60)
    await bridge.create(POD, container(record), soon())
    goes_on.set()
    await running
    assert node.keepers.needing(POD.id) == {(record.digest, "container-0001/app")}


async def test_container_whose_claim_is_not_seen_is_not_reported(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unseen(*_: object) -> Record:
        raise answers.NotSeen("cannot see whether a keeper serves")

    monkeypatch.setattr(node.keepers, "adopted", unseen)
    await node.gate().synchronize({POD.id: POD}, [container(node.publish("a"), is_running=True)])
    problem = node.problems["container container-0001"]
    assert isinstance(problem, answers.NotSeen)


async def test_timeout_of_the_kernel_is_not_the_engines(node: Node) -> None:
    def fail(_: Record) -> None:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    node.keepers.on_grant = fail
    with pytest.raises(TimeoutError, match="timed out"):
        await node.gate().create(POD, container(node.publish("a")), soon())
