"""`crust try` against a real node: a volume of its own, deferred, and nothing left whatever happens."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from crust.blockdriver.records import capacity
from crust.cli import main, trial
from crust.cli.gc import collect, kernel
from crust.core import errors, operations, volumes
from crust.core.settings import OWN_DRIVER
from crust.runtime_handler.blocking import Claim, claim_volume
from tests.support.co import MIB, capability
from tests.support.nodes.served_node import BlockNode
from tests.support.raised import raised
from tests.support.records import pool_layout

pytestmark = [pytest.mark.root, pytest.mark.parametrize("chain", ["node"], indirect=True)]


def trial_request(
    chain: BlockNode, *, handler: str = "kata", wait_s: float = 0
) -> trial.TrialRequest:
    return trial.TrialRequest(
        driver="",
        handler=handler,
        size_bytes=64 << 20,
        fs_type="ext4",
        target_root=chain.places.kubelet,
        parameters={},
        wait_s=wait_s,
    )


def assert_nothing_left(chain: BlockNode) -> None:
    assert chain.places.entries() == []
    assert pool_layout.volume_records(Path(chain.places.root, "state")) == set()
    assert [path for path in Path(chain.places.kubelet).rglob("*") if not path.is_dir()] == []
    assert not list(Path(chain.places.kubelet).rglob("crust-try*"))


async def test_try_publishes_deferred_and_leaves_nothing(
    chain: BlockNode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await trial.try_publish(chain.places.run, trial_request(chain)) == 0
    printed = capsys.readouterr().out.splitlines()
    done = [line.partition(":")[0] for line in printed if line.endswith(": OK")]
    assert done == [
        "CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume",
        "NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume", "DeleteVolume",
    ]  # fmt: skip
    assert any(line.startswith("published /dev/loop") for line in printed)
    assert_nothing_left(chain)


async def test_try_says_why_no_handler_takes_it_and_leaves_nothing(
    chain: BlockNode, capsys: pytest.CaptureFixture[str]
) -> None:
    chain.grace_s = 0
    await chain.restart()
    assert await trial.try_publish(chain.places.run, trial_request(chain, handler="absent")) == 1
    assert "HandlerNotRegistered" in capsys.readouterr().err
    assert_nothing_left(chain)


async def test_try_reports_even_a_sandbox_that_ends_at_once(
    chain: BlockNode, capsys: pytest.CaptureFixture[str]
) -> None:
    """A guest that ended soon after its mount was never reported: no look met it in the state that was waited for."""
    trying = asyncio.create_task(
        trial.try_publish(chain.places.run, trial_request(chain, wait_s=60))
    )
    claim = await asyncio.to_thread(_claim_when_published, chain.places.volumes)
    await _shown(capsys, "claimed by sandbox box")  # as a guest that boots
    await asyncio.to_thread(claim.report_mounted)
    await asyncio.to_thread(claim.release)
    assert await trying == 0
    assert "released by sandbox box" in capsys.readouterr().out
    assert_nothing_left(chain)


async def test_try_shows_the_mount_and_why_the_sandbox_failed(
    chain: BlockNode, capsys: pytest.CaptureFixture[str]
) -> None:
    trying = asyncio.create_task(
        trial.try_publish(chain.places.run, trial_request(chain, wait_s=60))
    )
    claim = await asyncio.to_thread(_claim_when_published, chain.places.volumes)
    await asyncio.to_thread(claim.report_mounted)
    await _shown(capsys, "mounted in sandbox box")
    await asyncio.to_thread(claim.report_error, "the guest's kernel panicked")
    await _shown(capsys, "failed in sandbox box: the guest's kernel panicked")
    await asyncio.to_thread(claim.release, error="the guest is gone")
    assert await trying == 0
    assert "released by sandbox box: the guest is gone" in capsys.readouterr().out
    assert_nothing_left(chain)


async def test_try_without_a_sandbox_in_time_fails_and_leaves_nothing(
    chain: BlockNode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await trial.try_publish(chain.places.run, trial_request(chain, wait_s=0.5)) == 1
    assert "[NotClaimed]" in capsys.readouterr().err
    assert_nothing_left(chain)


async def test_unknown_driver_is_refused_before_anything_is_made(chain: BlockNode) -> None:
    other = trial_request(chain).model_copy(update={"driver": "other"})
    with raised("NoDriverToTry", match=r"block\.csi\.crust\.dev"):
        await trial.try_publish(chain.places.run, other)
    assert_nothing_left(chain)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_try_that_is_ended_by_a_signal_undoes_its_steps(
    chain: BlockNode, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    trying = asyncio.create_task(
        trial.try_publish(chain.places.run, trial_request(chain, wait_s=600))
    )
    await _shown(capsys, "waiting for a sandbox")
    os.kill(os.getpid(), number)
    with pytest.raises(asyncio.CancelledError):
        await trying
    assert_nothing_left(chain)


@pytest.mark.parametrize("step", ["CreateVolume", "NodeStageVolume", "NodePublishVolume"])
async def test_gc_undoes_a_try_that_was_killed_after_a_step(chain: BlockNode, step: str) -> None:
    killed = _KilledTrial(chain, step)
    options = collect.Options(chain.places.run, chain.places.kubelet, 0, dry_run=False)
    with killed:
        assert await collect.collect(options, kernel.Kernel()) == (), "it runs"
        await asyncio.to_thread(killed.wait_for_step)
    (settled,) = await collect.collect(options, kernel.Kernel())
    assert (settled.publish.kind, settled.outcome) == ("trial", "undone"), settled.message
    assert_nothing_left(chain)


class _KilledTrial:
    """`crust try` in a process of its own, which is killed when it has printed that a step was made."""

    def __init__(self, chain: BlockNode, step: str) -> None:
        self._step = step
        arguments = ("try", "--handler=kata", "--wait-s=600", f"--run-dir={chain.places.run}")
        root = f"--target-root={chain.places.kubelet}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "crust", *arguments, root], stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "_KilledTrial":
        return self

    def wait_for_step(self) -> None:
        assert self._process.stdout is not None
        assert any(line.startswith(f"{self._step}: OK") for line in self._process.stdout)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _claim_when_published(root: str) -> Claim:
    from crust.handoff.store import Store

    store = Store(root)
    while True:
        with suppress(errors.CrustError):
            for entry in store.scan():
                if entry.record is not None:
                    target = entry.record.target
                    box, kata = volumes.SandboxId("box"), volumes.HandlerName("kata")
                    features = frozenset(volumes.HandlerFeature)
                    return claim_volume(root, target, box, kata, features=features)


async def _shown(capsys: pytest.CaptureFixture[str], wanted: str) -> None:
    """Return when the command has printed it."""
    printed = ""
    async with asyncio.timeout(60):
        while wanted not in printed:
            printed += capsys.readouterr().out
            await asyncio.sleep(0.05)


async def crust(chain: BlockNode, *words: str, answer: str = "") -> Result:
    command, *rest = words
    arguments = [command, "--run-dir", chain.places.run, *rest]
    return await asyncio.to_thread(CliRunner().invoke, main.main, arguments, answer)


async def shown(chain: BlockNode) -> Any:
    return json.loads((await crust(chain, "pool", "-o", "json")).output)


async def test_pool_shows_space_and_who_has_each_volume(chain: BlockNode) -> None:
    deferred = await chain.volume()
    target = chain.places.target("pod-1")
    await chain.publish(deferred, target)
    on_host = (await chain.co.create("other", capability(), size=32 * MIB)).volume_id
    await chain.stage(on_host, "second")
    host_target = chain.places.target("pod-2")
    pod = {"csi.storage.k8s.io/pod.namespace": "shop", "csi.storage.k8s.io/pod.name": "db-0"}
    staging = chain.staging("second")
    published = chain.co.publish(
        on_host, host_target, capability(), defer=False, staging=staging, volume_context=pod
    )
    await chain.note_publish(on_host, host_target, published)
    unused = (await chain.co.create("idle", capability(), size=32 * MIB)).volume_id
    with chain.sandbox(target):
        document = await shown(chain)
    states = {row["volume_id"]: row["state"] for row in document["volumes"]}
    assert states == {deferred: "claimed", on_host: "on-host", unused: "unused"}
    assert {row["pv"] for row in document["volumes"]} == {"pvc", "other", "idle"}
    assert {row["volume_id"]: row["pods"] for row in document["volumes"]}[on_host] == ["shop/db-0"]
    (pool,) = document["pools"]
    assert pool["space"]["reserved_bytes"] == sum(row["size_bytes"] for row in document["volumes"])
    assert 0 < pool["space"]["free_bytes"] < pool["space"]["size_bytes"]
    table = (await crust(chain, "pool")).output
    assert "idle" in table
    assert unused not in table, "ids are wide"


async def test_forgotten_volume_is_deleted_once_the_operator_agrees(chain: BlockNode) -> None:
    used, idle = [
        (await chain.co.create(name, capability(), size=32 * MIB)).volume_id
        for name in ("used", "idle")
    ]
    await chain.stage(used)
    target = chain.places.target("pod-1")
    await chain.publish(used, target)
    refused = await crust(chain, "pool", "delete", "used", "--yes")
    assert (refused.exit_code, "[VolumeNotUnused]" in refused.output) == (1, True)
    assert (await crust(chain, "pool", "delete", "idle", answer="n\n")).exit_code == 1
    assert {row["pv"] for row in (await shown(chain))["volumes"]} == {"used", "idle"}
    deleted = await crust(chain, "pool", "delete", "idle", answer="y\n")
    assert (deleted.exit_code, f"deleted {idle}" in deleted.output) == (0, True)
    assert [row["pv"] for row in (await shown(chain))["volumes"]] == ["used"]
    absent = await crust(chain, "pool", "delete", "idle", "--yes")
    assert "[VolumeNotInPool]" in absent.output


async def test_pool_that_is_low_is_a_warning_everywhere(
    chain: BlockNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = capacity.PoolCapacity.measured
    monkeypatch.setattr(
        capacity.PoolCapacity, "measured", lambda pool: {**measured(pool), "free": 0}
    )
    status = await crust(chain, "status")
    assert (status.exit_code, "nothing of" in status.output) == (0, True), "volumes still work"
    assert "nothing of" in (await crust(chain, "doctor", "--check", "drivers")).output
    pool = await crust(chain, "pool")
    assert (pool.exit_code, "low" in pool.output) == (1, True)


async def test_pool_whose_disk_is_full_is_a_problem_everywhere(
    chain: BlockNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(pool: capacity.PoolCapacity) -> Mapping[str, int]:
        numbers = measured(pool)
        return {**numbers, "free": 0, "allocated": numbers["size"]}

    measured = capacity.PoolCapacity.measured
    monkeypatch.setattr(capacity.PoolCapacity, "measured", full)
    status = await crust(chain, "status")
    assert (status.exit_code, "writes of its volumes fail" in status.output) == (1, True)
    assert "nothing of" not in status.output, "a pool has one state"
    assert "writes of its" in (await crust(chain, "doctor", "--check", "drivers")).output
    pool = await crust(chain, "pool")
    assert (pool.exit_code, "full" in pool.output) == (1, True)


async def test_drivers_operations_that_do_not_end_stand_in_status(
    chain: BlockNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: a driver in one process with the proxy has the problems of the proxy too."""
    hangs = (operations.OperationOverdue("v1", "CreateVolume", 200.0),)
    monkeypatch.setattr(operations.KeyedOperations, "overdue", lambda _: hangs)
    part = f"operations of the driver {OWN_DRIVER}"
    async with asyncio.timeout(60):
        while part not in (status := await crust(chain, "status", "-o", "name")).output:
            pass
    assert status.exit_code == 1
    assert status.output.splitlines().count(part) == 1
    assert "CreateVolume of v1" in (await crust(chain, "status")).output
