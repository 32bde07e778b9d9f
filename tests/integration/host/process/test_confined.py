"""What a confined program sees and may do, reported by a program that tries."""

import asyncio
import contextlib
import ctypes
import dataclasses
import errno
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from crust.host.files.locks import ToolLocks
from crust.host.process import commands, confined

pytestmark = pytest.mark.root

LIMITS = confined.Limits(memory_bytes=512 * 1024**2, cpu_s=10, at_once=8)
NAMESPACES = ("ipc", "mnt", "net", "pid", "user", "uts")


def run(
    program: tuple[str, ...], device: Path, *, writable: bool = False, inherits: Sequence[int] = ()
) -> commands.Completed:
    return asyncio.run(
        confined.run_confined(
            program,
            device=str(device),
            limits=LIMITS,
            timeout_s=60,
            writable=writable,
            inherits=inherits,
        )
    )


def tried(script: str, device: Path, *, writable: bool = False) -> str:
    """What a confined shell prints of `script`, which may use its built-ins alone: it cannot fork."""
    done = run(("sh", "-c", script), device, writable=writable)
    return done.stdout.decode() + done.stderr_tail


def tried_in_perl(
    script: str, *arguments: object, device: Path, inherits: Sequence[int] = ()
) -> list[str]:
    """The lines that a confined perl prints of `script`: it can make any system call. $D is the open device."""
    script = f"$| = 1; open($D, '+<', '{confined.DEVICE}') or die $!; {script}"
    program = ("perl", "-e", script, *map(str, arguments))
    done = run(program, device, writable=True, inherits=inherits)
    assert not done.stderr_tail
    return done.stdout.decode().splitlines()


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A file in the place of the device: bwrap binds whatever is there."""
    path = tmp_path / "device"
    path.write_bytes(b"content of the volume\n")
    return path


def test_confined_program_reads_and_writes_its_device(device: Path) -> None:
    script = f"read line < {confined.DEVICE}; echo $line; echo new > {confined.DEVICE}"
    assert tried(script, device, writable=True) == "content of the volume\n"
    assert device.read_text() == "new\n"


def test_confined_program_that_only_reads_cannot_write_its_device(device: Path) -> None:
    script = f"read line < {confined.DEVICE}; echo $line; echo new > {confined.DEVICE}"
    text = tried(script, device)
    assert text.startswith("content of the volume\n")
    assert os.strerror(errno.ENOSYS) in text
    assert device.read_text() == "content of the volume\n"


@pytest.mark.parametrize(("writable", "refusal"), [(False, errno.ENOSYS), (True, errno.EROFS)])
def test_confined_program_sees_no_other_file_and_writes_none(
    device: Path, *, writable: bool, refusal: int
) -> None:
    text = tried("echo /* /dev/* /etc/*", device, writable=writable)
    assert text == "/bin /dev /etc /lib /lib64 /sbin /usr /dev/null /dev/volume /etc/mtab\n"
    for directory in ("", "/dev", "/etc", "/usr", "/usr/bin"):
        text = tried(f"echo x > {directory}/x", device, writable=writable)
        assert os.strerror(refusal) in text, directory


def test_confined_program_sees_directories_of_its_file_and_libraries_alone(device: Path) -> None:
    """A file of root's below /usr/local, which nobody else may read, is not its business."""
    seen = set(tried("echo /usr/* /usr/lib/*", device).split())
    libraries = {path for path in seen if Path(path).resolve().joinpath("libc.so.6").exists()}
    assert libraries
    assert seen - libraries <= {"/usr/bin", "/usr/lib", "/usr/lib64"}


def test_confined_program_cannot_start_another(device: Path) -> None:
    assert "Cannot fork" in tried("/usr/bin/true | :", device)


def test_program_is_confined_in_a_process_with_many_open_files(device: Path) -> None:
    """The numbers of the descriptors that it inherits are above its own limit."""
    with contextlib.ExitStack() as opened:
        for _ in range(200):
            opened.enter_context(device.open(encoding="ascii"))
        assert tried("echo ran", device) == "ran\n"


def test_confined_program_has_no_capability(device: Path) -> None:
    """With CAP_DAC_OVERRIDE it could read what belongs to another user."""
    os.chown(device, 65534, 65534)
    device.chmod(0o600)
    assert "Permission denied" in tried(f"read line < {confined.DEVICE}", device)


def test_confined_program_that_takes_too_much_memory_fails_alone(device: Path) -> None:
    done = run(("perl", "-e", "$text = 'x' x shift", str(1 << 30)), device)
    assert done.code == 1
    assert "Out of memory" in done.stderr_tail


def test_confined_program_has_few_open_files(device: Path) -> None:
    """A pipe is memory of the kernel, which no limit of the address space counts."""
    script = (
        f"while (open(my $one, '<', '{confined.DEVICE}')) {{ push @all, $one }} "
        "print $! + 0, ' ', scalar @all"
    )
    (refused,) = tried_in_perl(script, device=device)
    number, opened = map(int, refused.split())
    assert number == errno.EMFILE
    assert opened < 64


REFUSED = (
    "socket", "keyctl", "add_key", "request_key", "unshare", "clone3", "fork", "vfork", "ptrace",
    "mount", "umount2", "bpf", "io_uring_setup", "userfaultfd", "memfd_create", "process_vm_readv",
    "open_by_handle_at", "pidfd_open", "kill", "mknod", "mknodat", "link", "symlink", "unlink",
    "chmod", "setuid", "personality", "perf_event_open", "iopl", "kexec_load", "syslog", "shmget",
    "mq_open", "flock", "openat2", "setns",
)  # fmt: skip


def test_confined_program_gets_no_other_system_call(device: Path) -> None:
    """Of a call that is not refused, arguments of zero do nothing; a child of fork(2) prints a line more."""
    library = ctypes.CDLL("libseccomp.so.2")
    numbers = [library.seccomp_syscall_resolve_name(name.encode()) for name in REFUSED]
    known = {name: number for name, number in zip(REFUSED, numbers, strict=True) if number >= 0}
    script = "for (@ARGV) { syscall($_ + 0, 0, 0, 0, 0, 0, 0); print $! + 0, qq(\n) }"
    answers = tried_in_perl(script, *known.values(), device=device)
    assert answers == [str(errno.ENOSYS)] * len(known)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="calls of x32 are of this architecture")
def test_confined_program_that_makes_a_call_of_x32_is_killed(device: Path) -> None:
    x32_socket = 0x40000000 + 41
    done = run(("perl", "-e", f"syscall({x32_socket}, 1, 1, 0); print 'lives'"), device)
    assert done.code == 128 + signal.SIGSYS
    assert done.stdout == b""


READ_SIZE = 0x80081272
CHANGES = {
    "LOOP_SET_FD": 0x4C00,
    "LOOP_CLR_FD": 0x4C01,
    "LOOP_SET_STATUS64": 0x4C04,
    "LOOP_GET_STATUS64": 0x4C05,
    "LOOP_CHANGE_FD": 0x4C06,
    "LOOP_SET_CAPACITY": 0x4C07,
    "LOOP_SET_DIRECT_IO": 0x4C08,
    "LOOP_SET_BLOCK_SIZE": 0x4C09,
    "LOOP_CONFIGURE": 0x4C0A,
    "BLKROSET": 0x125D,
    "BLKRRPART": 0x125F,
    "BLKRASET": 0x1262,
    "BLKPG": 0x1269,
    "BLKBSZSET": 0x40081271,
    "SG_IO": 0x2285,
}
"""Of <linux/loop.h>, <linux/fs.h> and <scsi/sg.h>. LOOP_GET_STATUS64 tells the path of the image on the host."""


def test_confined_program_cannot_change_or_detach_its_loop_device(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(1 << 20))
    script = (
        "for (@ARGV) { $space = pack('x232'); "
        "print ioctl($D, $_ + 0, $space) ? unpack('Q', $space) : 0 - $!, qq(\n) }"
    )
    with attached(image) as device:
        answers = tried_in_perl(script, READ_SIZE, *CHANGES.values(), device=device)
    assert answers[0] == str(1 << 20)
    assert dict(zip(CHANGES, answers[1:], strict=True)) == dict.fromkeys(
        CHANGES, str(-errno.ENOSYS)
    )


@contextlib.contextmanager
def attached(image: Path) -> Iterator[Path]:
    """A loop device of the image."""
    command = ("losetup", "--find", "--show", image)
    path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    try:
        yield Path(path)
    finally:
        subprocess.run(("losetup", "--detach", path), check=True)


LOCKS = {"F_SETLK": 6, "F_OFD_SETLK": 37, "F_SETLEASE": 1024}


def test_confined_program_locks_no_other_volume(device: Path, tmp_path: Path) -> None:
    """It inherits the file with the locks of all volumes, and tries to lock the whole of it."""
    locks = ToolLocks(tmp_path / "tools.lock")
    script = (
        "open($L, '<&=', shift) or die $!; for (@ARGV) { $whole = pack('ssx4qqix4', 0, 0, 0, 0, 0); "
        "print fcntl($L, $_ + 0, $_ == 1024 ? 0 : $whole) ? 'taken' : $! + 0, qq(\\n) }"
    )
    with locks.taking("attacker") as lock:
        answers = tried_in_perl(script, lock, *LOCKS.values(), device=device, inherits=(lock,))
    assert dict(zip(LOCKS, answers, strict=True)) == dict.fromkeys(LOCKS, str(errno.ENOSYS))


def reader_of(pipe: Path) -> int:
    """The one other process that has the pipe open."""
    pipe_id, found = pipe.stat(), set[int]()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # a process that ends is none
            if os.path.samestat(descriptor.stat(), pipe_id):
                found.add(int(descriptor.parts[2]))
    (pid,) = found - {os.getpid()}
    return pid


def while_it_waits(look: Callable[[int], None], pipe: Path) -> None:
    """Call `look` with a confined program, which waits for a line of its device, a pipe."""
    os.mkfifo(pipe)

    def look_and_end() -> None:
        with pipe.open("w", encoding="ascii") as opened:  # it waits for the program's own open
            look(reader_of(pipe))
            opened.write("read\n")

    async def main() -> commands.Completed:
        looking = asyncio.create_task(asyncio.to_thread(look_and_end))
        script = f"read line < {confined.DEVICE}; echo $line"
        done = await confined.run_confined(
            ("sh", "-c", script), device=str(pipe), limits=LIMITS, timeout_s=60
        )
        await looking
        return done

    assert asyncio.run(main()).stdout == b"read\n"


def test_confined_program_shares_no_namespace_but_its_users(tmp_path: Path) -> None:
    seen: dict[str, str] = {}

    def look(pid: int) -> None:
        for name in NAMESPACES:
            seen[name] = os.readlink(f"/proc/{pid}/ns/{name}")

    while_it_waits(look, tmp_path / "pipe")
    own = {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
    assert {name for name in NAMESPACES if own[name] == seen[name]} == {"user"}


def test_confined_program_is_the_first_that_the_kernel_kills(tmp_path: Path) -> None:
    seen: list[str] = []

    def look(pid: int) -> None:
        seen.append(Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="ascii").strip())

    while_it_waits(look, tmp_path / "pipe")
    assert seen == ["1000"]


def test_confined_programs_beyond_the_allowed_number_wait_for_turn(device: Path) -> None:
    """Programs with other limits do not wait for them. Each has work between its two lines."""
    limits = dataclasses.replace(LIMITS, at_once=1)
    loop_of_work = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"
    script = f"echo in >> {confined.DEVICE}; {loop_of_work}; echo out >> {confined.DEVICE}"

    async def one() -> None:
        await confined.run_confined(
            ("sh", "-c", script), device=str(device), limits=limits, timeout_s=60, writable=True
        )

    async def main() -> None:
        await asyncio.gather(*(one() for _ in range(3)))

    device.write_bytes(b"")
    asyncio.run(main())
    assert device.read_text(encoding="ascii").split() == ["in", "out"] * 3


def with_capabilities(wanted: str, device: Path) -> str:
    """What a confined echo prints, or its refusal, in a process with no other capabilities than the wanted ones."""
    script = (
        "import asyncio, sys; from crust.host.process import confined as c\n"
        "limits = c.Limits(memory_bytes=1 << 29, cpu_s=10, at_once=1)\n"
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
    for tool in ("prlimit", "choom", "unshare", "ldd", "sh"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    monkeypatch.setitem(commands._ENVIRONMENT, "PATH", str(tmp_path))
    with pytest.raises(confined.CannotConfine, match="; install the package bubblewrap"):
        tried("echo", device)


def test_program_that_cannot_start_is_error_and_no_exit_code(device: Path) -> None:
    """bwrap exits with 1, and 1 of e2fsck is "corrected"."""
    with pytest.raises(confined.CannotConfine, match=r"no-such-tool.*; install it"):
        run(("no-such-tool",), device)


def test_missing_device_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(confined.CannotConfine, match=r"absent: No such file or directory; "):
        tried("echo", tmp_path / "absent")
