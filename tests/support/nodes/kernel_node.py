"""A node with a kernel of its own: a virtual machine that runs this checkout, for what the kernel of the tests lacks.

Its root is the root of this host, read-only by 9p, below a tmpfs that takes what it writes: the same Python and the
same crust run in it. Its kernel is the standard one of the guest images, with the modules that are named here. It has
one network, a tap of this host, at whose address services for it listen. The first process is `vm_agent`. Everything
ends with the descriptors and children of this process: the tap is not persistent, and QEMU dies with its parent.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import random
import struct
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from crust.rpc import channel
from examples.kata.guest import archive, image, kernel, packages
from tests.support.nodes import vm_agent

_MODULES = (
    "virtio_pci", "virtio_net", "virtio_blk", "9pnet_virtio", "9p", "overlay", "crc32c_generic", "rbd", "loop",
    *kernel.FILESYSTEM_MODULES["ext4"], *kernel.FILESYSTEM_MODULES["xfs"], *kernel.FILESYSTEM_MODULES["btrfs"],
)  # fmt: skip
_TUNSETIFF, _TAP = 0x400454CA, 0x0002 | 0x1000
SOCKET = "/run/node/csi/csi.sock"
"""Where the driver in it listens."""
CACHE = Path(__file__).parents[3] / ".cache" / "guest"
_START_S = 600.0
"""Only a start that hangs reaches it: beside other runs a boot takes many times as long."""
_INIT = """\
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for module in {modules}; do insmod /modules/$module.ko; done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=loose,ro root /lower
mount -t tmpfs upper /upper; mkdir /upper/upper /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/upper,workdir=/upper/work root /new
for name in proc sys dev; do mount --move /$name /new/$name; done
mount -t tmpfs run /new/run; mount -t tmpfs tmp /new/var/lib/kubelet
. /parameters
echo $machine > /new/etc/machine-id
ip link set lo up; ip addr add $address/30 dev eth0; ip link set eth0 up
cd /new
exec switch_root /new /bin/sh -c "cd $checkout && exec $python -m tests.support.nodes.vm_agent {socket}"
"""


class NodeFailed(Exception):
    """The virtual machine, or a command in it, did not do what the test needs."""


@dataclass(frozen=True)
class Network:
    """A tap, and the two addresses on it."""

    descriptor: int
    name: str
    host: str
    node: str


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A tap with a network of its own, gone after the block."""
    low = 4 * random.randrange(1, 1 << 13)
    host, node = (f"10.213.{(low + number) >> 8}.{(low + number) & 255}" for number in (1, 2))
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        asked = struct.pack("16sH22x", b"crust%d", _TAP)
        name = fcntl.ioctl(descriptor, _TUNSETIFF, asked)[:16].rstrip(b"\0").decode()
        for words in (f"address add {host}/30 dev {name}", f"link set {name} up"):
            subprocess.run(("ip", *words.split()), check=True, timeout=_START_S)
        yield Network(descriptor, name, host, node)
    finally:
        os.close(descriptor)


@dataclass
class KernelNode:
    """A running node."""

    network: Network
    directory: Path
    disks: int = 0
    """How many disks it has, which keep nothing."""
    machine: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: "asyncio.subprocess.Process | None" = None

    async def start(self) -> None:
        """Boot it, and wait until it takes commands."""
        self.process = await asyncio.create_subprocess_exec(
            *("setpriv", "--pdeathsig", "KILL", *self._command_line()),
            pass_fds=(self.network.descriptor,),
            stdin=asyncio.subprocess.DEVNULL,
        )
        await self._booted(1)

    async def reset(self) -> None:
        """Cut its power and give it power again: it writes nothing back, and its disk in memory is empty."""
        boots = self._boots()
        asking = asyncio.create_task(self.ask("/bin/sh", "-c", "echo b >/proc/sysrq-trigger"))
        await self._booted(boots + 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async def stop(self) -> None:
        """End it without a word."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    @property
    def _console(self) -> Path:
        return self.directory / "console"

    def _boots(self) -> int:
        if not self._console.exists():
            return 0
        return self._console.read_text(errors="replace").count(vm_agent.UP)

    async def _booted(self, times: int) -> None:
        try:
            async with asyncio.timeout(_START_S):
                while self._boots() < times:
                    if self.process is None or self.process.returncode is not None:
                        raise NodeFailed("QEMU has ended")
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise NodeFailed(self._console.read_text(errors="replace")[-4000:]) from None

    async def ask(self, *argv: str, text: str = "") -> tuple[int, str]:
        """Run a command in it; its exit status, and what it printed."""
        reader, writer = await asyncio.open_connection(self.network.node, vm_agent.COMMANDS)
        try:
            writer.write(json.dumps({"argv": argv, "input": text}).encode() + b"\n")
            answer = json.loads(await reader.readline())
        finally:
            writer.close()
        return answer["code"], answer["out"]

    async def run(self, *argv: str, text: str = "") -> str:
        """As `ask`, of a command that must succeed; its output without the line end."""
        code, output = await self.ask(*argv, text=text)
        if code:
            raise NodeFailed(f"{' '.join(argv)}: {code} {output}")
        return output.rstrip("\n")

    async def shell(self, script: str) -> str:
        return await self.run("/bin/sh", "-euc", script)

    async def write(self, path: str, text: str, mode: str = "600") -> None:
        await self.run(
            "/bin/sh",
            "-euc",
            f'mkdir -p "$(dirname {path})"; cat > {path}; chmod {mode} {path}',
            text=text,
        )

    def channel(self) -> grpc.aio.Channel:
        """A connection to the driver in it."""
        return grpc.aio.insecure_channel(
            f"{self.network.node}:{vm_agent.DRIVER}", options=channel.OPTIONS
        )

    def _command_line(self) -> tuple[str, ...]:
        initramfs = self.directory / "initramfs"
        parameters = f"address={self.network.node}\nmachine={self.machine}\n"
        parameters += f"checkout={Path.cwd()}\npython={sys.executable}\n"
        disk = "driver=null-co,node-name=d{0},size=67108864,read-zeroes=on"
        disks = " ".join(
            f"-blockdev {disk.format(number)} -device virtio-blk-pci,drive=d{number}"
            for number in range(self.disks)
        )
        base = _base()
        initramfs.write_bytes(_initramfs(base, parameters))
        tuning = "mitigations=off cryptomgr.notests nokaslr no_timer_check psi=0"
        return (
            *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none"),
            *("-M", "q35,accel=tcg", "-cpu", "qemu64,+rdrand", "-m", "1G"),
            *("-bios", "/usr/share/qemu/qboot.rom", "-kernel", str(base / "vmlinux"), "-initrd", str(initramfs)),
            *("-append", f"console=ttyS0 quiet panic=0 sysrq_always_enabled {tuning}"),
            *("-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap"),
            *("-device", "virtio-9p-pci,fsdev=root,mount_tag=root"),
            *("-netdev", f"tap,id=net,fd={self.network.descriptor}", "-device", "virtio-net-pci,netdev=net"),
            *("-serial", f"file:{self._console}", *disks.split()),
        )  # fmt: skip


@contextlib.asynccontextmanager
async def running(directory: Path, on: Network, *, disks: int = 0) -> AsyncIterator[KernelNode]:
    """A node, while the block runs."""
    node = KernelNode(on, directory, disks)
    try:
        await node.start()
        yield node
    finally:
        await node.stop()


def _base() -> Path:
    """The unpacked packages, which the guest image is made of."""
    image.build(CACHE, "standard")
    chosen = packages.resolve("standard")
    digest = image.digest_of([f"{deb.file_name} {deb.sha256}".encode() for deb in chosen])
    return CACHE.absolute() / f"base-{digest}"


def _initramfs(base: Path, parameters: str) -> bytes:
    tree = base / "tree"
    modules = kernel.ModuleTree(tree / "lib" / "modules")
    order = modules.order(_MODULES)
    script = _INIT.format(modules=" ".join(order), socket=SOCKET)
    return archive.pack([
        archive.file("init", script.encode(), executable=True),
        archive.file("parameters", parameters.encode()),
        archive.character_device("dev/console", 5, 1),
        archive.file("bin/busybox", (tree / "bin/busybox").read_bytes(), executable=True),
        *(archive.directory(name) for name in ("proc", "sys", "lower", "upper", "new")),
        *(archive.file(f"modules/{name}.ko", modules.path(name).read_bytes()) for name in order),
    ])  # fmt: skip
