"""The kernel's own client of RBD: images of a Ceph cluster as block devices of this host, by sysfs alone.

crust uses /sys/bus/rbd (Documentation/ABI/testing/sysfs-bus-rbd): `add_single_major` takes one line of monitors,
options and image, and returns when the device exists or cannot exist; `devices` lists the mappings, so that a
process that was killed finds its own again. The program `rbd` takes no part.

Each mapping has a client of its own (`noshare`): its address belongs to one image, and can be blocklisted alone. The
user's key goes to the kernel as a key (`thread_key`), because sysfs shows the options of a mapping. The name of that
key marks the mappings of one node: a node neither uses nor removes the mappings of another node, and several nodes
that are containers of one kernel have mappings of their own.

The client lives in the network namespace of the thread that makes it. A pod's namespace ends with the pod, and the
client would lose its network while others use its device. So crust makes the client in the host's namespace: the
initial one, or that of process 1 for a pod with hostPID.

RBD's exclusive lock moves between clients, as with librbd: a mapping that kept it (`exclusive`) would refuse the
controller its snapshots. It fences no client. crust unmaps no device by force: that would lose the pages that the
kernel has not written back.
"""

import base64
import binascii
import contextlib
import ctypes
import errno
import hashlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from crust.core import errors, volumes
from crust.host.block import devices, users
from crust.host.files import listing
from crust.host.process import syscalls

BUS = "/sys/bus/rbd"
_KEY = "crust.rbd."
"""The prefix of the names of crust's keys."""
_LOCK_S, _MOUNT_S = 30, 15
_MODPROBE_S = 20.0
_NO_NETWORK = (
    "this driver has a network namespace of its own and does not see the host's; a mapped image would end with it: "
    "run the driver with hostPID or hostNetwork"
)
_THREAD_KEYRING = -1
_INVALIDATE = 21
_KEY_CALLS = {"x86_64": (248, 250), "aarch64": (217, 219)}
"""add_key(2) and keyctl(2)."""
_OWN, _FIRST = "/proc/thread-self/ns/net", "/proc/1/ns/net"
_INITIAL_ONLY = "/proc/sys/net/core/dev_weight"
"""A setting that no other network namespace has."""
_PLAIN = re.compile(r"[A-Za-z0-9_.:/\[\]-]+")
_FEATURES = {
    0: "layering", 1: "striping", 2: "exclusive-lock", 3: "object-map", 4: "fast-diff", 5: "deep-flatten",
    6: "journaling", 7: "data-pool", 8: "operations", 9: "migrating",
}  # fmt: skip
"""The bits of an image's features."""


class KernelRefusesImage(errors.RuntimeFailed):
    def __init__(self, image: str, number: int) -> None:
        why = {
            errno.ENXIO: "the image, or a parent of this clone, has features that this kernel does not know",
            errno.ENOENT: "the pool, the namespace or the image does not exist",
            errno.EACCES: "the cluster refuses the user",
            errno.EPERM: "the cluster refuses the user",
            errno.ENOKEY: "the kernel did not find the user's key",
            errno.EINVAL: "it does not take the options: ms_mode needs Linux 5.11",
            errno.ETIMEDOUT: "the cluster did not answer, or a client that has ended still has RBD's lock",
            errno.EIO: "no monitor answered",
        }.get(number, os.strerror(number))
        super().__init__(
            f"the kernel does not map the image {image}", why=f"{why} (errno {number})"
        )


@dataclass(frozen=True, slots=True)
class Login:
    """The kernel's access to the cluster: addresses without a protocol, which is the same for all."""

    monitors: Sequence[str]
    mode: str
    """Of the messenger: `legacy`, or one of its version 2."""
    user: str
    key: str


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapped image, as the kernel has it. `address` is the address of its client in the cluster."""

    number: int
    image: volumes.NetworkImage
    address: str
    device: int
    is_readonly: bool


def _modprobe() -> None:
    """Load the module, if possible; sysfs then shows the bus."""
    with (
        syscalls.translating("cannot load the module rbd"),
        contextlib.suppress(FileNotFoundError, subprocess.SubprocessError),
    ):
        subprocess.run(
            ("modprobe", "rbd"), timeout=_MODPROBE_S, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelRbd:
    """The kernel's client of this host, for the node `owner`. Every method blocks. Tests give another `bus`."""

    owner: str = ""
    bus: str = BUS
    write: Callable[[str, bytes], None] = syscalls.write_attribute
    load_module: Callable[[], None] = _modprobe

    def obstacle(self) -> str:
        """The reason why this kernel maps no images; empty if it does. Loads the module if possible."""
        if not listing.exists(self.bus):
            self.load_module()
        if listing.exists(self.bus):
            return "" if sees_host_network() else _NO_NETWORK
        return "this host's kernel has no driver for RBD, or its module rbd is not loaded"

    def unsupported(self, features: int) -> tuple[str, ...]:
        """The features of an image that this kernel does not know."""
        with syscalls.translating("cannot read the features of the kernel's driver for RBD"):
            supported = int(syscalls.read_attribute(f"{self.bus}/supported_features"), 16)
        unknown = features & ~supported
        return tuple(
            _FEATURES.get(bit, f"bit {bit}")
            for bit in range(unknown.bit_length())
            if unknown >> bit & 1
        )

    def find(self, image: volumes.NetworkImage) -> Mapping | None:
        """crust's mapping of the image itself, if there is one."""
        for name in sorted(listing.names(f"{self.bus}/devices"), key=int):
            if mapping := self._read(int(name), image):
                return mapping
        return None

    def map(self, image: volumes.NetworkImage, login: Login, *, readonly: bool) -> Mapping:
        """Map the image, which is not mapped. Raises `KernelRefusesImage`."""
        key = self._mark + image.image
        options = [
            f"name={login.user}", f"key={key}", "noshare", f"ms_mode={login.mode}",
            f"mount_timeout={_MOUNT_S}", f"lock_timeout={_LOCK_S}",
        ]  # fmt: skip
        if image.namespace:
            options.append(f"_pool_ns={image.namespace}")
        if readonly:
            options.append("ro")
        words = (",".join(login.monitors), ",".join(options), image.pool, image.image, "-")
        named = (*login.monitors, login.user, image.pool, image.namespace, image.image)
        for word in filter(None, named):  # the kernel splits the line by spaces and commas
            if not _PLAIN.fullmatch(word):
                raise errors.InvalidRequest(f"the kernel does not take {word!r}")
        try:
            secret = base64.b64decode(login.key, validate=True)
        except binascii.Error:
            raise errors.Refused("the key of a user of Ceph is not base64") from None
        with thread_key("ceph", key, secret), host_network():
            try:
                self.write(self._entry("add"), " ".join(words).encode())
            except OSError as err:
                # not chained: the line has no secret, and still belongs in no traceback
                raise KernelRefusesImage(str(image), err.errno or 0) from None
        mapping = self.find(image)
        if mapping is None:
            raise KernelRefusesImage(str(image), errno.ENODEV)
        return mapping

    def unmap(self, mapping: Mapping) -> None:
        """Unmap the image; success if it is not mapped. Raises `DeviceInUse`."""
        line = str(mapping.number).encode()
        with syscalls.translating(f"cannot unmap the image {mapping.image}"):
            try:
                self.write(self._entry("remove"), line)
            except OSError as err:
                if err.errno == errno.ENOENT:
                    return
                if err.errno == errno.EBUSY:
                    raise users.in_use(devices.node_of(mapping.device)) from None
                raise

    def refresh(self, mapping: Mapping) -> None:
        """Give the device the image's size now: the cluster tells a read-only mapping of no change."""
        with syscalls.translating(f"cannot refresh the image {mapping.image}"):
            self.write(f"{self.bus}/devices/{mapping.number}/refresh", b"1")

    def device(self, mapping: Mapping) -> volumes.BlockSource:
        """The mapping's device. Raises `devices.DeviceNodeMissing`."""
        path = devices.node_of(mapping.device)
        return volumes.BlockSource(path, devices.identify(path))

    def size_bytes(self, mapping: Mapping) -> int:
        with syscalls.translating(f"cannot look at the mapping {mapping.number}"):
            return int(syscalls.read_attribute(f"{self.bus}/devices/{mapping.number}/size"))

    @property
    def _mark(self) -> str:
        return f"{_KEY}{hashlib.sha256(self.owner.encode()).hexdigest()[:12]}."

    def _entry(self, name: str) -> str:
        single = f"{self.bus}/{name}_single_major"
        return single if listing.exists(single) else f"{self.bus}/{name}"

    def _read(self, number: int, image: volumes.NetworkImage) -> Mapping | None:
        """The mapping of that number; None if it belongs to another image or owner, or is unmapped meanwhile."""
        directory = f"{self.bus}/devices/{number}"

        def text(name: str) -> str:
            return syscalls.read_attribute(f"{directory}/{name}")

        with syscalls.translating(f"cannot look at the mapping {number}"):
            try:
                if text("name") != image.image or text("current_snap") != "-":
                    return None
                options = text("config_info").split(" ")[1].split(",")
                is_ours = any(option.startswith(f"key={self._mark}") for option in options)
                place = text("cluster_fsid"), text("pool"), text("pool_ns")
                if not is_ours or place != (image.cluster, image.pool, image.namespace):
                    return None
                device = os.makedev(int(text("major")), int(text("minor")))
                return Mapping(number, image, text("client_addr"), device, "ro" in options)
            except OSError as err:
                if err.errno in (errno.ENOENT, errno.ENODEV):
                    return None
                raise


@contextlib.contextmanager
def thread_key(kind: str, description: str, payload: bytes) -> Iterator[None]:
    """A key of this thread's own keyring (keyrings(7)), for its calls inside the block; no other thread sees it.

    The kernel's client takes a secret in its options, which stay readable in sysfs, or the description of a key. It
    looks the key up in the thread that maps, and has a copy when the block ends. Raises translated errors of the
    kernel, without the payload.
    """
    numbers = _KEY_CALLS.get(os.uname().machine)
    if numbers is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise errors.Unsupported(
            "cannot give the kernel a key", why=f"crust does not know how on {os.uname().machine}"
        )
    add_key, keyctl = numbers
    with syscalls.translating(
        f"cannot give the kernel a key of the type {kind}",
        hint="in a container, allow add_key and keyctl: its seccomp profile may refuse them",
    ):
        serial = syscalls.call(
            add_key, kind.encode(), description.encode(), payload, len(payload), _THREAD_KEYRING
        )
    try:
        yield
    finally:
        with syscalls.translating("cannot remove a key from the kernel"):
            syscalls.call(keyctl, _INVALIDATE, serial, 0, 0, 0)


def sees_host_network() -> bool:
    """Whether this thread is in the host's network namespace, or can enter it."""
    return listing.exists(_INITIAL_ONLY) or not _is_first()


@contextlib.contextmanager
def host_network() -> Iterator[None]:
    """Run the block in the host's network namespace; the caller has asked `sees_host_network`."""
    if listing.exists(_INITIAL_ONLY) or _is_first():
        yield
        return
    from pyroute2 import netns  # 10 MiB, which only a driver in a pod's network needs, once it maps

    with (
        syscalls.opened(_OWN, "cannot use the host's network namespace") as pod,
        syscalls.closing(os.open(_FIRST, os.O_RDONLY)) as host,
    ):
        netns.setns(host)
        try:
            yield
        finally:
            netns.setns(pod)


def _is_first() -> bool:
    with syscalls.translating("cannot look at the network namespaces"):
        return os.path.samefile(_OWN, _FIRST)


THIS_HOST = KernelRbd()
