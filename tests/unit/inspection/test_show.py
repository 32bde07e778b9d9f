"""`crust status`, `volumes`, `handlers`, `drivers`, `describe` on a running proxy."""

import json
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

import crust as crust_package
from crust.blockdriver.commands import pool_volumes
from crust.host import start_questions
from crust.host.process import hidden
from crust.inspection import show, views
from tests.support.co import NAMED
from tests.support.nodes.commands import crust, published
from tests.support.nodes.examined_node import DRIVER as ROW
from tests.support.nodes.examined_node import HEALTHY
from tests.support.nodes.fake_node import DRIVER, FakeNode
from tests.support.nodes.places import Places
from tests.support.runtimes.fake_handler import FakeHandler


async def test_node_that_is_ready_exits_0(node: FakeNode) -> None:
    result = await crust(node, "status", "-o", "json")
    status = json.loads(result.output)
    assert (result.exit_code, status["ready"], status["problems"]) == (0, True, [])
    assert [driver["state"] for driver in status["drivers"]] == ["ready"]


async def test_driver_that_is_starting_makes_status_exit_1(node: FakeNode) -> None:
    node.driver.ready = False
    result = await crust(node, "status", "-o", "name")
    assert (result.exit_code, result.output) == (1, f"driver {DRIVER}\n")
    table = await crust(node, "drivers")
    assert table.exit_code == 1
    assert "[DriverNotReady]" in table.output
    whole = await crust(node, "status")
    assert whole.output.count("answers Probe with ready = false") == 1, "a sentence is said once"
    status = json.loads((await crust(node, "status", "-o", "json")).output)
    (problem,), (driver,) = status["problems"], status["drivers"]
    assert problem["error_name"] == driver["error_name"] == "DriverNotReady"
    assert driver["message"] == f"[DriverNotReady] {problem['message']}"


async def test_status_without_handler_exits_1_with_advice(places: Places) -> None:
    async with FakeNode(places) as node:
        result = await crust(node, "status")
    assert result.exit_code == 1
    assert "HandlerNotRegistered" in result.output
    assert "start the runtime's daemon" in result.output


async def test_filters_admit_what_matches_alone(node: FakeNode) -> None:
    one, two = await published(node), await published(node, "vol-2", "pod-2")
    for words, names in (
        (("--target", one), ["vol-1"]),
        (("--pod", "pod-2"), ["vol-2"]),
        (("--state", "published", "--driver", DRIVER, "--handler", "kata"), ["vol-1", "vol-2"]),
        (("--state", "mounted"), []),
    ):
        result = await crust(node, "volumes", "-o", "name", *words)
        assert sorted(result.output.split()) == names
    assert two in (await crust(node, "volumes", "-o", "wide")).output


async def test_status_exits_1_for_handler_with_unseen_socket(
    places: Places,
) -> None:
    async with FakeNode(places) as node, node.handler():
        os.rename(places.handler, f"{places.handler}.elsewhere")
        for command in ("status", "status", "handlers"):  # the second one finds it as the proxy's
            shown = await crust(node, command)
            assert shown.exit_code == 1
            assert "did not answer" in shown.output
        assert shown.output.count("HandlerNotResponding") == 1
        os.rename(f"{places.handler}.elsewhere", places.handler)


async def test_status_names_what_a_handler_says_is_wrong(places: Places) -> None:
    fake = FakeHandler()
    async with FakeNode(places) as node, node.handler(fake):
        assert (await crust(node, "handlers")).exit_code == 0
        fake.wrong = ["[RunsWithoutVolume] container app of pod shop/db runs without its volume"]
        for command in ("status", "handlers"):
            shown = await crust(node, command, "-o", "json")
            assert shown.exit_code == 1
            assert "container app of pod shop/db" in shown.output
        (problem,) = json.loads((await crust(node, "status", "-o", "json")).output)["problems"]
        assert (problem["component"], problem["error_name"]) == (
            "handler kata",
            "RunsWithoutVolume",
        )


async def test_volume_is_found_by_pod_persistent_volume_target_and_id(node: FakeNode) -> None:
    pod = {"csi.storage.k8s.io/pod.namespace": "shop", "csi.storage.k8s.io/pod.name": "db-0"}
    target = f"{node.places.kubelet}/pods/uid-1/volumes/kubernetes.io~csi/pv-1/mount"
    os.makedirs(os.path.dirname(target))
    await node.co.publish("vol-1", target, volume_context={**NAMED, **pod})
    await published(node, "vol-2", "pod-2")
    assert "shop/db-0" in (await crust(node, "volumes")).output
    for words in (("--pod", "shop/db-0"), ("--pod", "db-0")):
        assert (await crust(node, "volumes", "-o", "name", *words)).output == "vol-1\n"
    for name in ("shop/db-0", "db-0", "uid-1", "pv-1", target, "vol-1"):
        assert "volume        vol-1" in (await crust(node, "describe", name)).output
    unknown = await crust(node, "describe", "vol-9")
    assert (unknown.exit_code, "[VolumeNotDeferred]" in unknown.output) == (1, True)
    pod["csi.storage.k8s.io/pod.namespace"] = "test"
    await node.co.publish("vol-3", f"{target}-3", volume_context={**NAMED, **pod})
    several = await crust(node, "describe", "db-0")
    assert (several.exit_code, "[PodAmbiguous]" in several.output) == (2, True)
    assert "shop/db-0, test/db-0" in several.output
    assert "vol-3" in (await crust(node, "describe", "test/db-0")).output


async def test_described_volume_has_sandbox_process_times_and_request(node: FakeNode) -> None:
    target = await published(node)
    (record,) = Path(node.places.run, "volumes").glob("*/mountInfo.json")
    request_id = json.loads(record.read_text())["crust"]["request_id"]
    with node.sandbox(target):
        result = await crust(node, "describe", "vol-1", "-o", "json")
        text = (await crust(node, "describe", target)).output
    (volume,) = json.loads(result.output)["volumes"]
    assert volume["claimed_by_pid"] == os.getpid()
    assert volume["published_at"]
    assert volume["request_id"] == request_id != ""
    comm = Path("/proc/self/comm").read_text().strip()
    for line in (
        f"target        {target}",
        f"held by       {comm}[{os.getpid()}]",
        f"request id    {request_id}",
    ):
        assert line in text
    assert request_id in (await crust(node, "volumes", "-o", "wide")).output
    assert request_id not in (await crust(node, "volumes")).output


async def test_status_warns_of_other_versions_and_node_stays_ready(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemons of this test run in this process: they are asked at each call."""
    (driver,) = json.loads((await crust(node, "drivers", "-o", "json")).output)["drivers"]
    assert driver["shim_version"] == crust_package.__version__
    before = await crust(node, "status", "-o", "json")
    assert (json.loads(before.output)["warnings"], before.exit_code) == ([], 0)
    monkeypatch.setattr("crust.rpc.serving.service.crust", mock.Mock(__version__="0.0.9"))
    monkeypatch.setattr("crust.proxy.inspect.crust", mock.Mock(__version__="0.0.8"))
    result = await crust(node, "status", "-o", "json")
    status = json.loads(result.output)
    assert (result.exit_code, status["ready"]) == (0, True)
    assert [warning["component"] for warning in status["warnings"]] == [
        "the proxy",
        f"the shim of driver {DRIVER}",
    ]
    table = (await crust(node, "status")).output
    assert "runs 0.0.9, installed is" in table
    assert "crust is ready" in table


async def test_status_warns_of_excepted_groups_and_node_stays_ready(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden, "_excepted", ())
    hidden.except_groups(["/system.slice/agent.service"])
    await start_questions.report((), node.value("proxy").health)
    result = await crust(node, "status", "-o", "json")
    status = json.loads(result.output)
    assert (result.exit_code, status["ready"], status["problems"]) == (0, True, [])
    (warning,) = status["warnings"]
    assert warning["error_name"] == "ControlGroupsExcepted"
    assert "/system.slice/agent.service" in warning["message"]


def test_further_pool_is_shown_by_name_and_its_state_counts() -> None:
    closed = views.Pool(0, 0, 0, 0, 0, name="fast", problem="[PoolAbsent] its disk is away")
    full = replace(closed, size_bytes=1000, allocated_bytes=1000, name="old", problem="")
    pool = views.Pool(1000, 500, 500, 500, 100, name="default", further=(closed, full))
    driver = replace(ROW, pool=pool)
    shown = [(row.name, row.pool.state) for row in views.pools_of((driver,))]
    assert shown == [
        (driver.name, "ready"),
        (f"{driver.name}/fast", "closed"),
        (f"{driver.name}/old", "full"),
    ]
    (problem,) = views.pool_problems((driver,), "full")
    assert problem.component == f"pool of driver {driver.name}/old"
    assert not pool_volumes.shown((driver,), []).healthy


def test_status_has_problems_of_drivers_process_once() -> None:
    hangs = views.Problem("operations of the driver", "OperationsHang", "2 do not end")
    pool = views.Pool(1000, 500, 500, 500, 100, (hangs,))
    apart = replace(HEALTHY, drivers=(replace(ROW, pool=pool),))
    assert show.of_node(apart).names == ("operations of the driver",)
    assert show.of_node(replace(apart, problems=(hangs,))).names == ("operations of the driver",)
