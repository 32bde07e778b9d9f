"""A real Prometheus scrapes a central controller and a node: alerts about a cluster find series while all is well.

A counter that appears with its first fault has no increase, and its alert would miss that fault.
"""

import asyncio
from pathlib import Path

import pytest

from examples.cluster.etcd import PREFIX, Etcd
from tests.support.cluster.programs import READY_S, Started, until
from tests.support.pages import prometheus

pytestmark = pytest.mark.root

RULES = Path(__file__).parents[3] / "deploy" / "prometheus" / "crust-rules.yaml"
OF_BOTH = ("crust_store_connected", "crust_store_certificate", "crust_cluster_work_failures")
WORK = {
    "c1": {"cluster", "surveys", "answers"},  # of a leader
    "n1": {"agent", "announcement"},
}


def about(names: tuple[str, ...]) -> list[str]:
    """The expressions with these metrics, one for each."""
    found = [each for each in prometheus.compared(RULES) if any(name in each for name in names)]
    assert len(found) == len(names)
    return found


async def labels(address: str, expression: str, label: str) -> set[str]:
    data = await asyncio.to_thread(prometheus.ask, address, "query", query=expression)
    return {each["metric"].get(label, "") for each in data["result"]}


async def test_alerts_about_a_cluster_find_series_of_its_controller_and_of_its_nodes(
    etcd: Etcd, programs: Started, tmp_path: Path
) -> None:
    etcd.ctl("put", f"{PREFIX}placements/settled", "settled", user="controller")
    await programs.controller("c1")
    await programs.node("n1")
    for name, work in WORK.items():
        await programs.becomes(name, 200, "ok")
        directory = tmp_path / name
        directory.mkdir()
        async with prometheus.scraping(directory, programs.address(name), RULES) as address:
            await prometheus.scraped_often(address)
            for each in about(OF_BOTH):
                assert await labels(address, each, "job") == {"crust-node"}, each
            (failures,) = about(("crust_cluster_work_failures",))

            async def all_work_is_shown(query: str = failures, of: set[str] = work) -> bool:
                return await labels(address, query, "work") == of

            await asyncio.wait_for(until(all_work_is_shown), READY_S)
            (misplaced,) = about(("crust_survey_findings",))
            assert await labels(address, misplaced, "finding") == {"lacking", "in-two-pools"}
