"""The keys by which a volume says how it is deferred. No other file spells them.

A StorageClass has them as parameters; CreateVolume returns them in the volume context, which every later call
carries. A PersistentVolume made by hand has them as volumeAttributes. Proxy, shim and driver read the same keys.
"""

import enum
import re
from collections.abc import Mapping, MutableMapping
from typing import Literal

from crust.core import errors, volumes

PREFIX = "crust.dev/"
"""No other driver's key begins with it: a shim removes these keys from the requests to a wrapped driver."""

DEFER = "crust.dev/defer"
RUNTIME_HANDLER = "crust.dev/runtime-handler"
CREATED_EMPTY = "crust.dev/created-empty"
"""True: only kernels that the volume was published to have written it; the guest may format it if it is blank."""
ATTACHES = "crust.dev/attaches"
"""In the manifest of GetPluginInfo: whether the driver's controller publishes to nodes, wherever it runs."""
FORMAT_IN = "crust.dev/format-in"
ENCRYPTION = "crust.dev/encryption"
GROW_IN = "crust.dev/grow-in"
PASSPHRASE = "passphrase"
"""The key of the secret that opens an encrypted volume: in a stage or a publish, and in a deferred mount."""
USER_ID = "userID"
USER_KEY = "userKey"
"""The keys of the secret with a Ceph user: in a stage or a publish; the key alone also in a deferred mount."""
KUBERNETES = "csi.storage.k8s.io/"
"""The prefix of the keys that the kubelet and the sidecars of Kubernetes add."""
INLINE = f"{KUBERNETES}ephemeral"
"""The kubelet's key of a volume that a pod's manifest declares: the publish creates it, the unpublish deletes it."""
POD_INFO = f"{KUBERNETES}pod."
"""The prefix of the kubelet's keys that name the pod of a publish."""
POD_NAMES = (f"{POD_INFO}namespace", f"{POD_INFO}name")
_INLINE_ID = re.compile(r"csi-[0-9a-f]{64}")
EXT4_BYTES_PER_INODE = "crust.dev/ext4-bytes-per-inode"
EXT4_RESERVED_PERCENT = "crust.dev/ext4-reserved-percent"


class Defer(enum.Enum):
    """The values of `DEFER`."""

    ALWAYS = "always"
    NEVER = "never"
    RUNTIME_CLASS = "runtime-class"
    """The RuntimeClass of each pod decides."""


FormatIn = Literal["host", "guest", "luks"]
"""The kernels that may make and parse a volume's filesystem: any, guests alone, guests alone and in LUKS."""


class InvalidDeferKey(errors.InvalidRequest):
    def __init__(self, key: str, value: str, allowed: str) -> None:
        super().__init__(
            f"whether and how to defer the mount cannot be decided: {key} is {value[:64]!r}",
            why=f"it must be {allowed}",
        )


def defer(context: Mapping[str, str]) -> Defer | None:
    """The volume's choice; None if its context has none. Raises `InvalidDeferKey`."""
    value = context.get(DEFER)
    if value is None:
        return None
    try:
        return Defer(value)
    except ValueError:
        allowed = ", ".join(choice.value for choice in Defer)
        raise InvalidDeferKey(DEFER, value, f"one of {allowed}") from None


def may_defer(context: Mapping[str, str]) -> bool:
    """Whether a publish of the volume may be deferred: a context without a choice is no answer, so it may.

    After `never` only a CO's own flag defers it. For detaches and stages; raises nothing.
    """
    return context.get(DEFER) != Defer.NEVER.value or ENCRYPTION in context or FORMAT_IN in context


def guest_format(context: Mapping[str, str]) -> volumes.GuestFormat | None:
    """The options with which the guest formats the volume; None if it must not. Raises `InvalidDeferKey`."""
    created_empty = context.get(CREATED_EMPTY, "false")
    if created_empty not in ("true", "false"):
        raise InvalidDeferKey(CREATED_EMPTY, created_empty, "'true' or 'false'")
    if created_empty == "false":
        return None
    return volumes.GuestFormat(
        _number(context, EXT4_BYTES_PER_INODE), _number(context, EXT4_RESERVED_PERCENT)
    )


def of_format(options: volumes.GuestFormat) -> dict[str, str]:
    """The keys of a context that `guest_format` reads these options from."""
    numbers = {
        EXT4_BYTES_PER_INODE: options.ext4_bytes_per_inode,
        EXT4_RESERVED_PERCENT: options.ext4_reserved_percent,
    }
    return {key: str(value) for key, value in numbers.items() if value is not None}


def encryption(context: Mapping[str, str]) -> volumes.Encryption | None:
    """The layer between device and filesystem; None without one. Raises `InvalidDeferKey`."""
    value = context.get(ENCRYPTION)
    if value is None:
        return None
    if value != volumes.Encryption.LUKS.value:
        raise InvalidDeferKey(ENCRYPTION, value, "luks")
    _check_not_never(context, ENCRYPTION)
    return volumes.Encryption.LUKS


def format_in(context: Mapping[str, str]) -> FormatIn:
    """The kernels that may make and parse the volume's filesystem. Raises `InvalidDeferKey`."""
    value = context.get(FORMAT_IN)
    if value not in (None, "guest"):
        raise InvalidDeferKey(FORMAT_IN, value, "guest")
    if value is not None:
        _check_not_never(context, FORMAT_IN)
    if encryption(context) is not None:
        return "luks"
    return "host" if value is None else "guest"


def strictest_format_in(context: Mapping[str, str]) -> FormatIn:
    """As `format_in`, also of a context with invalid values: any value of a key restricts. Raises nothing."""
    if ENCRYPTION in context:
        return "luks"
    return "guest" if FORMAT_IN in context else "host"


def grows_on_host(context: Mapping[str, str]) -> bool:
    """Whether the class lets the host grow the filesystem of a guest. Raises `InvalidDeferKey`."""
    value, allowed = context.get(GROW_IN), "host"
    if FORMAT_IN in context or ENCRYPTION in context:
        value, allowed = value and "", f"left out where {FORMAT_IN} or {ENCRYPTION} is set"
    if value not in (None, "host"):
        raise InvalidDeferKey(GROW_IN, context[GROW_IN], allowed)
    return value is not None


def passphrase(volume_id: str, *secrets: Mapping[str, str]) -> str:
    """The passphrase from the first of `secrets` that has it. Raises `PassphraseMissing`."""
    for secret in secrets:
        if secret.get(PASSPHRASE):
            return secret[PASSPHRASE]
    raise errors.NotReady.named(
        "PassphraseMissing",
        f"volume {volume_id[:128]!r} is encrypted, and its passphrase is not known",
        why=f"the publish has no secret {PASSPHRASE!r}, and the stage had none, or this process was started "
        "after it: secrets are kept in memory only",
    )


def ceph_user(volume_id: str, *secrets: Mapping[str, str]) -> tuple[str, str]:
    """The name and key of the Ceph user, from the first of `secrets` that has both. Raises `CephKeyMissing`."""
    for secret in secrets:
        if secret.get(USER_ID) and secret.get(USER_KEY):
            return secret[USER_ID].removeprefix("client."), secret[USER_KEY]
    raise errors.NotReady.named(
        "CephKeyMissing",
        f"volume {volume_id[:128]!r} is in a Ceph cluster, and the key of a user of it is not known",
        why=f"the call has no secrets {USER_ID!r} and {USER_KEY!r}, and the stage had none, or this process "
        "was started after it: secrets are kept in memory only",
    )


def check_host_publish(volume_id: str, format_in: FormatIn, *, is_block: bool) -> None:
    """Raise `EncryptedOnHost`, `FilesystemOfGuest` for a publish on the host that the volume forbids.

    An encrypted volume is refused as a raw device too: a pod would write its data there as it is.
    """
    if format_in == "luks":
        raise errors.NotReady.named(
            "EncryptedOnHost",
            f"volume {volume_id[:128]!r} cannot be published on this host",
            why=f"{ENCRYPTION} says that it is encrypted, and only a guest opens it: the host would show a pod the "
            "encrypted bytes, or keep its data unencrypted",
        )
    if format_in == "guest" and not is_block:
        raise errors.NotReady.named(
            "FilesystemOfGuest",
            f"volume {volume_id[:128]!r} cannot be mounted on this host",
            why=f"{FORMAT_IN} is guest: its filesystem is untrusted, and no host parses it",
        )


def _check_not_never(context: Mapping[str, str], key: str) -> None:
    if defer(context) is Defer.NEVER:
        raise InvalidDeferKey(
            DEFER, Defer.NEVER.value, f"always or runtime-class where {key} is set"
        )


def is_inline(context: Mapping[str, str], volume_id: str = "") -> bool:
    """Whether the volume is its pod's own: an unpublish deletes it, so a failed publish is not undone by one.

    A kubelet sets the key only for a driver with podInfoOnMount, and makes the id of such a volume in any case
    (makeVolumeHandle: "csi-" and 64 hex digits).
    """
    return context.get(INLINE) == "true" or _INLINE_ID.fullmatch(volume_id) is not None


def remove(context: MutableMapping[str, str]) -> None:
    """Remove crust's keys from parameters or from a volume context."""
    for key in [name for name in context if name.startswith(PREFIX)]:
        del context[key]


def _number(context: Mapping[str, str], key: str) -> int | None:
    value = context.get(key)
    if value is None:
        return None
    if not volumes.is_number(value):
        raise InvalidDeferKey(key, value, "a decimal number")
    return int(value)


def raw_block_volume() -> errors.InvalidRequest:
    return errors.InvalidRequest.named(
        "CannotDeferRawBlock",
        "the volume cannot be published with deferral",
        why="it is published as a raw block device, which has no filesystem to mount",
    )
