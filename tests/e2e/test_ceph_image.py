"""A guest's volume is an image of a real Ceph cluster, which QEMU opens itself; and it moves to another node."""

import asyncio
import base64
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from crust.blockdriver.ceph import claim_object, fencing
from examples.cluster.ceph_cluster import POOL
from examples.kata.runtime import messages
from examples.kata.runtime.client import RuntimeRefused
from tests.support.ceph.image_claims import as_admin
from tests.support.ceph.image_node import IMAGE, SIZE, ImageNode, Storage, image_node

pytestmark = pytest.mark.vm


@pytest.fixture
async def node(
    storage: Storage, guest_image: object, acceleration: object
) -> AsyncIterator[ImageNode]:
    async with image_node("node-a", storage) as made:
        yield made


def claims_of(storage: Storage) -> claim_object.Claims:
    with storage.ceph.ioctx(POOL, storage.namespace) as ioctx:
        return claim_object.read(ioctx, IMAGE).claims


def fence(storage: Storage, name: str) -> tuple[str, ...]:
    """What an operator does for a node that is gone."""
    with as_admin(storage.ceph, storage.namespace, IMAGE) as image:
        return fencing.fence(image, name, even_if_connected=True)


@pytest.mark.spec("H-47")
async def test_new_image_is_formatted_and_keeps_its_data(node: ImageNode, storage: Storage) -> None:
    target = await node.publish()
    assert await node.output("one", target, "echo kept > /data/f; sync; cat /data/f") == "kept"
    [holder] = claims_of(storage).holders
    assert (holder.node, holder.sandbox) == ("node-a", "one")
    assert holder.address
    await node.runtime.stop("one")
    assert claims_of(storage).holders == ()
    assert await node.output("two", target, "cat /data/f") == "kept"
    await node.runtime.stop("two")
    await node.node.co.unpublish(IMAGE, target)
    node.node.check_untouched(target)
    await node.node.co.unpublish(IMAGE, target)


@pytest.mark.spec("H-54")
async def test_key_of_image_appears_in_no_file_process_or_log(
    node: ImageNode, storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    target = await node.publish()
    await node.output("one", target, "true")
    pid = await node.qemu_pid("one")
    processes = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    for text in (
        Path(f"/proc/{pid}/cmdline").read_text(),
        Path(f"/proc/{pid}/environ").read_text(),
        repr(processes),
        caplog.text,
        repr([record.__dict__ for record in caplog.records]),
    ):
        assert storage.key not in text
    files = [file for file in Path(node.node.places.root).rglob("*") if file.is_file()]
    confs = [file for file in files if file.name.startswith("ceph-")]
    assert [conf.stat().st_mode & 0o777 for conf in confs] == [0o600]
    assert not [file for file in files if storage.key.encode() in file.read_bytes()]


@pytest.mark.spec("H-55")
async def test_wrong_key_stops_before_the_hypervisor(node: ImageNode, storage: Storage) -> None:
    raw = base64.b64decode(storage.key)
    wrong = base64.b64encode(raw[:-1] + bytes([raw[-1] ^ 1])).decode()
    good = storage.answer

    def answer(mount: object) -> None:
        good(mount)  # type: ignore[arg-type]
        mount.secrets["userKey"] = wrong  # type: ignore[attr-defined]

    node.node.driver.alter = answer
    target = await node.publish()
    with pytest.raises(RuntimeRefused, match="refuses client") as caught:
        await node.run("one", target, "true")
    assert wrong not in str(caught.value)
    assert claims_of(storage).holders == ()
    node.node.driver.alter = good
    await node.republish(target)  # the kubelet's republish brings the right one
    await node.output("one", target, "true")


@pytest.mark.spec("H-35", "D-51")
async def test_grown_image_grows_in_the_guest_alone(node: ImageNode, storage: Storage) -> None:
    target = await node.publish()
    before = int(await node.output("one", target, "df -Pk /data | tail -1 | awk '{print $2}'"))
    storage.grow(2 * SIZE)
    await node.node.co.expand(IMAGE, target, 2 * SIZE)
    after = int(await node.output("one", target, "df -Pk /data | tail -1 | awk '{print $2}'"))
    assert after > before * 1.8
    await node.node.co.expand(IMAGE, target, SIZE)
    assert storage.size() == 2 * SIZE


@pytest.mark.spec("H-53")
async def test_volume_moves_after_its_guest_was_fenced(node: ImageNode, storage: Storage) -> None:
    """Refused while A has it; what A had synced is there; what A writes when it runs again reaches nothing."""
    async with image_node("node-b", storage) as other:
        target_of_a, target_of_b = await node.publish(), await other.publish()
        await node.output("one", target_of_a, "echo synced > /data/f; sync")
        with pytest.raises(RuntimeRefused, match="sandbox one on node node-a"):
            await other.run("two", target_of_b, "true")
        wrote = asyncio.Event()
        loop = "while date >> /data/late && sync /data/late && echo wrote; do :; done"
        writing = asyncio.create_task(
            node.runtime.run(node.request("one", target_of_a, loop), lambda *_: wrote.set())
        )
        await wrote.wait()
        qemu = await node.qemu_pid("one")
        os.kill(qemu, signal.SIGSTOP)
        try:
            [address] = fence(storage, "node-a")
            assert address
            assert await other.output("two", target_of_b, "cat /data/f") == "synced"
            count = await other.output("two", target_of_b, "wc -l < /data/late")
            await other.output("two", target_of_b, "echo of B > /data/f; sync")
        finally:
            os.kill(qemu, signal.SIGCONT)
        ended = await writing  # its disk fails, and so does the loop
        assert ended.code != 0 or b"rror" in ended.stderr
        await other.runtime.stop("two")
        await node.runtime.stop("one")
        assert await other.output("three", target_of_b, "cat /data/f") == "of B"
        assert await other.output("three", target_of_b, "wc -l < /data/late") == count


@pytest.mark.spec("H-51")
async def test_image_of_a_killed_sandbox_is_free_later(node: ImageNode, storage: Storage) -> None:
    target = await node.publish()
    await node.output("one", target, "echo kept > /data/f; sync")
    killed = await node.qemu_pid("one")
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(RuntimeRefused, match="of sandbox one on node node-a ended without closing"):
        await node.run("two", target, "true")
    assert len(storage.free_ended()) == 1
    assert await node.output("two", target, "cat /data/f; echo more >> /data/f; sync") == "kept"
    [holder] = claims_of(storage).holders
    assert holder.sandbox == "two"


@pytest.mark.spec("H-52")
async def test_runtime_gives_back_what_ended_meanwhile(node: ImageNode, storage: Storage) -> None:
    target = await node.publish()
    await node.output("one", target, "echo kept > /data/f; sync")
    qemu = await node.qemu_pid("one")
    await node.end_runtime()
    os.kill(qemu, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, qemu, 0)
    assert [holder.sandbox for holder in claims_of(storage).holders] == ["one"]
    await node.start_runtime()
    async with asyncio.timeout(60):
        while (await asyncio.to_thread(claims_of, storage)).holders:
            """It is given back when the proxy is there, which has the key."""
    assert len(storage.free_ended()) == 1
    async with image_node("node-b", storage) as other:
        assert await other.output("two", await other.publish(), "cat /data/f") == "kept"


@pytest.mark.spec("H-55", "H-35")
@pytest.mark.parametrize("stopped", ["osd", "mon.a"])
async def test_cluster_that_stops_answering_stops_neither_runtime_nor_another_hypervisor(
    node: ImageNode, storage: Storage, stopped: str
) -> None:
    """A hot-plug and an expansion fail in time, and succeed afterwards; meanwhile runtime and QEMU answer."""
    target = await node.publish()
    await node.output("one", target, "echo kept > /data/f; sync")
    async with image_node("node-b", storage) as other:
        target_of_b = await other.publish()
        await other.runtime.run(_nothing("two"))
        storage.grow(2 * SIZE)
        with storage.ceph.daemons[stopped].frozen():
            plugging = asyncio.create_task(other.run("two", target_of_b, "true"))
            growing = asyncio.create_task(node.node.co.expand(IMAGE, target, 2 * SIZE))
            while not (plugging.done() and growing.done()):
                for on, sandbox in ((node, "one"), (other, "two")):
                    async with asyncio.timeout(60):
                        await on.runtime.run(_nothing(sandbox))
                await node.node.co.stats(IMAGE, target)
            failed = await asyncio.gather(plugging, growing, return_exceptions=True)
        assert isinstance(failed[0], RuntimeRefused), failed
        assert isinstance(failed[1], grpc.aio.AioRpcError), failed
        # or it goes on, and the retry joins it
        assert failed[1].code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED}
    await node.node.co.expand(IMAGE, target, 2 * SIZE)
    assert await node.output("one", target, "cat /data/f") == "kept"
    assert storage.size() == 2 * SIZE


def _nothing(sandbox: str) -> messages.Run:
    """A command that needs no volume; its answer goes through QEMU's main loop."""
    return messages.Run(sandbox=sandbox, argv=("true",), keep=True)


async def test_discard_reaches_an_image(node: ImageNode, storage: Storage) -> None:
    target = await node.publish(options=("discard",))
    await node.output("one", target, "dd if=/dev/zero of=/data/f bs=1M count=16 conv=fsync")
    used = await asyncio.to_thread(_used, storage)
    await node.output("one", target, "rm /data/f; sync /data; echo > /data/g; sync /data/g")
    await node.runtime.stop("one")
    assert await asyncio.to_thread(_used, storage) < used


async def test_synced_write_to_an_image_is_one_unscheduled_request(node: ImageNode) -> None:
    """QEMU flushes after each write, so the guest's kernel does not ask for it."""
    target = await node.publish()
    queue = "/sys/class/block/$(basename $(df /data | tail -1 | cut -d' ' -f1))/queue"
    seen = await node.output("one", target, f"cat {queue}/write_cache {queue}/scheduler")
    assert seen.splitlines()[0] == "write through"
    assert "[none]" in seen


@pytest.mark.spec("H-51")
async def test_readers_of_two_nodes_exclude_a_writer(node: ImageNode, storage: Storage) -> None:
    target = await node.publish()
    await node.output("one", target, "echo kept > /data/f; sync")
    async with image_node("node-b", storage) as other:
        target_of_b = await other.publish(readonly=True)
        with pytest.raises(RuntimeRefused, match="sandbox one on node node-a"):
            await other.run("ro", target_of_b, "true")
        await node.runtime.stop("one")
        await node.node.co.unpublish(IMAGE, target)
        here = await node.publish(readonly=True)
        for on, at in ((node, here), (other, target_of_b)):
            assert await on.output("ro", at, "cat /data/f") == "kept"
            assert (await on.run("ro", at, "echo x > /data/f")).code != 0
        assert {holder.node for holder in claims_of(storage).holders} == {"node-a", "node-b"}
        async with image_node("node-c", storage) as third:
            with pytest.raises(RuntimeRefused, match=r"sandbox ro on node node-[ab]"):
                await third.run("rw", await third.publish(), "echo x > /data/f")
        assert await node.output("ro", here, "cat /data/f") == "kept"


def _used(storage: Storage) -> int:
    """How many objects of data the image has."""
    with storage.ceph.ioctx(POOL, storage.namespace) as ioctx:
        return sum(1 for stored in ioctx.list_objects() if stored.key.startswith("rbd_data."))
