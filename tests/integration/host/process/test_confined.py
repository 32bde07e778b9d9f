"""What a confined program sees and may do, reported by a program that tries."""

import asyncio
import os
from pathlib import Path

import pytest

from crust.host.process import commands, confined

pytestmark = pytest.mark.root

LIMITS = confined.Limits(memory_bytes=512 * 1024**2, cpu_s=10)


def run(program: tuple[str, ...], device: Path) -> commands.Completed:
    return asyncio.run(
        confined.run_confined(program, device=str(device), limits=LIMITS, timeout_s=60)
    )


def tried(script: str, device: Path) -> str:
    """What a confined shell prints of `script`, which may use its built-ins alone: it cannot fork."""
    done = run(("sh", "-c", script), device)
    return done.stdout.decode() + done.stderr_tail


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A file in the place of the device: bwrap binds whatever is there."""
    path = tmp_path / "device"
    path.write_bytes(b"content of the volume\n")
    return path


def test_confined_program_reads_and_writes_its_device(device: Path) -> None:
    text = tried(f"read line < {confined.DEVICE}; echo $line; echo new > {confined.DEVICE}", device)
    assert text == "content of the volume\n"
    assert device.read_text() == "new\n"


def test_confined_program_sees_no_other_file_and_writes_none(device: Path) -> None:
    text = tried("echo /* /dev/* /etc/*; echo x > /usr/x", device)
    assert "/bin /dev /etc /lib /lib64 /sbin /usr /dev/null /dev/volume /etc/mtab" in text
    assert "Read-only file system" in text


def test_confined_program_cannot_start_another(device: Path) -> None:
    assert "Cannot fork" in tried("/usr/bin/true | :", device)


def test_confined_program_has_no_capability(device: Path) -> None:
    """With CAP_DAC_OVERRIDE it could read what belongs to another user."""
    os.chown(device, 65534, 65534)
    device.chmod(0o600)
    assert "Permission denied" in tried(f"read line < {confined.DEVICE}", device)


def test_confined_program_that_takes_too_much_memory_fails_alone(device: Path) -> None:
    done = run(("/usr/bin/python3", "-I", "-S", "-c", "bytearray(1 << 30)"), device)
    assert done.code == 1
    assert "MemoryError" in done.stderr_tail


def test_program_that_cannot_start_is_error_and_no_exit_code(device: Path) -> None:
    """bwrap exits with 1, and 1 of e2fsck is "corrected"."""
    with pytest.raises(confined.CannotConfine, match="no-such-tool"):
        run(("no-such-tool",), device)


def test_missing_device_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(confined.CannotConfine, match="No such file"):
        tried("echo", tmp_path / "absent")
