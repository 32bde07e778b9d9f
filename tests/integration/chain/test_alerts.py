"""A node in each trouble that an operator must hear of fires its alert, and does not fire it before."""

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

from crust.blockdriver import driver as drivers
from crust.cli import main
from crust.core import volumes
from crust.core.settings import OWN_DRIVER
from crust.handoff import layout
from crust.host.mounts import mount_api
from crust.proxy import handler_calls
from crust.runtime_handler.blocking import State, claim_volume
from tests.support import prometheus
from tests.support.drivers.fake_driver import Gate
from tests.support.faults.refusals import refused
from tests.support.nodes.served_node import BlockNode
from tests.support.records import pool_layout
from tests.support.runtimes.fake_handler import FakeHandler

pytestmark = pytest.mark.root
in_one_process = pytest.mark.parametrize("chain", ["node"], indirect=True)
Code = grpc.StatusCode


@pytest.fixture
async def address(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[str]:
    """The URL of a Prometheus that reads this process' metrics."""
    rules = prometheus.quick_rules(tmp_path)
    async with prometheus.scraping_this_process(tmp_path, caplog, rules) as address:
        yield address


async def check_quiet(address: str, *alerts: str) -> None:
    await prometheus.scraped_often(address)
    for alert in alerts:
        assert await prometheus.firing(address, alert) is None


@in_one_process
async def test_unpublish_that_a_sandbox_refuses_fires_its_alert(
    chain: BlockNode, address: str
) -> None:
    volume_id, target = await chain.published_volume()
    await check_quiet(address, "CrustUnpublishRefused")
    names = volumes.TargetPath(target), volumes.SandboxId("s"), volumes.HandlerName("kata")
    claim = claim_volume(str(chain.places.volumes), *names, features=[*volumes.HandlerFeature])
    with claim as held:
        held.report(State.MOUNTED)
        for _ in range(2):
            await refused(chain.unpublish(volume_id, target), Code.FAILED_PRECONDITION)
        labels = await prometheus.fires(address, "CrustUnpublishRefused")
    assert (labels["severity"], labels["error"]) == ("critical", "UnpublishRefused")


@in_one_process
async def test_runtime_that_ended_fires_critical_alert_once_pods_wait(
    chain: BlockNode, address: str
) -> None:
    volume_id, target = await chain.volume(), chain.places.target("one")
    alerts = ("CrustNoRuntimeHandler", "CrustPodsWaitForHandler")
    await check_quiet(address, *alerts)
    await chain.stop("handler")
    ended = await prometheus.fires(address, alerts[0])
    assert await prometheus.firing(address, alerts[1]) is None
    while (waits := await prometheus.firing(address, alerts[1])) is None:
        await refused(chain.publish(volume_id, target), Code.FAILED_PRECONDITION)
    assert (ended["severity"], waits["severity"]) == ("warning", "critical")


@in_one_process
async def test_runtime_that_hangs_fires_its_critical_alert(
    chain: BlockNode, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_calls, "STATS_TIMEOUT_S", 0.2)
    gate = Gate()
    await chain.enter("handler", chain.handler(FakeHandler(gate=gate)))
    volume_id, target = await chain.published_volume()
    await check_quiet(address, "CrustHandlerNotResponding")
    with chain.sandbox(target):
        with pytest.raises(grpc.aio.AioRpcError):
            await chain.co.stats(volume_id, target)
        labels = await prometheus.fires(address, "CrustHandlerNotResponding")
        gate.opened.set()
    assert (labels["severity"], labels["error"]) == ("critical", "HandlerNotResponding")


@contextmanager
def removed(pool: Path) -> Iterator[None]:
    away = pool.rename(f"{pool}.away")
    yield
    away.rename(pool)


@contextmanager
def mounted_over(pool: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(pool)], check=True)
    yield
    mount_api.unmount(str(pool))


@contextmanager
def exchanged(pool: Path) -> Iterator[None]:
    """With the pool of another disk."""
    other = Path(f"{pool}.other")
    other.mkdir()
    made = CliRunner().invoke(main.main, ["driver", "init-pool", f"--state-dir={other}"])
    assert made.exit_code == 0, made.output
    with removed(pool):
        other.rename(pool)
        yield
        shutil.rmtree(pool)


@in_one_process
@pytest.mark.parametrize("fault", [removed, mounted_over, exchanged])
async def test_pool_that_is_away_fires_its_critical_alert(
    chain: BlockNode, address: str, fault: Callable[[Path], AbstractContextManager[None]]
) -> None:
    alerts = ("CrustPoolClosed", "CrustCallsFail")
    await check_quiet(address, *alerts)
    with fault(Path(chain.places.root) / "state"):
        closed = await prometheus.fires(address, alerts[0])
        while (fails := await prometheus.firing(address, alerts[1])) is None:
            await refused(chain.co.capacity(), Code.UNAVAILABLE)
    assert (closed["severity"], closed["driver"]) == ("critical", OWN_DRIVER)
    assert fails["method_name"] == "/csi.v1.Controller/GetCapacity"
    while not await chain.co.is_ready():
        continue


@in_one_process
async def test_image_restored_under_a_pod_fires_its_critical_alert(
    chain: BlockNode, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "EXAMINE_PERIOD_S", 0.2)
    await chain.restart("node", "handler", "calls")
    volume_id, target = await chain.volume(), chain.places.target("pod")
    await chain.publish(volume_id, target, defer=False)
    await check_quiet(address, "CrustVolumesAbnormal")
    image = pool_layout.image(Path(chain.places.root) / "state", volume_id)
    own = image.rename(f"{image}.own")
    shutil.copy2(own, image)
    labels = await prometheus.fires(address, "CrustVolumesAbnormal")
    own.rename(image)
    assert (labels["severity"], labels["reason"]) == ("critical", "ImageReplaced")


@in_one_process
async def test_entry_that_is_damaged_or_gone_fires_its_alert(
    chain: BlockNode, address: str
) -> None:
    _, target = await chain.published_volume()
    alerts = ("CrustUnreadableEntry", "CrustProblem")
    await check_quiet(address, *alerts)
    record = Path(layout.Layout(chain.places.volumes).entry(volumes.TargetPath(target)).record)
    content = record.read_bytes()
    record.write_bytes(b"{")
    damaged = await prometheus.fires(address, alerts[0])
    record.write_bytes(content)
    away = record.parent.rename(f"{chain.places.root}/away")
    gone = await prometheus.fires(address, alerts[1])
    away.rename(record.parent)
    assert (damaged["severity"], gone["severity"]) == ("critical", "warning")
    assert gone["error"] == "EntryMissing"


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGSTOP])
async def test_daemon_that_is_killed_or_stopped_fires_its_critical_alert(
    tmp_path: Path, ended_by: signal.Signals
) -> None:
    metrics = f"127.0.0.1:{prometheus.free_port()}"
    daemon = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "crust", "driver", "--create-pool", "--no-check-propagation"),
        *(f"--socket={tmp_path}/csi.sock", f"--state-dir={tmp_path}/state"),
        *(f"--run-dir={tmp_path}/run", f"--target-root={tmp_path}", "--node-id=n"),
        f"--metrics-address={metrics}",
    )
    try:
        rules = prometheus.quick_rules(tmp_path)
        async with prometheus.scraping(tmp_path, metrics, rules) as address:
            await check_quiet(address, "CrustDaemonDown")
            daemon.send_signal(ended_by)
            labels = await prometheus.fires(address, "CrustDaemonDown")
    finally:
        if daemon.returncode is None:
            daemon.kill()
        await daemon.wait()
    assert labels["severity"] == "critical"
