"""A second implementation of specs/handoff.md, without code of crust: the work of a runtime in another language.

second_runtime.py REGISTRY_SOCKET OWN_SOCKET DIRECTORY; then lines on stdin: start SANDBOX MOUNT_SOURCE, stop SANDBOX

It has Python's standard library and gRPC, and offers READ_ONLY and GROW; messages are put together by hand. A mount
namespace stands in for the virtual machine, as in box_runtime.py. The numbers are those of the clauses. It is one
file, so that an author reads a volume's way from the record to the release in one place.
"""

import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

NAME, FILESYSTEMS = "second", {"ext4"}
READ_ONLY, GROW, BLOCK_DEVICE = 6, 14, 1  # HandlerFeature, VolumeType.Type
LIMIT_BYTES, SCHEMA = 64 * 1024, 1
KNOWN = {"image", "format", "encryption"}
"""The names that `crust.required` may have; `check_offered` refuses a volume that needs them."""
CONTROL = re.compile("[\0-\x1f\x7f-\x9f]")
CREDENTIAL_NAME, CREDENTIAL = (
    re.compile("pass|secret|token|cred|key"),
    re.compile("://[^/]*:[^/]*@"),
)
BLOCK = Path("/sys/dev/block")
GUARD = "crust-deferred"
PAUSES_S = (0.0, 0.01, 0.05, 0.15)
"""Before each trial open: the trials of two readers that start at once refuse each other."""
BOOT = 'mount --make-rprivate / && mount -t "$2" -o "$3" "$1" "$4" && echo up && exec sleep inf'


class Refused(Exception):
    """The volume cannot be used; the text is for people."""


def expect(condition: object, why: str) -> None:
    if not condition:
        raise Refused(why)


def digest(target: str) -> str:
    """H-1."""
    return hashlib.sha256(os.fsencode(target)).hexdigest()


def check_trusted(path: Path, status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """H-4."""
    expect(is_kind(status.st_mode), f"{path} is another kind of file")
    expect(status.st_uid in (0, os.geteuid()), f"{path} is not root's")
    expect(not status.st_mode & 0o022, f"{path} can be written by others")


def status_of(path: Path) -> os.stat_result | None:
    """Of the file itself; None if there is none. Any other errno is no answer: it is raised."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.lstat(path)
    return None


def open_trusted(path: Path, access: int) -> int:
    """H-4. Raises FileNotFoundError."""
    fd = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_trusted(path, os.fstat(fd), stat.S_ISREG)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read(path: Path) -> bytes:
    """H-4, H-5. Raises FileNotFoundError."""
    with open(open_trusted(path, os.O_RDONLY), "rb") as file:
        data = file.read(LIMIT_BYTES + 1)
    expect(len(data) <= LIMIT_BYTES, f"{path} is too large")
    return data


def parse(data: bytes, entry: str) -> dict[str, Any]:
    """The record of an entry, H-5 to H-9 and H-50."""
    try:
        record: dict[str, Any] = json.loads(data.decode())  # bytes may begin with a mark
        crust = record["crust"]
        expect(crust["schema"] == SCHEMA, f"schema {crust['schema']} is not known")
        unknown = set(crust.get("required") or ()) - KNOWN
        expect(not unknown, f"it requires {', '.join(sorted(unknown))}, which are not known")
        expect(digest(crust["target_path"]) == entry, "it is for another target")
        expect(("ro" in record["options"]) is crust["readonly"], "ro and readonly contradict")
        names = [option.partition("=")[0] for option in record["options"] if is_credential(option)]
        expect(not names, f"the options {', '.join(names)} look like credentials")
        expect(set(record["metadata"]) <= {"fsGroup", "fsGroupChangePolicy"}, "unknown metadata")
        is_image = record["volume-type"] == "network"
        expect(bool(crust.get("image")) is is_image, "two kinds of source")
        has_device = bool(record.get("device")) and bool(crust.get("identity"))
        expect(has_device is not is_image, "it has no source, or two")
        expect(crust["handler"] and record["fstype"], "it has no handler or filesystem")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"the record cannot be read: {error}") from error
    return record


def is_credential(option: str) -> bool:
    """H-9."""
    name = option.partition("=")[0].lower()
    return bool(CREDENTIAL_NAME.search(name) or CREDENTIAL.search(option))


def identity(number: int, sequence: str) -> dict[str, int]:
    """H-23: of a device with this st_rdev, and of the file diskseq."""
    return {
        "major": os.major(number), "minor": os.minor(number), "disk_sequence": int(sequence)
    }  # fmt: skip


def check_offered(record: dict[str, Any]) -> None:
    """Refuse a volume that needs a feature that is not offered: H-12, H-36, H-38, H-40, H-47, H-49, H-50."""
    crust, target = record["crust"], record["crust"]["target_path"]
    expect(crust["handler"] == NAME, f"it is for the handler {crust['handler']}")
    for key in ("image", "format", "encryption"):
        expect(not crust.get(key), f"crust.{key} is not offered")
    expect(not any((crust.get("limits") or {}).values()), "I/O limits are not offered")
    expect(record["fstype"] in FILESYSTEMS, f"{record['fstype']} is not known")
    mount = mount_of(target)
    is_guarded = mount.source == GUARD and mount.point == target
    expect(is_guarded or not crust.get("request"), "no guard mount is on top of its target")
    if crust["readonly"]:
        return
    expect("fsGroup" not in record["metadata"], "fsGroup is not offered")
    if is_guarded:
        expect(os.stat(target).st_gid == 0, "the group of the guard mount is not offered")


@dataclass
class Mount:
    """A line of mountinfo. `can_write`: the filesystem, also where this mount is read-only."""

    number: str
    root: str
    point: str
    source: str
    can_write: bool


def mounts() -> Iterator[Mount]:
    text = Path("/proc/self/mountinfo").read_bytes().decode(errors="surrogateescape")
    for line in text.rstrip("\n").split("\n"):
        before, _, after = line.partition(" - ")
        (_, _, number, *paths), (_, source, options) = before.split(" "), after.split(" ")
        root, point = (
            re.sub(r"\\([0-7]{3})", lambda at: chr(int(at[1], 8)), it) for it in paths[:2]
        )
        yield Mount(number, root, point, source, "ro" not in options.split(","))


def mount_of(path: str) -> Mount:
    """The mount that the path is on, H-33."""
    above = [it for it in mounts() if f"{path}/".startswith(f"{it.point.rstrip('/')}/")]
    return max(reversed(above), key=lambda it: len(it.point))  # of several, the last


def resolve(root: Path, source: str) -> Path | None:
    """The entry of a mount source, None if it is an ordinary directory: H-32, H-33."""
    expect(source.startswith("/"), "the mount source is relative")
    check_trusted(root, os.lstat(root), stat.S_ISDIR)
    real = os.path.realpath(source)
    for path in (Path(os.path.normpath(source)), Path(real)):
        for target in (path, *path.parents):
            entry = root / digest(str(target))
            if (status := status_of(entry)) is not None:
                check_trusted(entry, status, stat.S_ISDIR)
                if status_of(entry / "mountInfo.json"):
                    expect(target == path, "a path inside the volume is not offered")  # subPath
                    return entry
    mount = mount_of(real)
    return entry_of_guard(root, mount, real) if mount.source == GUARD else None


def entry_of_guard(root: Path, guard: Mount, path: str) -> Path:
    """H-33: the entry whose target has that filesystem."""
    for entry in root.iterdir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, Refused):
            target = parse(read(entry / "mountInfo.json"), entry.name)["crust"]["target_path"]
            if mount_of(target).number == guard.number:
                break
    else:
        raise Refused("a guard mount without an entry")
    expect((guard.root, guard.point) == ("/", path), "a path inside the volume is not offered")
    return entry


class Lock:
    """H-21, H-22."""

    def __init__(self, entry: Path) -> None:
        self.claim, self.dead = entry / "claim.json", entry / ".claim.dead"
        while True:
            self.fd = open_trusted(entry / "claim.lock", os.O_RDWR)
            try:
                expect(os.fstat(self.fd).st_nlink < 2, "claim.lock has a second link")  # H-4
                whole = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, whole)
                status = status_of(entry / "claim.lock")
                if status is not None and os.path.samestat(os.fstat(self.fd), status):
                    break
            except BaseException as error:
                os.close(self.fd)
                if isinstance(error, BlockingIOError):
                    raise Refused("a sandbox has the volume") from error
                raise
            os.close(self.fd)
        with contextlib.suppress(FileNotFoundError):  # one that is aside already stays
            os.rename(self.claim, self.dead)
        os.utime(entry)  # H-31

    def check_ended(self) -> None:
        """H-23: nobody may have the volume while the process of the dead claim runs."""
        try:
            process = json.loads(read(self.dead)).get("process")
            is_over = not process or has_ended(process["pid"], process["started"])
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(f"the dead claim cannot be read: {error}") from error
        expect(is_over, f"the process of a dead claim runs: {process}")

    def is_of(self, box: str) -> bool:
        """Whether the dead claim is this sandbox's."""
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            content = json.loads(read(self.dead))
            return (content["handler"], content["sandbox_id"]) == (NAME, box)
        return False

    def settle(self) -> None:
        """H-22: the new claim replaces the dead one."""
        self.dead.unlink(missing_ok=True)

    def release(self) -> None:
        """H-22, without a claim: the dead one is there again."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.dead, self.claim)
        os.close(self.fd)


def has_ended(pid: int, started: int) -> bool:
    """H-23: by its state and its start, fields 3 and 22 of stat. Any other errno is no answer: it is raised."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX" or int(fields[18]) != started


@dataclass
class Claim:
    """H-24. `pid` is this process's until the hypervisor's is known; `claimed_at` stays."""

    entry: Path
    box: str
    pid: int = field(default_factory=os.getpid)
    claimed_at: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat())

    def write(self, state: str, error: str = "") -> None:
        content = {
            "schema": SCHEMA, "sandbox_id": self.box, "handler": NAME, "state": state,
            "error": error[:2000], "pid": self.pid, "claimed_at": self.claimed_at,
        }  # fmt: skip
        with open(self.entry / ".claim.json.new", "w", opener=_private) as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(self.entry / ".claim.json.new", self.entry / "claim.json")
        os.utime(self.entry)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def open_device(record: dict[str, Any]) -> int:
    """H-23, H-28."""
    is_readonly = record["crust"]["readonly"]
    flags = os.O_RDONLY if is_readonly else os.O_RDWR | os.O_EXCL
    fd = os.open(record["device"], flags | os.O_CLOEXEC)
    try:
        number = os.fstat(fd).st_rdev
        disk = (BLOCK / f"{os.major(number)}:{os.minor(number)}").resolve()
        if (disk / "partition").exists():  # it has no sequence of its own
            disk = disk.parent
        actual = identity(number, (disk / "diskseq").read_text())
        expect(actual == record["crust"]["identity"], f"the device is another one: {actual}")
        if is_readonly:
            check_nobody_writes(record["device"], number)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_nobody_writes(device: str, number: int) -> None:
    """H-28, for a reader.

    The kernel refuses an exclusive open while the device, its disk, a partition of it or a device that is built upon
    it is mounted, in any mount namespace, or held. If a read-only filesystem of this very device is the reason,
    nothing else can hold what shares bytes with it.
    """
    shown = f"{os.major(number)}:{os.minor(number)}"
    for pause_s in PAUSES_S:
        time.sleep(pause_s)
        try:
            os.close(os.open(device, os.O_RDONLY | os.O_EXCL | os.O_NONBLOCK | os.O_CLOEXEC))
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        found = [mount for mount in mounts() if mount.number == shown]
        expect(not any(mount.can_write for mount in found), "the host can write to the device")
        if found:
            return
    raise Refused("the device, or one that shares bytes with it, is mounted or held exclusively")


@dataclass
class Box:
    """A sandbox that runs."""

    entry: Path
    vm: "subprocess.Popen[str]"

    def kill(self) -> None:
        with self.vm:  # which waits
            self.vm.kill()


def sh(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    expect(done.returncode == 0, f"{argv[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


class Boxes:
    """The sandboxes by name; each has one volume."""

    def __init__(self, root: Path, directory: str) -> None:
        self.root, self.directory = root, directory
        self.running: dict[str, Box] = {}

    def start(self, box: str, source: str) -> str:
        entry = resolve(self.root, source)
        if entry is None:
            return "ordinary"
        expect(not CONTROL.search(box), "the sandbox's id has a control character")  # H-24
        lock = Lock(entry)
        try:
            record = parse(read(entry / "mountInfo.json"), entry.name)
            check_offered(record)
            lock.check_ended()
            device = open_device(record)
        except BaseException:
            lock.release()
            raise
        claim = Claim(entry, box)
        try:
            claim.write("claimed")
            lock.settle()
            self.running[box] = Box(entry, self.boot(record, [lock.fd, device]))
            claim.pid = self.running[box].vm.pid
            claim.write("mounted")
        except BaseException as error:
            if box in self.running:
                self.running.pop(box).kill()
            claim.pid = os.getpid()
            claim.write("error", str(error))  # H-29: it tells people why
            raise
        finally:
            os.close(device)  # from here on the "virtual machine" alone has them, H-25
            os.close(lock.fd)
        return "ok"

    def boot(self, record: dict[str, Any], fds: list[int]) -> "subprocess.Popen[str]":
        is_readonly = record["crust"]["readonly"]
        flags = ["--read-only"] * is_readonly
        disk = sh("losetup", "--find", "--show", *flags, record["device"])
        options = ",".join([*record["options"], *([] if is_readonly else ["rw"])])
        argv = ["unshare", "-m", "sh", "-c", BOOT, "sh", disk, record["fstype"], options]
        vm = subprocess.Popen(
            [*argv, self.directory], pass_fds=fds, stdout=subprocess.PIPE, text=True
        )
        try:
            expect(vm.stdout and vm.stdout.readline(), "the sandbox did not mount it")
            if not is_readonly:  # H-48
                sh("nsenter", "-m", "-t", str(vm.pid), "resize2fs", disk)
        except BaseException:
            with vm:
                vm.kill()
            raise
        finally:
            sh("losetup", "--detach", disk)  # the kernel does it after the last unmount
        return vm

    def stop(self, box: str) -> str:
        stopped = self.running.pop(box, None)
        if stopped is not None:
            stopped.kill()
            with contextlib.suppress(FileNotFoundError, Refused):  # unpublished, or another's
                lock = Lock(stopped.entry)
                if lock.is_of(box):
                    lock.settle()  # its virtual machine has ended
                lock.release()
                os.utime(stopped.entry)
        return "ok"


def wire(number: int, value: str | int) -> bytes:
    """A field of a protobuf message whose text is shorter than 128 bytes."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    return bytes([number << 3 | 2, len(value)]) + value.encode()


def main(registry: str, own: str, directory: str) -> None:
    # no feature of it has a call: UNIMPLEMENTED
    served = grpc.server(futures.ThreadPoolExecutor(1))
    served.add_insecure_port(f"unix:{own}")
    served.start()
    request = b"".join((wire(1, NAME), wire(2, "1"), wire(3, own), wire(4, BLOCK_DEVICE)))
    request += b"".join(wire(6, feature) for feature in (READ_ONLY, GROW))
    request += wire(9, os.uname().release)
    request += b"".join(wire(5, filesystem) for filesystem in FILESYSTEMS)
    with grpc.insecure_channel(f"unix:{registry}") as channel:
        register: grpc.UnaryStreamMultiCallable[bytes, bytes]
        register = channel.unary_stream("/crust.v1.HandlerRegistry/Register")
        session = register(request)  # registered as long as it is open
        answer = next(session)  # field 1 is the directory
        boxes = Boxes(Path(answer[2 : 2 + answer[1]].decode()), directory)
        commands: dict[str, Callable[..., str]] = {"start": boxes.start, "stop": boxes.stop}
        for line in sys.stdin:
            command, *words = line.rstrip("\n").split(" ", 2)  # the source is the rest of the line
            try:
                outcome = commands[command](*words)
            except (Refused, OSError) as error:
                outcome = f"refused {' '.join(str(error).split())}"
            sys.stdout.write(f"{outcome}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:4])
