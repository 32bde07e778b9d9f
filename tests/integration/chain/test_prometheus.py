"""A real Prometheus scrapes a node: every expression of the alert rules and the dashboard finds series."""

import asyncio
import json
import logging
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.cli.programs import monitoring
from crust.core import volumes
from crust.runtime_handler.blocking import State, claim_volume
from tests.support.faults.refusals import refused
from tests.support.nodes.served_node import BlockNode

pytestmark = [pytest.mark.root, pytest.mark.parametrize("chain", ["node"], indirect=True)]

DEPLOY = Path(__file__).parents[3] / "deploy"
RULES = DEPLOY / "helm" / "crust" / "files" / "crust-rules.yaml"


OF_CONTROLLERS = ("crust_nodes_waiting_for_fencing", "crust_fencing_failures_total")
"""A node has none: tests/integration/ceph/claims/test_ended_clients.py."""
WITHOUT_PANEL = (
    "crust_snapshots", "crust_worker_threads", "crust_worker_calls_waiting", "crust_background_failures_total",
    "crust_pool_open", "crust_build_info", "crust_calls_unseen_total",
)  # fmt: skip


CONFIG = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: pods
    static_configs: [{{targets: ["{address}"]}}]
"""


def compared(rules: Path) -> list[str]:
    """The expressions of the alerts in a file, without what each is compared with: they find series in health too."""
    text = rules.read_text()
    exprs = re.findall(r"^ +expr: (.*?) (?:==|<|>) (?:[\d.]+|ignoring.*)$", text, re.MULTILINE)
    assert len(exprs) == text.count("expr: ")
    return exprs


def free_port() -> int:
    """A port of the loopback that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


@asynccontextmanager
async def scraping(directory: Path, scraped: str, rules: Path) -> AsyncIterator[str]:
    """The URL of a Prometheus that keeps its files in `directory`, while the block runs."""
    config, address = directory / "prometheus.yml", f"127.0.0.1:{free_port()}"
    config.write_text(CONFIG.format(rules=rules, address=scraped))
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address={address}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        await process.wait()


def ask(address: str, path: str, **query: object) -> Any:
    """The data of an answer of the API, e.g. `ask(address, "query", query="up")`. Raises OSError while it starts."""
    asked = urllib.parse.urlencode(query)
    with urllib.request.urlopen(f"{address}/api/v1/{path}?{asked}", timeout=10) as answer:
        return json.load(answer)["data"]


async def scraped_often(address: str, times: int = 3) -> None:
    """A rate needs two samples. There is nothing to wait on but its answers."""
    async with asyncio.timeout(60):
        while True:
            try:
                answer = await asyncio.to_thread(
                    ask, address, "query", query="count_over_time(up[1m])"
                )
            except OSError:  # it starts
                answer = {"result": []}
            if answer["result"] and int(answer["result"][0]["value"][1]) >= times:
                return
            await asyncio.sleep(0.2)


async def fires(address: str, alert: str) -> dict[str, str]:
    """The labels of the alert, as soon as it fires."""
    async with asyncio.timeout(60):
        while True:
            with suppress(OSError):  # it starts
                for found in (await asyncio.to_thread(ask, address, "alerts"))["alerts"]:
                    if found["state"] == "firing" and found["labels"]["alertname"] == alert:
                        labels: dict[str, str] = found["labels"]
                        return labels
            await asyncio.sleep(0.2)


def found_by(address: str, expression: str) -> list[Any]:
    series: list[Any] = ask(address, "query", query=expression)["result"]
    return series


def of_rules() -> list[str]:
    """Without the comparison, and without the codes and states of a trouble that this node does not have."""
    exprs = [expr for expr in compared(RULES) if not any(name in expr for name in OF_CONTROLLERS)]
    return [re.sub(r',? ?(grpc_status_code|state)=~?"[^"]*"', "", expr) for expr in exprs]


def of_dashboard() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana" / "crust.json").read_text())
    exprs = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(exprs) > 10
    variables = {"$driver": ".*", "$job": ".+", "$__rate_interval": "1m"}
    for name, value in variables.items():
        exprs = [expr.replace(name, value) for expr in exprs]
    return exprs


async def test_expressions_of_rules_and_dashboard_find_series(
    chain: BlockNode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await chain.published_volume()
    another = chain.publish("another", chain.places.target("two"))
    await refused(another, grpc.StatusCode.NOT_FOUND)
    with monitoring.serving("127.0.0.1:0"):
        (line,) = [vars(record) for record in caplog.records if record.msg == "metrics"]
        async with scraping(tmp_path, line["address"], RULES) as address:
            await scraped_often(address)
            empty = [
                expr
                for expr in (*of_rules(), *of_dashboard(), *WITHOUT_PANEL)
                if not (await asyncio.to_thread(found_by, address, expr))
            ]
    assert empty == []


async def test_unpublish_that_a_sandbox_refuses_fires_its_alert(
    chain: BlockNode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rule's own time is promtool's to test: half an hour is a second here."""
    caplog.set_level(logging.INFO)
    rules = tmp_path / "rules.yaml"
    rules.write_text(re.sub(r"for: \d+m", "for: 1s", RULES.read_text()))
    volume_id, target = await chain.published_volume()
    names = volumes.TargetPath(target), volumes.SandboxId("s"), volumes.HandlerName("kata")
    with monitoring.serving("127.0.0.1:0"):
        (line,) = [vars(record) for record in caplog.records if record.msg == "metrics"]
        async with scraping(tmp_path, line["address"], rules) as address:
            claim = claim_volume(
                str(chain.places.volumes), *names, features=[*volumes.HandlerFeature]
            )
            with claim as held:
                held.report(State.MOUNTED)
                for _ in range(2):
                    await refused(
                        chain.unpublish(volume_id, target), grpc.StatusCode.FAILED_PRECONDITION
                    )
                labels = await fires(address, "CrustUnpublishRefused")
    assert (labels["severity"], labels["error"]) == ("critical", "UnpublishRefused")
