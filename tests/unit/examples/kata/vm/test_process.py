"""A VM's process, directory and command line, without a VM."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from examples.kata.guest import image
from examples.kata.vm import accel, block_nodes, console, faults, process, spec, vm_directory

_IMAGE = image.GuestImage(Path("/images/x"), "digest", "cloud", ("ext4",), opens_luks=True)


def _fifo(directory: Path) -> Path:
    os.mkfifo(directory / "stderr")
    return directory / "stderr"


async def test_a_started_process_is_waited_for_and_reaped(tmp_path: Path) -> None:
    running = process.Process(process.spawn(["/bin/sleep", "1000"], [], _fifo(tmp_path)))
    assert running.runs()
    assert os.getsid(running.pid) == running.pid
    waits = [asyncio.create_task(running.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    running.kill(signal.SIGTERM)
    await asyncio.gather(*waits)
    assert not running.runs()
    running.kill()
    assert not Path(f"/proc/{running.pid}").exists()
    running.close()
    running.close()


async def test_only_the_descriptors_that_are_passed_are_inherited(tmp_path: Path) -> None:
    kept, secret = socket.socketpair()
    with kept, secret:
        script = "ls -l /proc/self/fd > $0"
        argv = ["/bin/sh", "-c", script, str(tmp_path / "listing")]
        running = process.Process(process.spawn(argv, [kept.fileno()], _fifo(tmp_path)))
        await running.wait()
        running.close()
        names = [os.readlink(f"/proc/self/fd/{s.fileno()}") for s in (kept, secret)]
    listing = (tmp_path / "listing").read_text()
    assert names[0] in listing
    assert names[1] not in listing


def test_find_ignores_a_reused_pid(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    assert process.find(pid_file, "uuid") is None
    argv = [sys.executable, "-c", "print(flush=True); input()", "uuid-1"]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        pid_file.write_text(f"{child.pid}\n")
        vm_process = process.find(pid_file, "uuid-1")
        assert vm_process is not None
        vm_process.close()
        assert process.find(pid_file, "uuid-2") is None
        assert process.find(pid_file, "uuid") is None
    finally:
        child.communicate(b"\n")
    assert process.find(pid_file, "uuid-1") is None
    pid_file.write_text("")
    assert process.find(pid_file, "uuid-1") is None


_IDENTITY = vm_directory.Identity("name", "uuid", "tcg", 2)


def test_prepare_makes_private_directory_with_one_owner(tmp_path: Path) -> None:
    directory = tmp_path / "vm"
    lock = vm_directory.prepare(directory, _IDENTITY)
    assert directory.stat().st_mode & 0o777 == 0o700
    with pytest.raises(faults.VmAlreadyControlled):
        vm_directory.prepare(directory, _IDENTITY)
    with pytest.raises(faults.VmAlreadyControlled):
        vm_directory.reopen(directory)
    os.close(lock)
    identity, lock = vm_directory.reopen(directory)
    assert identity == _IDENTITY
    os.close(lock)
    os.close(vm_directory.prepare(directory, _IDENTITY))


def test_sockets_accept_connections_before_qemu_starts(tmp_path: Path) -> None:
    os.close(vm_directory.prepare(tmp_path / "vm", _IDENTITY))
    listeners = vm_directory.listen(tmp_path / "vm")
    for name, listener in listeners.items():
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "vm" / name))
        listener.close()
        assert (tmp_path / "vm" / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "{", '{"name": 1}', "[]"])
def test_a_directory_whose_record_is_damaged_is_refused(tmp_path: Path, text: str) -> None:
    directory = tmp_path / "vm"
    os.close(vm_directory.prepare(directory, _IDENTITY))
    (directory / "machine.json").write_text(text)
    with pytest.raises(faults.InvalidVmDirectory, match=r"machine\.json"):
        vm_directory.reopen(directory)


async def test_console_keeps_only_the_last_output(tmp_path: Path) -> None:
    console.prepare(tmp_path)
    watched = console.Console(tmp_path)
    line = b"x" * 1023 + b"\n"
    with (tmp_path / "console.out").open("wb", buffering=0) as guest:
        for _ in range(2 * console.TAIL // len(line)):
            guest.write(line)
            watched.text()
        guest.write(b"the end \x1b[31m\n")
    assert len(watched.text()) == console.TAIL
    assert watched.tail().endswith("the end  [31m")
    watched.close()
    watched.close()


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


def test_node_names_fit_what_qemu_allows() -> None:
    assert len(block_nodes.name_of("x" * 20)) <= 31


def test_probe_result_is_cached_per_image(tmp_path: Path) -> None:
    path = tmp_path / "accelerator.json"
    assert accel._recall(path) is None
    known = accel.Accelerator("tcg", "no KVM")
    accel._remember(path, known)
    assert accel._recall(path) == known
    path.write_text("{}")
    assert accel._recall(path) is None
