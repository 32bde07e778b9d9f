"""A real Prometheus scrapes a node: every expression of the alert rules and the dashboard finds series."""

import asyncio
import json
import logging
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.cli import monitoring
from tests.integration.chain.conftest import Chain
from tests.support import node as nodes
from tests.support.refusals import refused

pytestmark = [pytest.mark.root, pytest.mark.parametrize("chain", ["node"], indirect=True)]

DEPLOY = Path(__file__).parents[3] / "deploy"
CONFIG = """\
global: {{scrape_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: crust-node
    static_configs: [{{targets: ["{address}"]}}]
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


@asynccontextmanager
async def prometheus(directory: Path, scraped: str) -> AsyncIterator[str]:
    config, address = directory / "prometheus.yml", f"127.0.0.1:{free_port()}"
    rules = DEPLOY / "prometheus" / "crust-rules.yaml"
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


def ask(address: str, expression: str) -> list[Any]:
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{address}/api/v1/query?{query}", timeout=10) as answer:
        found: list[Any] = json.load(answer)["data"]["result"]
    return found


async def scraped_often(address: str) -> None:
    """A rate needs two samples. There is nothing to wait on but its answers."""
    async with asyncio.timeout(50):
        while True:
            try:
                found = await asyncio.to_thread(ask, address, "count_over_time(up[1m])")
            except OSError:  # it starts
                found = []
            if found and int(found[0]["value"][1]) >= 3:
                return
            await asyncio.sleep(0.2)


def of_rules() -> list[str]:
    """Without the comparison, and without the codes and states of a trouble that this node does not have."""
    text = (DEPLOY / "prometheus" / "crust-rules.yaml").read_text()
    found = re.findall(r"^ +expr: (.*?) (?:==|<|>) [\d.]+$", text, re.MULTILINE)
    assert len(found) == text.count("expr: ")
    return [re.sub(r',? ?(grpc_status_code|state)=~?"[^"]*"', "", each) for each in found]


def of_dashboard() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana" / "crust.json").read_text())
    found = [each["expr"] for panel in dashboard["panels"] for each in panel["targets"]]
    assert len(found) > 10
    return [each.replace("$driver", ".*").replace("$__rate_interval", "1m") for each in found]


async def test_expressions_of_rules_and_dashboard_find_series(
    chain: Chain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    volume_id = await chain.volume()
    publish: dict[str, Any] = {
        "timeout_s": 60,
        "staging_target_path": chain.staging(),
        "volume_context": nodes.NAMED,
    }
    target = chain.places.target("one")
    await chain.co.publish(volume_id, target, **publish)
    await refused(
        chain.co.publish("another", chain.places.target("two"), **publish),
        grpc.StatusCode.NOT_FOUND,
    )
    with monitoring.serving("127.0.0.1:0"):
        (line,) = [vars(each) for each in caplog.records if each.msg == "metrics"]
        async with prometheus(tmp_path, line["address"]) as address:
            await scraped_often(address)
            empty = [
                each
                for each in (*of_rules(), *of_dashboard())
                if not await asyncio.to_thread(ask, address, each)
            ]
    assert empty == []
    await chain.co.unpublish(volume_id, target, timeout_s=60)
