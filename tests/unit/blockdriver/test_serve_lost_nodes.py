"""Nodes that are declared gone are fenced, by a controller that can ask Kubernetes."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from crust.blockdriver.ceph.binding import CephMonitorsUnreachable
from crust.blockdriver.serve import keep_fencing
from crust.cli.main import main
from crust.core import metrics, volumes
from crust.core.supervised import Health, supervised
from crust.kubernetes_api.api import KubernetesApiUnavailable

VOLUMES = (volumes.VolumeId("one"), volumes.VolumeId("two"))


@dataclass
class Cluster:
    """Kubernetes and the storage: which nodes are gone, which of them are connected, and who answers."""

    gone: set[str] = field(default_factory=set)
    connected: set[str] = field(default_factory=set)
    api_is_away: bool = False
    storage_is_away: bool = False
    has_a_bug: bool = False
    health: Health = field(default_factory=Health)
    asked: list[tuple[tuple[volumes.VolumeId, ...], frozenset[str]]] = field(default_factory=list)

    async def ids(self) -> frozenset[str]:
        if self.has_a_bug:
            raise RuntimeError("nobody foresaw this")
        if self.api_is_away:
            raise KubernetesApiUnavailable("the nodes", "it is away")
        return frozenset(self.gone)

    def fence(
        self, volume_ids: Iterable[volumes.VolumeId], nodes: frozenset[str]
    ) -> frozenset[str]:
        if self.storage_is_away:
            raise CephMonitorsUnreachable("the test")
        self.asked.append((tuple(volume_ids), nodes))
        return nodes & self.connected


def waiting() -> float:
    return value("crust_nodes_waiting_for_fencing")


def value(name: str) -> float:
    """Of a metric without labels."""
    families = [family for part in metrics.FENCING for family in part.collect()]
    samples = [sample for family in families for sample in family.samples]
    (number,) = [sample.value for sample in samples if sample.name == name]
    return number


async def eventually(check: Callable[[], bool]) -> None:
    """Wait until `check` is true, which nothing tells; the test's own time limit ends it."""
    while not check():  # noqa: ASYNC110 - a metric tells nobody that it changed
        await asyncio.sleep(0.01)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """One whose lost nodes are fenced all the time."""
    made = Cluster()
    work = partial(keep_fencing, made.fence, made.ids, lambda: VOLUMES, period_s=0.001)
    metrics.nodes_waiting_for_fencing.set(0)
    async with supervised("fencing of lost nodes", work, made.health):
        yield made


async def test_node_that_is_connected_waits_until_it_is_cut_off(cluster: Cluster) -> None:
    cluster.connected = {"n1"}
    cluster.gone = {"n1", "n2"}
    await eventually(lambda: waiting() == 1)
    assert cluster.asked[-1] == (VOLUMES, frozenset({"n1", "n2"}))
    cluster.connected = set()
    await eventually(lambda: waiting() == 0)


async def test_node_no_longer_declared_gone_waits_no_longer(cluster: Cluster) -> None:
    cluster.connected = cluster.gone = {"n1"}
    await eventually(lambda: waiting() == 1)
    cluster.gone = set()
    await eventually(lambda: waiting() == 0)


@pytest.mark.parametrize("fault", ["api_is_away", "storage_is_away", "has_a_bug"])
async def test_look_that_fails_is_counted_and_repeated(cluster: Cluster, fault: str) -> None:
    cluster.connected = cluster.gone = {"n1"}
    await eventually(lambda: waiting() == 1)
    before = value("crust_fencing_failures_total")
    setattr(cluster, fault, True)
    await eventually(lambda: value("crust_fencing_failures_total") >= before + 2)
    if fault == "has_a_bug":
        await eventually(lambda: bool(cluster.health.problems))
    assert waiting() == 1
    setattr(cluster, fault, False)
    cluster.connected = set()
    await eventually(lambda: waiting() == 0)


def config(base: Path) -> Path:
    """The settings of a controller whose cluster is away: it serves, and waits for the pool."""
    key_file = base / "ceph.key"
    key_file.write_text("AQBSV9xlAAAAABAAPJzE2tN2k7b1S5bNn3u1gA==\n")
    key_file.chmod(0o600)
    path = base / "driver.toml"
    path.write_text(
        f"""
socket = "{base}/csi.sock"
run_dir = "{base}/run"
node_id = "controller"
engine = "rbd"
mode = "controller"

[rbd]
monitors = "[v2:127.0.0.1:1,v1:127.0.0.1:2]"
pool = "kubernetes"
user = "crust"
key_file = "{key_file}"

[kubernetes]
kubeconfig = "{base}/kubeconfig"
"""
    )
    return path


def output_of_a_failed_start(base: Path) -> str:
    ran = CliRunner().invoke(main, ["driver", f"--config={config(base)}"])
    assert ran.exit_code == 2, ran.output
    assert "driver serves" not in ran.output
    assert "Traceback" not in ran.output
    return ran.output


@pytest.mark.parametrize(
    ("content", "why"), [(None, "kubeconfig not found"), ("[]", "not the form of a kubeconfig")]
)
@pytest.mark.usefixtures("logging_restored")
def test_controller_with_an_unusable_kubeconfig_is_refused_before_it_serves(
    tmp_path: Path, content: str | None, why: str
) -> None:
    if content is not None:
        (tmp_path / "kubeconfig").write_text(content)
    output = output_of_a_failed_start(tmp_path)
    assert "UnusableKubeconfig" in output
    assert f"{tmp_path}/kubeconfig" in output
    assert why in output
    assert "correct kubernetes.kubeconfig" in output


@pytest.mark.usefixtures("logging_restored")
def test_controller_without_the_kubernetes_client_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightkube", None)
    output = output_of_a_failed_start(tmp_path)
    assert "UnusableKubeconfig" in output
    assert "install the wheel of crust with its extra kubernetes" in output
