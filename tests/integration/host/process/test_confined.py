"""What a confined program sees and may do, reported by a program that tries."""

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from crust.host.process import commands, confined

pytestmark = pytest.mark.root

LIMITS = confined.Limits(memory_bytes=512 * 1024**2, cpu_s=10)
NAMESPACES = ("ipc", "mnt", "net", "pid", "user", "uts")


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


def reader_of(pipe: Path) -> int:
    """The one other process that has the pipe open."""
    pipe_id, found = pipe.stat(), set[int]()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # a process that ends is none
            if os.path.samestat(descriptor.stat(), pipe_id):
                found.add(int(descriptor.parts[2]))
    (pid,) = found - {os.getpid()}
    return pid


def test_confined_program_shares_no_namespace_but_its_users(tmp_path: Path) -> None:
    """It is looked at while it waits for a line of its device, a pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    seen: dict[str, str] = {}

    def look() -> None:
        with pipe.open("w", encoding="ascii") as opened:  # it waits for the program's own open
            pid = reader_of(pipe)
            for name in NAMESPACES:
                seen[name] = os.readlink(f"/proc/{pid}/ns/{name}")
            opened.write("read\n")

    async def main() -> commands.Completed:
        looking = asyncio.create_task(asyncio.to_thread(look))
        script = f"read line < {confined.DEVICE}; echo $line"
        done = await confined.run_confined(
            ("sh", "-c", script), device=str(pipe), limits=LIMITS, timeout_s=60
        )
        await looking
        return done

    assert asyncio.run(main()).stdout == b"read\n"
    own = {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
    assert {name for name in NAMESPACES if own[name] == seen[name]} == {"user"}


def with_capabilities(wanted: str, device: Path) -> str:
    """What a confined echo prints, or its refusal, in a process with no other capabilities than the wanted ones."""
    script = (
        "import asyncio, sys; from crust.host.process import confined as c\n"
        "limits = c.Limits(memory_bytes=1 << 29, cpu_s=10)\n"
        "run = c.run_confined(('echo', 'ran'), device=sys.argv[1], limits=limits, timeout_s=60)\n"
        "try: print(asyncio.run(run).stdout.decode())\n"
        "except c.CannotConfine as error: print(error)"
    )
    kept = ("setpriv", f"--bounding-set={wanted}", f"--inh-caps={wanted}")
    command = (*kept, sys.executable, "-c", script, device)
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_program_is_confined_with_cap_sys_admin_alone(device: Path) -> None:
    assert with_capabilities("-all,+sys_admin", device).strip() == "ran"


def test_missing_privilege_is_named_and_no_package(device: Path) -> None:
    refused = with_capabilities("-sys_admin", device)
    assert "Operation not permitted; give crust CAP_SYS_ADMIN" in refused
    assert "install" not in refused


def test_missing_bubblewrap_is_named(
    device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tool in ("prlimit", "unshare"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    monkeypatch.setitem(commands._ENVIRONMENT, "PATH", str(tmp_path))
    with pytest.raises(confined.CannotConfine, match="; install the package bubblewrap"):
        tried("echo", device)


def test_program_that_cannot_start_is_error_and_no_exit_code(device: Path) -> None:
    """bwrap exits with 1, and 1 of e2fsck is "corrected"."""
    with pytest.raises(confined.CannotConfine, match=r"no-such-tool.*; install it"):
        run(("no-such-tool",), device)


def test_missing_device_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(confined.CannotConfine, match=r"absent: No such file or directory$"):
        tried("echo", tmp_path / "absent")
