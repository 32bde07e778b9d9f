"""A read-only volume cannot be written, however it was made read-only (C-168, C-223, C-237 to C-239)."""

from pathlib import Path

from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.volume_capabilities import Mode
from crust.wire.csi.v1 import csi_pb2

_DATA = b"what a database has written"


def test_c223_read_only_is_enforced(co: Co) -> None:
    for capability in co.kinds:
        volume = co.volume(capability)
        target = co.use(volume, capability)
        co.host.write(_file_or_device(target), _DATA)
        co.unpublish(volume.volume_id, target)
        target = co.publish(volume, capability, readonly=True)
        _check_reader(co, target)
        co.unpublish(volume.volume_id, target)
        assert co.can_write(_file_or_device(co.publish(volume, capability)))


def test_c237_a_reader_mode_is_enforced(co: Co) -> None:
    for capability in co.kinds:
        reader = csi_pb2.VolumeCapability()
        reader.CopyFrom(capability)
        reader.access_mode.mode = Mode.SINGLE_NODE_READER_ONLY
        volume = _written(co, capability, reader)
        _check_reader(co, co.use(volume, reader))


def test_c238_a_read_only_flag_is_enforced(co: Co) -> None:
    reader = csi_pb2.VolumeCapability()
    reader.CopyFrom(co.mount)
    reader.mount.mount_flags.append("ro")
    volume = _written(co, co.mount, reader)
    _check_reader(co, co.use(volume, reader))


def test_c168_attached_read_only_is_read_only(co: Co) -> None:
    for capability in co.kinds:
        volume = _written(co, capability)
        co.attach(volume, capability, readonly=True)
        co.stage_attached(volume, capability)
        _check_reader(co, co.publish(volume, capability))


def _written(co: Co, *capabilities: csi_pb2.VolumeCapability) -> csi_pb2.Volume:
    """A volume for all of `capabilities`, written under the first, and not in use."""
    volume = co.volume_for(*capabilities)
    target = co.use(volume, capabilities[0])
    co.host.write(_file_or_device(target), _DATA)
    co.release(volume, target)
    return volume


def _check_reader(co: Co, target: Path) -> None:
    assert not co.can_write(_file_or_device(target)), "a read-only volume was written"
    assert co.host.read(_file_or_device(target), len(_DATA)) == _DATA


def _file_or_device(target: Path) -> Path:
    """Where to write: the device, or a file of the filesystem."""
    return target / "file" if target.is_dir() else target
