"""What /readyz of controllers and of nodes says while etcd is away, is new, or takes no certificate of theirs."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from crust.cluster.etcd.client.certificates import Files
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from examples.cluster import etcd as members
from examples.cluster.authority import DAY, Authority, Pair
from examples.cluster.etcd import PREFIX, Etcd
from tests.support.cluster.programs import READY_S, Started, until
from tests.support.faults.refusals import refused


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    """A member for one test."""
    with members.running(tmp_path, nodes=("n1", "n2")) as etcd:
        yield etcd


def in_use(etcd: Etcd) -> None:
    """Mark the store as one in which nodes have announced themselves."""
    etcd.ctl("put", f"{PREFIX}placements/settled", "settled", user="controller")


async def test_leader_and_standby_are_ready_only_while_etcd_can_be_used(
    etcd: Etcd, programs: Started
) -> None:
    await programs.controller("c1")
    await programs.becomes("c1", 503, "[StoreIsNew]")
    in_use(etcd)
    await programs.becomes("c1", 200, "ok")
    await programs.controller("c2")  # it waits, as all replicas of a Deployment but one
    await programs.becomes("c2", 200, "ok")
    etcd.stop()
    for each in ("c1", "c2"):
        await programs.becomes(each, 503, "nobody listens there")
        assert await programs.answer(each, "/healthz") == (200, "ok\n")
    etcd.start()
    await asyncio.to_thread(etcd.wait_ready)
    for each in ("c1", "c2"):
        await programs.becomes(each, 200, "ok")


async def test_controller_without_a_usable_certificate_is_not_ready_until_it_has_one(
    etcd: Etcd, programs: Started, tmp_path: Path
) -> None:
    in_use(etcd)
    (tmp_path / "own").mkdir()
    own = Authority(tmp_path / "own").files("controller")
    Path(own.ca).write_bytes(etcd.authority.ca.read_bytes())
    write(own, etcd.authority.issue("controller", begins=-2 * DAY, ends=-DAY))
    key = Path(own.key).read_bytes()
    Path(own.key).unlink()
    await programs.controller("c1", own)
    await programs.becomes("c1", 503, own.key)
    Path(own.key).write_bytes(key)
    await programs.becomes("c1", 503, "the certificate expired")
    assert "[StoreCertificateRefused]" in (await programs.answer("c1"))[1]
    assert await programs.answer("c1", "/healthz") == (200, "ok\n")
    write(own, etcd.authority.issue("controller"))
    await programs.becomes("c1", 200, "ok")


def write(files: Files, pair: Pair) -> None:
    Path(files.cert).write_bytes(pair.cert)
    Path(files.key).write_bytes(pair.key)


@pytest.mark.root
async def test_node_is_ready_while_etcd_is_away_because_the_kubelets_calls_need_it_not(
    etcd: Etcd, programs: Started
) -> None:
    await programs.node("n1")
    await programs.becomes("n1", 200, "ok")
    etcd.stop()

    async def notices() -> bool:
        return "crust_store_connected 0" in (await programs.answer("n1", "/metrics"))[1]

    await asyncio.wait_for(until(notices), READY_S)
    assert await programs.answer("n1") == (200, "ok\n")
    assert await programs.answer("n1", "/healthz") == (200, "ok\n")


def own_files(etcd: Etcd, directory: Path, user: str) -> Files:
    """Files of a program's own, with the certificate of a user, to be replaced."""
    directory.mkdir()
    own = Authority(directory).files("own")
    Path(own.ca).write_bytes(etcd.authority.ca.read_bytes())
    write(own, etcd.authority.issue(user))
    return own


async def test_controller_with_a_nodes_certificate_serves_nobody_until_it_has_its_own(
    etcd: Etcd, programs: Started, tmp_path: Path
) -> None:
    in_use(etcd)
    before = etcd.keys()
    own = own_files(etcd, tmp_path / "own", "n1")
    await programs.controller("c1", own)
    await programs.becomes("c1", 503, "[StoreAccessDenied]")
    assert "user may not do this: n1" in (await programs.answer("c1"))[1]
    async with channel.connect(f"{programs.base}/c1/csi.sock") as connected:
        stub = csi_pb2_grpc.ControllerStub(connected)
        volume = csi_pb2.CreateVolumeRequest(name="pvc")
        await refused(
            stub.CreateVolume(volume, timeout=READY_S),
            grpc.StatusCode.UNAVAILABLE,
            "StoreAccessDenied",
        )
        identity = csi_pb2_grpc.IdentityStub(connected)
        assert not (await identity.Probe(csi_pb2.ProbeRequest(), timeout=READY_S)).ready.value
    assert etcd.keys() == before
    write(own, etcd.authority.issue("controller"))
    await programs.becomes("c1", 200, "ok")


@pytest.mark.root
async def test_node_with_another_nodes_certificate_is_not_announced_and_serves_its_kubelet(
    etcd: Etcd, programs: Started, tmp_path: Path
) -> None:
    own = own_files(etcd, tmp_path / "own", "n2")
    await programs.node("n1", own)
    log = programs.base / "n1" / "log"

    async def is_said() -> bool:
        text = log.read_text()
        return "StoreAccessDenied" in text and "user may not do this: n2" in text

    await asyncio.wait_for(until(is_said), READY_S)
    assert await programs.answer("n1") == (200, "ok\n")
    assert "crust_store_connected 0" in (await programs.answer("n1", "/metrics"))[1]
    assert etcd.keys() == []
    write(own, etcd.authority.issue("n1"))

    async def is_announced() -> bool:
        found = etcd.keys()
        return f"{PREFIX}nodes/n1/announce" in found

    await asyncio.wait_for(until(is_announced), READY_S)
