"""A second implementation of specs/handoff.md, without code of crust: the work of a runtime in another language.

second_runtime.py REGISTRY_SOCKET OWN_SOCKET DIRECTORY; then lines on stdin: start SANDBOX MOUNT_SOURCE, stop SANDBOX

It has Python's standard library and gRPC, and offers READ_ONLY and GROW; messages are put together by hand. A mount
namespace stands in for the virtual machine, as in box_runtime.py. The numbers are those of the clauses.
"""

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

NAME, FILESYSTEMS = "second", {"ext4"}
READ_ONLY, GROW, BLOCK = 6, 14, 1  # HandlerFeature, VolumeType.Type
LIMIT_BYTES, SCHEMA = 64 * 1024, 1
KNOWN = {"image", "format", "encryption"}
"""The names that `crust.required` may have; `check_offered` refuses a volume that needs them."""
CREDENTIALS = ("password", "passwd", "secret", "token", "credential")
BOOT = 'mount --make-rprivate / && mount -t "$2" -o "$3" "$1" "$4" && echo up && exec sleep inf'


class Refused(Exception):
    """The volume cannot be used; the text is for people."""


def expect(condition: object, why: str) -> None:
    if not condition:
        raise Refused(why)


def digest(target: str) -> str:
    """H-1."""
    return hashlib.sha256(os.fsencode(target)).hexdigest()


def read(path: Path) -> bytes:
    """H-4, H-5. Raises FileNotFoundError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        expect(stat.S_ISREG(status.st_mode), f"{path} is no regular file")
        expect(status.st_uid in (0, os.geteuid()), f"{path} is not root's")
        expect(not status.st_mode & 0o022, f"{path} can be written by others")
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
        names = [option.partition("=")[0].lower() for option in record["options"]]
        secret = [name for name in names if any(word in name for word in CREDENTIALS)]
        expect(not secret, f"the options {', '.join(secret)} look like credentials")
        expect(set(record["metadata"]) <= {"fsGroup", "fsGroupChangePolicy"}, "unknown metadata")
        is_image = record["volume-type"] == "network"
        expect(bool(crust.get("image")) is is_image, "two kinds of source")
        has_device = bool(record.get("device")) and bool(crust.get("identity"))
        expect(has_device is not is_image, "it has no source, or two")
        expect(crust["handler"] and record["fstype"], "it has no handler or filesystem")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"the record cannot be read: {error}") from error
    return record


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
    if crust["readonly"]:
        return
    expect("fsGroup" not in record["metadata"], "fsGroup is not offered")
    if guard(target):
        expect(os.stat(target).st_gid == 0, "the group of the guard mount is not offered")


def mounts() -> Iterator[tuple[str, str, str, list[str]]]:
    """Device number, mount point, source and the options of mount and filesystem."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, (_, source, options) = before.split(), after.split(maxsplit=2)
        path = fields[4].encode().decode("unicode_escape").encode("latin-1").decode()
        yield fields[2], path, source, [*fields[5].split(","), *options.split(",")]


def guard(path: str) -> bool:
    """Whether the filesystem there is a guard mount, H-39."""
    number = os.stat(path).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    return any(device == wanted and source == "crust-deferred" for device, _, source, _ in mounts())


def resolve(root: Path, source: str) -> Path | None:
    """The entry of a mount source, None if it is an ordinary directory: H-32, H-33."""
    for path in (Path(os.path.normpath(source)), Path(os.path.realpath(source))):
        for target in (path, *path.parents):
            entry = root / digest(str(target))
            if (entry / "mountInfo.json").is_symlink() or (entry / "mountInfo.json").exists():
                expect(target == path, "a path inside the volume is not offered")  # subPath
                return entry
    expect(not os.path.exists(source) or not guard(source), "a guard mount without an entry")
    return None


class Lock:
    """H-21, H-22."""

    def __init__(self, entry: Path) -> None:
        self.claim, self.dead = entry / "claim.json", entry / ".claim.dead"
        while True:
            self.fd = os.open(entry / "claim.lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                whole = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, whole)
            except OSError as error:
                os.close(self.fd)
                raise Refused("a sandbox has the volume") from error
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self.fd), os.stat(entry / "claim.lock")):
                    break
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


def claim(entry: Path, box: str, state: str, error: str = "") -> None:
    """H-24."""
    now = datetime.datetime.now(datetime.UTC).isoformat()
    content = {
        "schema": SCHEMA, "sandbox_id": box, "handler": NAME, "state": state,
        "error": error[:2000], "pid": os.getpid(), "claimed_at": now,
    }  # fmt: skip
    with open(entry / ".claim.json.new", "w", opener=_private) as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(entry / ".claim.json.new", entry / "claim.json")
    os.utime(entry)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def open_device(record: dict[str, Any]) -> int:
    """H-23, H-28."""
    is_readonly = record["crust"]["readonly"]
    flags = os.O_RDONLY if is_readonly else os.O_RDWR | os.O_EXCL
    fd = os.open(record["device"], flags | os.O_CLOEXEC)
    number = os.fstat(fd).st_rdev
    shown = f"{os.major(number)}:{os.minor(number)}"
    try:
        actual = identity(number, Path(f"/sys/dev/block/{shown}/diskseq").read_text())
        expect(actual == record["crust"]["identity"], f"the device is another one: {actual}")
        writes = any(device == shown and "rw" in options for device, _, _, options in mounts())
        expect(not (is_readonly and writes), "the host can write to the device")
    except BaseException:
        os.close(fd)
        raise
    return fd


@dataclass
class Box:
    """A sandbox that runs."""

    entry: Path
    vm: "subprocess.Popen[str]"


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
        lock = Lock(entry)
        try:
            record = parse(read(entry / "mountInfo.json"), entry.name)
            check_offered(record)
            lock.check_ended()
            device = open_device(record)
        except BaseException:
            lock.release()
            raise
        try:
            claim(entry, box, "claimed")
            lock.settle()
            self.running[box] = Box(entry, self.boot(record, [lock.fd, device]))
            claim(entry, box, "mounted")
        except BaseException as error:
            claim(entry, box, "error", str(error))  # H-29: it tells people why
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
            vm.kill()
            vm.wait()
            raise
        finally:
            sh("losetup", "--detach", disk)  # the kernel does it after the last unmount
        return vm

    def stop(self, box: str) -> str:
        stopped = self.running.pop(box, None)
        if stopped is not None:
            stopped.vm.kill()
            stopped.vm.wait()
            with contextlib.suppress(FileNotFoundError, Refused):  # unpublished, or another's
                lock = Lock(stopped.entry)
                lock.settle()  # its own: the virtual machine has ended
                os.close(lock.fd)
                os.utime(stopped.entry)
        return "ok"


def field(number: int, value: str | int) -> bytes:
    """A field of a protobuf message whose text is shorter than 128 bytes."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    return bytes([number << 3 | 2, len(value)]) + value.encode()


def main(registry: str, own: str, directory: str) -> None:
    # no feature of it has a call: UNIMPLEMENTED
    served = grpc.server(futures.ThreadPoolExecutor(1))
    served.add_insecure_port(f"unix:{own}")
    served.start()
    request = b"".join((field(1, NAME), field(2, "1"), field(3, own), field(4, BLOCK)))
    request += b"".join(field(6, feature) for feature in (READ_ONLY, GROW))
    request += b"".join(field(5, filesystem) for filesystem in FILESYSTEMS)
    with grpc.insecure_channel(f"unix:{registry}") as channel:
        register: grpc.UnaryStreamMultiCallable[bytes, bytes]
        register = channel.unary_stream("/crust.v1.HandlerRegistry/Register")
        session = register(request)  # registered as long as it is open
        answer = next(session)  # field 1 is the directory
        boxes = Boxes(Path(answer[2 : 2 + answer[1]].decode()), directory)
        commands: dict[str, Callable[..., str]] = {"start": boxes.start, "stop": boxes.stop}
        for line in sys.stdin:
            command, *words = line.split()
            try:
                outcome = commands[command](*words)
            except (Refused, OSError) as error:
                outcome = f"refused {' '.join(str(error).split())}"
            sys.stdout.write(f"{outcome}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:4])
