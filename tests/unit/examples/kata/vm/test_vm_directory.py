"""A VM's directory."""

import os
import socket
from pathlib import Path

import pytest

from examples.kata.vm import faults, vm_directory

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
