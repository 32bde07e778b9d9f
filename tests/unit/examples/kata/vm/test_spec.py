"""QEMU's command line."""

import re
from pathlib import Path

from examples.kata.guest import image
from examples.kata.vm import spec

_IMAGE = image.GuestImage(
    Path("/images/x"), "digest", "cloud", ("ext4",), opens_luks=True, kernel="6.1.0"
)


def _line(wanted: spec.MachineSpec) -> str:
    return " ".join(spec.command_line(wanted, Path("/vm"), "some-uuid", control_fd=5, agent_fd=6))


def test_command_line_disables_mitigations_only_when_emulated() -> None:
    emulated = _line(spec.MachineSpec("a", _IMAGE, "tcg"))
    accelerated = _line(spec.MachineSpec("a", _IMAGE, "kvm"))
    assert "accel=tcg -cpu qemu64,+rdrand" in emulated
    assert "mitigations=off" in emulated
    assert "psi=0" in emulated
    assert "accel=kvm -cpu host" in accelerated
    assert "mitigations" not in accelerated
    assert "psi=0" not in accelerated
    assert "-sandbox on" in emulated
    assert "some-uuid" in emulated


def test_agents_device_has_no_queues_that_nobody_uses() -> None:
    """QEMU's default is 31 ports: 64 queues that its main loop looks at for each request of a disk."""
    assert "virtio-serial-pci,max_ports=2 " in _line(spec.MachineSpec("a", _IMAGE))


def test_command_line_has_one_root_port_per_volume_slot() -> None:
    line = _line(spec.MachineSpec("a", _IMAGE, volume_slots=3))
    assert line.count("pcie-root-port") == 3


def test_root_ports_of_many_volumes_share_devices_of_root_bus() -> None:
    """The root bus has 32 devices of eight functions, and others are on it."""
    line = _line(spec.MachineSpec("a", _IMAGE, volume_slots=64))
    places = re.findall(r"pcie-root-port,[^ ]*addr=(0x[0-9a-f]+\.[0-7]),multifunction=on", line)
    assert len(set(places)) == 64
    assert {int(place.split(".")[0], 16) for place in places} == set(range(0x10, 0x18))


def test_virtiofs_share_gets_shared_memory() -> None:
    share = spec.Share("tag", Path("/host"), "virtiofs")
    assert "memory-backend-memfd" in _line(spec.MachineSpec("a", _IMAGE, shares=(share,)))
    share = spec.Share("tag", Path("/host"), "9p", read_only=True)
    line = _line(spec.MachineSpec("a", _IMAGE, shares=(share,)))
    assert "memory-backend" not in line
    assert "readonly=on" in line


def test_comma_in_the_path_of_a_share_begins_no_option() -> None:
    path = Path("/host,readonly=off\\,x")
    share = spec.Share("tag", path, "9p", read_only=True)
    line = _line(spec.MachineSpec("a", _IMAGE, shares=(share,)))
    assert "path=/host,,readonly=off\\,,x,security_model=none,readonly=on" in line
    share = spec.Share("tag", path, "virtiofs")
    options = r"source=/host\,readonly=off\\\,x,cache=auto,sandbox=chroot"
    assert spec.virtiofsd(share, 7) == [str(spec.VIRTIOFSD), "--fd=7", "-o", options, "-f"]
