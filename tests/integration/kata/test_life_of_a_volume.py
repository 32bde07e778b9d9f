"""The life of a volume with the bridge: each line of docs/kata.md's table, on real devices, guards and keepers."""

import asyncio
import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crust.core import errors, volumes
from crust.handoff import claims
from crust.handoff.claims import State
from crust.handoff.record import Record
from crust.host.block import devices, holders, loop, openers
from crust.host.mounts import mount_api, mountinfo
from crust.host.process import open_files
from crust.kata import entry, grants, nri
from crust.kata.entry import Kind, Placeholders
from crust.kata.go_runtime import GoRuntime
from crust.kata.grants import Sandbox
from crust.kata.keeper_watch import KeeperWatch
from crust.kata.preflight import FEATURES
from crust.runtime_handler.blocking import keepers, process_of
from tests.integration.kata.conftest import (
    ONE,
    TWO,
    KataNode,
    container,
    end,
    keeper_pids,
    lives,
    pod,
    soon,
)
from tests.support import processes
from tests.support.kata.sandbox import StandInSandbox
from tests.support.measures.looks import counted
from tests.support.raised import raised
from tests.support.records.records import HANDLER
from tests.support.runtimes.keeper_processes import kill_all_keepers

pytestmark = pytest.mark.root

MakeDevice = Callable[[str], loop.LoopDevice]


def _is_held(device: str) -> bool:
    try:
        os.close(devices.open_exclusive(device))
    except holders.DeviceInUse:
        return True
    return False


async def test_entry_names_device_until_start_and_claim_lives_with_machine(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    record = node.publish("a", device("a").path)
    bridge, app = node.bridge(), container(node.target("a").text)
    assert node.kind(record) is Kind.PLACEHOLDER
    await bridge.create(pod(pid=one.pid), app, soon())
    await bridge.create(pod(pid=one.pid), app, soon())  # the validation
    assert node.kind(record) is Kind.REAL
    assert _is_held(record.device)
    one.create_container(app.id, record.device, "/data0")
    await bridge.start(pod(pid=one.pid), app, soon())
    assert node.kind(record) is Kind.PLACEHOLDER
    claim = node.claim(record)
    assert claim is not None
    assert (claim.live, claim.sandbox_id, claim.state) == (True, ONE, State.MOUNTED)
    one.detach(record.device)  # the container has ended; the claim survives the gap
    assert _is_held(record.device)
    end(node, one)
    assert not _is_held(record.device)


def _of_two(record: Record) -> nri.Container:
    return container(record.target.text, pod_id=TWO, id_="container-0002")


@pytest.mark.parametrize("who", ["the machine", "both processes of the keeper"])
async def test_the_real_entry_does_not_outlive_the_machine(
    node: KataNode, device: MakeDevice, one: StandInSandbox, who: str
) -> None:
    record = node.publish("a", device("a").path)
    await node.bridge().create(pod(), container(record.target.text), soon())
    assert node.kind(record) is Kind.REAL
    if who == "the machine":
        end(node, one)
    else:
        kill_all_keepers(node.grants().socket(ONE))
        assert node.kind(record) is Kind.REAL
        node.grants().hide_unclaimed()
    assert node.kind(record) is Kind.PLACEHOLDER


async def test_the_next_container_of_the_sandbox_gets_the_entry_again(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    record = node.publish("a", device("a").path)
    bridge = node.bridge()
    for name in ("container-init", "container-app", "container-app-again"):
        current = container(record.target.text, id_=name)
        await bridge.create(pod(), current, soon())
        assert node.kind(record) is Kind.REAL
        one.create_container(current.id, record.device, "/data0")
        await bridge.start(pod(), current, soon())
        assert node.kind(record) is Kind.PLACEHOLDER
        one.detach(record.device)
        await bridge.ended(current)


async def test_entry_stays_real_until_last_created_container_has_started(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    record = node.publish("a", device("a").path)
    bridge = node.bridge()
    first, second = (container(record.target.text, id_=f"container-{n}", name=n) for n in "12")
    await bridge.create(pod(), first, soon())
    await bridge.create(pod(), second, soon())
    one.create_container(first.id, record.device, "/data0")
    await bridge.start(pod(), first, soon())
    assert node.kind(record) is Kind.REAL
    await bridge.ended(second)  # removed before it started
    assert node.kind(record) is Kind.PLACEHOLDER


async def test_failed_attempt_needs_the_entry_only_until_the_next(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    """containerd sends no event when Kata fails to create the container, and the kubelet keeps the dead one."""
    record = node.publish("a", device("a").path)
    bridge = node.bridge()
    await bridge.create(pod(), container(record.target.text), soon())
    again = container(record.target.text, id_="container-0002")
    await bridge.create(pod(), again, soon())
    assert node.kind(record) is Kind.REAL
    one.create_container(again.id, record.device, "/data0")
    await bridge.start(pod(), again, soon())
    assert node.kind(record) is Kind.PLACEHOLDER


async def test_removal_of_failed_attempt_leaves_the_next_its_entry(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    record = node.publish("a", device("a").path)
    bridge, failed = node.bridge(), container(record.target.text)
    await bridge.create(pod(), failed, soon())
    again = container(record.target.text, id_="container-0002")
    await bridge.create(pod(), again, soon())
    await bridge.ended(failed)
    assert node.kind(record) is Kind.REAL
    await bridge.ended(again)
    assert node.kind(record) is Kind.PLACEHOLDER


async def test_another_sandbox_is_refused_with_the_holder_and_its_process(
    node: KataNode, device: MakeDevice, one: StandInSandbox, two: StandInSandbox
) -> None:
    record = node.publish("a", device("a").path)
    bridge = node.bridge()
    await bridge.create(pod(), container(record.target.text), soon())
    other = _of_two(record)
    with raised(
        "HeldBySandbox", match=f"{ONE} of kata has it, for which process {one.pid} answers"
    ):
        await bridge.create(pod(TWO), other, soon())
    assert keeper_pids(node, TWO) == ()
    end(node, one)
    await bridge.create(pod(TWO), other, soon())
    claim = node.claim(record)
    assert claim is not None
    assert claim.sandbox_id == TWO


async def test_pod_with_another_runtime_is_refused_for_any_volume(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    record = node.publish("a", device("a").path)
    bridge = node.bridge()
    for handler in ("runc", "", "kata-other"):
        with raised("WrongRuntime", match="published to the runtime handler kata"):
            await bridge.create(pod(handler=handler), container(record.target.text), soon())
        with raised("WrongRuntime"):
            await bridge.start(pod(handler=handler), container(record.target.text), soon())
    assert node.claim(record) is None
    assert node.kind(record) is Kind.PLACEHOLDER


async def test_pod_of_runtime_that_settings_name_no_more_is_refused(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    """Nobody would claim the volume, and Kata may share the host's directory."""
    record = node.publish("a", device("a").path)
    app, bridge = container(record.target.text), node.bridge("kata-other")
    with raised("RuntimeNotNamed", match="kata.toml does not name the runtime kata"):
        await bridge.create(pod(), app, soon())
    await bridge.synchronize({ONE: pod()}, [replace(app, is_running=True)])
    assert [str(problem) for problem in node.problems.values() if problem] != []
    await bridge.create(pod("of-another-runtime"), app, soon())  # which claims its own volumes


async def test_path_in_volume_and_bind_of_it_are_refused(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    """The guard takes no directory; with one that does, as of a handler with SUB_PATH, the bridge refuses alone."""
    record = node.publish("a", device("a").path)
    inside = f"{record.target.text}/sub"
    with pytest.raises(OSError, match="No space left on device"):
        os.mkdir(inside)
    mount_api.unmount(record.target.text)
    mount_api.mount_guard(record.target.text, names=True)
    os.mkdir(inside)
    bind = node.kubelet / "volume-subpaths"
    bind.mkdir()
    mount_api.bind(inside, str(bind))
    try:
        for source in (inside, str(bind)):
            with raised("SubPathUnsupported"):
                await node.bridge().create(pod(), container(source), soon())
    finally:
        mount_api.unmount(str(bind))
    assert node.claim(record) is None


async def test_a_guard_without_an_entry_is_refused(node: KataNode, one: StandInSandbox) -> None:
    target = node.target("a").text
    os.makedirs(target)
    mount_api.mount_guard(target)
    with raised("GuardWithoutEntry"):
        await node.bridge().create(pod(), container(target), soon())


async def test_alias_of_target_is_one_more_name_of_claim(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    """Kata's key is the source as it came: a link in the path, a slash at its end."""
    record = node.publish("a", device("a").path)
    (node.directory / "link").symlink_to(node.kubelet)
    alias = f"{node.directory}/link/a/mount/"
    bridge, app = node.bridge(), container(alias)
    await bridge.create(pod(), app, soon())
    assert node.entries.kind(entry.name_of(alias), record) is Kind.REAL
    assert node.kind(record) is Kind.PLACEHOLDER
    one.create_container(app.id, record.device, "/data0")
    await bridge.start(pod(), app, soon())
    assert node.entries.kind(entry.name_of(alias), record) is Kind.PLACEHOLDER
    end(node, one)
    looks = Placeholders(node.store, node.entries, [HANDLER], node.problems.__setitem__)
    looks.look_at_volumes()
    with node.store.begin_removal(record.target) as begun:
        begun.complete()
    looks.look_at_volumes()
    assert node.entries.names() == []


async def test_real_entry_without_record_goes_at_the_first_look(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    """Keepers and machine were killed together, and the volume was unpublished while the daemon was away."""
    record = node.publish("a", device("a").path)
    await node.bridge().create(pod(), container(record.target.text), soon())
    with processes.ending(*keeper_pids(node, ONE)) as keepers_ends:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # neither withdraws the file
            for keeper in keepers_ends:
                signal.pidfd_send_signal(keeper, number)
            one.kill()
    with node.store.begin_removal(record.target) as begun:
        begun.complete()
    assert node.kind(record) is Kind.REAL
    foreign = Path(node.entries.file(entry.name_of("/a/path/of/another/driver")))
    foreign.parent.mkdir()
    foreign.write_bytes(entry.real(record))
    Placeholders(node.store, node.entries, [HANDLER], node.problems.__setitem__).look_at_volumes()
    assert node.kind(record) is Kind.ABSENT
    assert foreign.exists()
    assert os.listdir(f"{node.entries.root}.crust") == []


async def test_container_without_volume_attached_by_kata_does_not_start(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    record = node.publish("a", device("a").path)
    bridge, app = node.bridge(), container(record.target.text)
    await bridge.create(pod(), app, soon())
    with raised("VmUnknown"):  # Kata knows no such container
        await bridge.start(pod(), app, soon())
    one.write_container(app.id, record.device, "/data0", id_="")
    with raised("VolumeNotAttached", match="was not given .*Kata shares a directory"):
        await bridge.start(pod(), app, soon())


async def test_container_that_was_created_without_bridge_does_not_start(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    record = node.publish("a", device("a").path)
    app = container(record.target.text)
    one.create_container(app.id, record.device, "/data0")
    with raised("VolumeNotClaimed"):
        await node.bridge().start(pod(), app, soon())


async def test_of_several_volumes_refused_one_leaves_no_claim_of_others(
    node: KataNode, device: MakeDevice, one: StandInSandbox, two: StandInSandbox
) -> None:
    first, second = node.publish("a", device("a").path), node.publish("b", device("b").path)
    bridge = node.bridge()
    await bridge.create(
        pod(TWO), container(second.target.text, pod_id=TWO, id_="container-0002"), soon()
    )
    both = container(first.target.text, second.target.text)
    with raised("HeldBySandbox"):
        await bridge.create(pod(), both, soon())
    assert node.claim(first) is None
    assert node.kind(first) is Kind.PLACEHOLDER
    assert not _is_held(first.device)


def _calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[None]:
    """One element for each call of the function from now on."""
    calls, function = list[None](), getattr(owner, name)

    def called(*arguments: object) -> object:
        calls.append(None)
        return function(*arguments)

    monkeypatch.setattr(owner, name, called)
    return calls


async def test_volumes_of_a_container_share_looks_and_keeper_changes(
    node: KataNode, device: MakeDevice, one: StandInSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change of a keeper is a fork of it; a look reads the open files of all processes."""
    looks, standbys, ask = counted(monkeypatch), list[int](), keepers.Keeper._ask

    def asked(line: keepers.Keeper, *request: Any) -> None:
        ask(line, *request)
        standbys.append(line.pids[1])

    monkeypatch.setattr(keepers.Keeper, "_ask", asked)
    records = [node.publish(name, device(name).path) for name in "abc"]
    bridge, app = node.bridge(), container(*(record.target.text for record in records))
    await bridge.create(pod(), app, soon())
    assert len(looks) == 1
    assert len({*standbys}) == 3, "of its start, of the claims, of the files"
    assert {node.kind(record) for record in records} == {Kind.REAL}
    connections = _calls(monkeypatch, keepers, "connect")
    await bridge.create(pod(), app, soon())
    assert (len(looks), len({*standbys})) == (1, 3), "the validation changes nothing"
    assert len(connections) == 3, "for what others need, the claims, and the files"
    await bridge.ended(app)
    assert len({*standbys}) == 4
    assert {node.kind(record) for record in records} == {Kind.PLACEHOLDER}


async def test_a_container_with_more_volumes_needs_no_more_lists(
    node: KataNode,
    device: MakeDevice,
    one: StandInSandbox,
    two: StandInSandbox,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all mounts, of the open files of a keeper and of a machine, and of Kata's state."""
    counts = []
    lists = [
        _calls(monkeypatch, owner, name)
        for owner, name in (
            (mountinfo, "listing"),
            (open_files, "_of"),
            (openers, "opened_by"),
            (GoRuntime, "_read"),
        )
    ]
    for box, names in ((one, "a"), (two, "bcd")):
        records = [node.publish(name, device(name).path) for name in names]
        app = container(*(record.target.text for record in records), pod_id=box.id)
        bridge, sandbox = node.bridge(), pod(box.id, pid=box.pid)
        for step in (bridge.create, bridge.create, bridge.start):
            if step == bridge.start:
                for at, record in enumerate(records):
                    box.create_container(app.id, record.device, f"/data{at}")
            for calls in lists:
                calls.clear()
            await step(sandbox, app, soon())
            counts.append([len(calls) for calls in lists])
    assert counts[:3] == counts[3:]


async def test_a_claim_that_is_late_is_undone(
    node: KataNode,
    device: MakeDevice,
    one: StandInSandbox,
    two: StandInSandbox,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = node.publish("a", device("a").path)
    bridge = node.bridge()
    hangs = threading.Event()
    place = entry.KataEntries.place

    def slow(entries: entry.KataEntries, name: str, of: Record) -> Kind:
        hangs.wait()
        return place(entries, name, of)

    monkeypatch.setattr(entry.KataEntries, "place", slow)
    with raised("EngineTimeOver"):
        await bridge.create(pod(), container(record.target.text), soon(0.2))
    with raised("EngineTimeOver", match="an earlier call"):
        await bridge.create(pod(TWO), _of_two(record), soon())
    hangs.set()
    claimed = False
    while not claimed:  # the thread undoes its steps, and has the volume until then
        with contextlib.suppress(errors.PeerUnavailable):
            await bridge.create(pod(TWO), _of_two(record), soon())
            claimed = True
    claim = node.claim(record)
    assert claim is not None
    assert claim.sandbox_id == TWO
    assert node.kind(record) is Kind.REAL


async def test_a_configuration_that_changed_is_refused_at_the_next_create(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    record = node.publish("a", device("a").path)
    bridge = node.bridge()
    await bridge.create(pod(), container(record.target.text), soon())
    node.configuration.write_text("[hypervisor.clh]\ndisable_block_device_use = true\n")
    with raised("KataUnfit"):
        await bridge.create(pod(), container(record.target.text, id_="container-0002"), soon())


async def test_read_only_volume_is_claimed_and_its_entry_says_ro(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    record = node.publish("a", device("a").path, readonly=True)
    await node.bridge().create(pod(), container(record.target.text), soon())
    assert (
        b'"options":["ro","noatime"]'
        in Path(node.entries.file(entry.name_of(record.target.text))).read_bytes()
    )


async def test_the_group_of_the_guard_is_the_entry_s_group(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    """A kubelet changes it after the publish, where it cannot pass fsGroup to the driver (H-38)."""
    record = node.publish("a", device("a").path)
    os.chown(record.target.text, -1, 3000)
    await node.bridge().create(pod(), container(record.target.text), soon())
    assert (
        b'"fsGroup":"3000"'
        in Path(node.entries.file(entry.name_of(record.target.text))).read_bytes()
    )


async def test_a_restarted_bridge_knows_what_was_created_from_the_engine(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    created, started = node.publish("a", device("a").path), node.publish("b", device("b").path)
    before = node.bridge()
    first, second = (
        container(created.target.text),
        container(started.target.text, id_="container-0002", name="beside"),
    )
    await before.create(pod(), first, soon())
    await before.create(pod(), second, soon())
    bridge = node.bridge()  # the other was killed between create and start
    listed = [
        container(created.target.text, is_created=True),
        replace(second, is_running=True),
    ]
    await bridge.synchronize({ONE: pod()}, listed)
    assert node.kind(created) is Kind.REAL
    assert node.kind(started) is Kind.PLACEHOLDER
    assert node.problems == {}
    one.create_container(first.id, created.device, "/data0")
    await bridge.start(pod(), first, soon())
    assert node.kind(created) is Kind.PLACEHOLDER


async def test_container_that_starts_or_comes_beside_the_list_counts(
    node: KataNode, device: MakeDevice, one: StandInSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine goes on while the bridge looks at the list that it sent before."""
    first, second = node.publish("a", device("a").path), node.publish("b", device("b").path)
    bridge = node.bridge()
    app = container(first.target.text, is_created=True)
    other = container(second.target.text, id_="container-0002", name="beside")
    await bridge.create(pod(), app, soon())
    one.create_container(app.id, first.device, "/data0")
    looks, go_on, sandbox_ids = threading.Event(), threading.Event(), grants.Grants.sandbox_ids

    def slow(of: grants.Grants) -> list[str]:
        looks.set()
        go_on.wait()
        return sandbox_ids(of)

    monkeypatch.setattr(grants.Grants, "sandbox_ids", slow)
    looking = asyncio.create_task(bridge.synchronize({ONE: pod()}, [app]))
    await asyncio.to_thread(looks.wait)
    await bridge.start(pod(), app, soon())
    await bridge.create(pod(), other, soon())
    go_on.set()
    await looking
    assert node.kind(first) is Kind.PLACEHOLDER
    assert node.kind(second) is Kind.REAL
    last = container(first.target.text, id_="container-0003", name="last")
    await bridge.create(pod(), last, soon())
    one.write_container(last.id, first.device, "/data0")
    await bridge.start(pod(), last, soon())
    assert node.kind(first) is Kind.PLACEHOLDER


async def test_a_container_that_runs_without_its_volume_is_named(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    record = node.publish("a", device("a").path)
    await node.bridge().synchronize({ONE: pod()}, [container(record.target.text, is_running=True)])
    (problem,) = node.problems.values()
    assert isinstance(problem, errors.NotReady)
    assert problem.error_name == "RunsWithoutVolume"


@pytest.fixture
def watch(node: KataNode) -> KeeperWatch:
    """The watch of the node's keepers; a test looks by itself."""
    return KeeperWatch(node.grants(), node.builds())


@pytest.mark.spec("H-46")
async def test_claims_of_killed_keepers_are_taken_again(
    node: KataNode, device: MakeDevice, one: StandInSandbox, watch: KeeperWatch
) -> None:
    record = node.publish("a", device("a").path)
    bridge, app = node.bridge(), container(record.target.text)
    await bridge.create(pod(), app, soon())
    one.create_container(app.id, record.device, "/data0")
    await bridge.start(pod(), app, soon())
    await watch.look_at_keepers()
    kill_all_keepers(node.grants().socket(ONE))
    assert not claims.is_held(node.store.layout.entry(record.target))
    await watch.look_at_keepers()
    assert claims.is_held(node.store.layout.entry(record.target))
    assert _is_held(record.device)
    assert lives(one.process)
    watch.close()


@pytest.mark.spec("H-23")
async def test_volume_of_machine_without_keeper_is_refused_to_another_sandbox(
    node: KataNode, device: MakeDevice, one: StandInSandbox, two: StandInSandbox, watch: KeeperWatch
) -> None:
    """The claim is free, and the machine still writes to the device."""
    record = node.publish("a", device("a").path)
    bridge, app = node.bridge(), container(record.target.text)
    await bridge.create(pod(), app, soon())
    one.create_container(app.id, record.device, "/data0")
    await watch.look_at_keepers()
    kill_all_keepers(node.grants().socket(ONE))
    with pytest.raises(claims.HypervisorLives, match=f"process {one.pid} of sandbox {ONE}"):
        await bridge.create(pod(TWO), _of_two(record), soon())
    await watch.look_at_keepers()
    claim = node.claim(record)
    assert claim is not None
    assert (claim.live, claim.sandbox_id) == (True, ONE)
    assert lives(one.process)
    assert lives(two.process)
    watch.close()


@pytest.mark.spec("H-23")
async def test_device_promised_to_machine_without_keeper_is_given_to_nobody(
    node: KataNode, device: MakeDevice, one: StandInSandbox, two: StandInSandbox
) -> None:
    """Created, and not attached yet: no process has the device open, and Kata will open it."""
    record = node.publish("a", device("a").path)
    bridge = node.bridge()
    await bridge.create(pod(), container(record.target.text), soon())
    kill_all_keepers(node.grants().socket(ONE))
    with pytest.raises(claims.HypervisorLives, match=ONE):
        await bridge.create(pod(TWO), _of_two(record), soon())
    with pytest.raises(claims.HypervisorLives, match=ONE):
        node.store.begin_removal(record.target)
    await bridge.create(pod(), container(record.target.text), soon())  # the engine tries again
    assert claims.is_held(node.store.layout.entry(record.target))


@pytest.mark.spec("H-46")
async def test_claim_that_a_recovery_missed_is_taken_by_the_next(
    node: KataNode, device: MakeDevice, one: StandInSandbox, watch: KeeperWatch
) -> None:
    """One entry was locked by an unpublish: the new keeper got the other claim, and serves."""
    records = [node.publish(name, device(name).path) for name in ("a", "b")]
    bridge = node.bridge()
    for record in records:
        app = container(record.target.text, id_=f"container-{record.digest[:8]}")
        await bridge.create(pod(), app, soon())
    kill_all_keepers(node.grants().socket(ONE))
    first, second = (node.store.layout.entry(record.target) for record in records)
    with claims.ClaimLock.acquire(second, records[1].target):
        await watch.look_at_keepers()
        assert claims.is_held(first)
    await watch.look_at_keepers()
    claim = node.claim(records[1])
    assert claim is not None
    assert (claim.live, claim.sandbox_id) == (True, ONE)
    assert lives(one.process)
    watch.close()


@pytest.mark.spec("H-46")
async def test_machine_that_kata_has_forgotten_keeps_socket_and_claim(
    node: KataNode, device: MakeDevice, one: StandInSandbox, two: StandInSandbox
) -> None:
    """The shim was killed, Kata's directory went with it, and then the control group of the daemon was killed."""
    record = node.publish("a", device("a").path)
    bridge, app = node.bridge(), container(record.target.text)
    await bridge.create(pod(), app, soon())
    one.create_container(app.id, record.device, "/data0")
    await bridge.start(pod(), app, soon())
    one.shim.kill()
    one.shim.wait()
    shutil.rmtree(node.sandboxes / ONE)
    kill_all_keepers(node.grants().socket(ONE))
    watch = KeeperWatch(node.grants(), node.builds())  # of the restarted daemon
    await watch.look_at_keepers()
    claim = node.claim(record)
    assert claim is not None
    assert (claim.live, claim.sandbox_id, claim.pid) == (True, ONE, one.pid)
    with pytest.raises(claims.HeldBySandbox, match=ONE):
        await node.bridge().create(pod(TWO), _of_two(record), soon())
    assert lives(one.process)
    watch.close()


@pytest.mark.spec("H-46")
async def test_machine_that_nothing_names_keeps_its_socket(
    node: KataNode, device: MakeDevice, one: StandInSandbox, watch: KeeperWatch
) -> None:
    """Neither crust's file nor Kata's says which process it is: that is no end."""
    record = node.publish("a", device("a").path)
    bridge, app = node.bridge(), container(record.target.text)
    await bridge.create(pod(), app, soon())
    one.create_container(app.id, record.device, "/data0")
    kill_all_keepers(node.grants().socket(ONE))
    shutil.move(node.sandboxes / ONE, node.directory / "away")
    shutil.move(node.directory / "keepers" / f"{ONE}.vm", node.directory / "vm")
    await watch.look_at_keepers()
    assert node.grants().sandbox_ids() == [ONE]
    assert not claims.is_held(node.store.layout.entry(record.target))
    assert lives(one.process)
    shutil.move(node.directory / "away", node.sandboxes / ONE)
    await watch.look_at_keepers()
    assert claims.is_held(node.store.layout.entry(record.target))
    watch.close()


async def test_socket_of_machine_that_ended_unseen_goes(
    node: KataNode, device: MakeDevice, one: StandInSandbox, watch: KeeperWatch
) -> None:
    record = node.publish("a", device("a").path)
    bridge, app = node.bridge(), container(record.target.text)
    await bridge.create(pod(), app, soon())
    end(node, one)
    with node.store.begin_removal(record.target) as removal:
        removal.complete()
    shutil.rmtree(node.sandboxes / ONE)
    assert node.grants().sandbox_ids() == [ONE]
    await watch.look_at_keepers()
    assert os.listdir(node.directory / "keepers") == []
    watch.close()


@pytest.mark.spec("H-46")
async def test_claim_of_refused_container_ends_though_machine_lives(
    node: KataNode, device: MakeDevice, one: StandInSandbox, two: StandInSandbox
) -> None:
    """Its process runs, and does not have the volume: nothing is left that names it."""
    record = node.publish("a", device("a").path)
    grants, sandbox = node.grants(), Sandbox(volumes.SandboxId(ONE), process_of(one.pid))
    grants.grant(sandbox, {record.target.text: record}, "container-0001/app", FEATURES)()
    assert lives(one.process)
    assert node.claim(record) is None
    await node.bridge().create(pod(TWO), _of_two(record), soon())


async def test_one_process_of_the_keeper_is_not_missed(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    record = node.publish("a", device("a").path)
    bridge, app = node.bridge(), container(record.target.text)
    await bridge.create(pod(), app, soon())
    os.kill(keeper_pids(node, ONE)[0], signal.SIGKILL)
    one.create_container(app.id, record.device, "/data0")
    await bridge.start(pod(), app, soon())
    assert node.kind(record) is Kind.PLACEHOLDER
    assert _is_held(record.device)


async def test_a_container_without_a_deferred_volume_costs_no_claim(
    node: KataNode, tmp_path: Path
) -> None:
    sources = (str(tmp_path), "/proc", "/etc/hosts", "/not/there")
    bridge = node.bridge()
    await bridge.create(pod(handler="runc"), container(*sources), soon())
    await bridge.start(pod(handler="runc"), container(*sources), soon())
    assert node.grants().sandbox_ids() == []


def test_path_too_long_for_kata_is_named_without_placeholder(
    node: KataNode, device: MakeDevice
) -> None:
    target = volumes.TargetPath.parse(f"{node.kubelet}/{'x' * 180}/mount")
    record = node.publish("a", device("a").path)
    with node.store.begin_removal(record.target) as begun:
        begun.complete()
    node.store.write(record.replaced(target_path=target.text))
    Placeholders(node.store, node.entries, [HANDLER], node.problems.__setitem__).look_at_volumes()
    (problem,) = node.problems.values()
    assert problem is not None
    assert problem.error_name == "KataPathTooLong"
