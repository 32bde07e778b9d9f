"""A driver that is killed between any two calls, and during them (C-701 to C-703)."""

import subprocess

from crust.conformance import copies
from crust.conformance.case import CREATE, NODE, SNAPSHOT, case
from crust.conformance.co import Co
from crust.wire.csi.v1 import csi_pb2

_RESTART = "option.restart-command"
_DATA = b"written before the crash"


@case(701, CREATE, NODE, _RESTART)
def test_a_crash_between_any_two_calls_is_not_noticed(co: Co) -> None:
    """A lifecycle with a restart after every call goes on as without: everything is remembered, nothing is
    lost.
    """
    request = co.create_request()
    volume = co.create(request)
    _restart(co)
    assert co.finally_(co.controller.CreateVolume, request).volume == volume
    co.stage(volume)
    _restart(co)
    target = co.publish(volume)
    co.sight.write(target / "file", _DATA)
    _restart(co)
    assert co.sight.read(target / "file", 99) == _DATA
    co.finally_(co.node.NodePublishVolume, co.publish_request(volume, target))
    assert co.sight.mounts_at(target) == 1
    co.unpublish(volume.volume_id, target)
    assert not co.sight.mounts_at(target)
    _restart(co)
    co.unpublish(volume.volume_id, target)
    co.unstage(volume)
    _restart(co)
    co.unstage(volume)
    co.detach(volume.volume_id)
    _restart(co)
    assert co.sight.read(co.use(volume) / "file", 99) == _DATA


@case(702, CREATE, NODE, _RESTART)
def test_a_crash_during_a_call_is_mended_by_the_retry(co: Co) -> None:
    """A driver that is killed while it creates, stages and publishes ends where the retries lead, once."""
    requests = [co.create_request() for _ in range(4)]
    futures = [co.controller.CreateVolume.future(each, timeout=10) for each in requests]
    _restart(co)
    for future in futures:
        future.cancel()
    volumes = [co.made(co.finally_(co.controller.CreateVolume, each).volume) for each in requests]
    assert len({each.volume_id for each in volumes}) == len(requests)
    volume = volumes[0]
    co.attach(volume)
    target = co.target()
    co.undo(lambda: co.unstage(volume))
    if "node.STAGE_UNSTAGE_VOLUME" in co.has:
        staging = co.node.NodeStageVolume.future(co.stage_request(volume), timeout=10)
        _restart(co)
        staging.cancel()
    co.stage(volume)
    co.will_unpublish(volume.volume_id, target)
    publish = co.publish_request(volume, target)
    publishing = co.node.NodePublishVolume.future(publish, timeout=10)
    _restart(co)
    publishing.cancel()
    co.finally_(co.node.NodePublishVolume, publish)
    assert co.sight.mounts_at(target) == 1
    co.sight.write(target / "file", _DATA)


@case(703, CREATE, SNAPSHOT, NODE, _RESTART)
def test_a_crash_during_a_snapshot_leaves_the_volume_usable(co: Co) -> None:
    """A driver that is killed while it takes a snapshot leaves no frozen filesystem; the retry is a whole
    snapshot.
    """
    volume = co.volume()
    target = co.use(volume)
    co.sight.write(target / "file", _DATA)
    request = copies.snapshot_request(co, volume.volume_id)
    taking = co.controller.CreateSnapshot.future(request, timeout=10)
    _restart(co)
    taking.cancel()
    co.finally_(co.identity.Probe, csi_pb2.ProbeRequest())
    co.sight.write(target / "other", _DATA)
    made = copies.take(co, request)
    restored = co.volume(source=copies.of_snapshot(made.snapshot_id))
    assert co.sight.read(co.use(restored) / "file", 99) == _DATA


def _restart(co: Co) -> None:
    """The operator's command kills the driver and starts it again; the socket answers when Probe does."""
    subprocess.run(
        ["/bin/sh", "-c", co.options.restart_command],
        check=True,
        timeout=co.options.timeout_s,
        capture_output=True,
    )
    co.finally_(co.identity.Probe, csi_pb2.ProbeRequest())
