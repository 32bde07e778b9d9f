"""The I/O limits of a volume, as parameters of a VolumeAttributesClass or a StorageClass.

Four keys, each a number per second: `readIOPS`, `writeIOPS`, `readBytesPerSecond`, `writeBytesPerSecond`. An omitted
key keeps its value (CSI ControllerModifyVolume), which for a new volume is no limit; 0 removes a limit. So a class
that omits a key keeps the value of an earlier class: classes between which volumes move must name all four.

Numbers have Kubernetes' form: 3000, 3k, 64Ki, 10Mi. They have a minimum: at a few bytes per second the unmount of the
volume would take days.

CreateVolume reads the parameters of a StorageClass once. It refuses an unknown key: a misspelt key would have no
effect for the life of the volume. Keys of sidecars (`csi.storage.k8s.io/…`, from --extra-create-metadata) do not
concern the volume and are not kept.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from crust.core import deferral_keys, errors
from crust.core.deferral_keys import DEFER, ENCRYPTION, FORMAT_IN, RUNTIME_HANDLER, Defer
from crust.host.filesystems import mkfs

_QUANTITY = re.compile(r"(0|[1-9][0-9]{0,14})(Ki|Mi|Gi|Ti|k|M|G|T)?")
"""A whole number in Kubernetes' form, without fraction and sign."""
_UNITS = {
    "": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40,
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
}  # fmt: skip
_IOPS = (10, 10**9)
_BYTES = (64 * 1024, 10**15)
_RANGES = {
    "readIOPS": ("read_iops", *_IOPS),
    "writeIOPS": ("write_iops", *_IOPS),
    "readBytesPerSecond": ("read_bytes_per_second", *_BYTES),
    "writeBytesPerSecond": ("write_bytes_per_second", *_BYTES),
}
"""The field of `IoLimits`, the least and the most."""
LIMIT_KEYS = tuple(_RANGES)

Changes = tuple[tuple[str, int], ...]
"""Fields of `IoLimits` and their new values, in order of the fields' names."""


def parse_mutable(mutable_parameters: Mapping[str, str]) -> Changes:
    """The changes; keys of sidecars are ignored. Raises `UnknownMutableParameter`, `InvalidIoLimit`."""
    for key in mutable_parameters:
        if key not in _RANGES and not key.startswith(deferral_keys.KUBERNETES):
            raise errors.InvalidRequest.named(
                "UnknownMutableParameter",
                f"the mutable parameter {key[:128]!r} is not known",
                why=f"this driver knows {', '.join(LIMIT_KEYS)}",
            )
    changes = []
    for key, (name, least, most) in _RANGES.items():
        if key not in mutable_parameters:
            continue
        match = _QUANTITY.fullmatch(mutable_parameters[key])
        number = int(match[1]) * _UNITS[match[2] or ""] if match else -1
        if number != 0 and not least <= number <= most:
            raise errors.InvalidRequest.named(
                "InvalidIoLimit",
                f"the parameter {key} cannot be {mutable_parameters[key][:64]!r}",
                why=f"it must be 0 (no limit) or from {least} to {most} per second, such as 3000 or 64Mi",
            )
        changes.append((name, number))
    return tuple(sorted(changes))


FS_TYPE = f"{deferral_keys.KUBERNETES}fstype"
PROVISIONING = "crust.dev/provisioning"
"""`thin` or `thick`: whether a volume has its blocks when it writes them, or all of them from its creation on."""
POOL = "crust.dev/pool"
"""The name of the pool, if the driver has several; `crust.blockdriver.pools` reads it, and nothing below."""
IN_CONTEXTS = (deferral_keys.KUBERNETES, "storage.kubernetes.io/")
"""The attributes of a PersistentVolume hold the provisioner's identity under the second prefix."""
_IN_CONTEXT = (DEFER, RUNTIME_HANDLER, FORMAT_IN, ENCRYPTION, deferral_keys.GROW_IN)
KEYS = (FS_TYPE, PROVISIONING, *_IN_CONTEXT, *mkfs.KEYS, *LIMIT_KEYS)
_DEFER_VALUES = tuple(value.value for value in Defer)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The decoded parameters. `kept` is recorded, and decides whether two requests differ."""

    fs_type: str
    kept: dict[str, str]
    thick: bool | None
    """None: the driver's setting decides."""
    limits: Changes
    """The first I/O limits; mutable parameters override them."""


def parse(parameters: Mapping[str, str], fs_types: tuple[str, ...]) -> Parameters:
    """Read; raises `UnknownParameter`, `InvalidParameter`, `deferral_keys.InvalidDeferKey`, `InvalidIoLimit`."""
    choices = {FS_TYPE: fs_types, PROVISIONING: ("thin", "thick"), DEFER: _DEFER_VALUES}
    for key, value in parameters.items():
        if key not in KEYS and not key.startswith(deferral_keys.KUBERNETES):
            raise errors.InvalidRequest.named(
                "UnknownParameter",
                f"the parameter {key[:128]!r} is not known",
                why=f"this driver knows {', '.join((POOL, *KEYS))}",
            )
        allowed = mkfs.allowed(key, value) if key in mkfs.KEYS else ""
        if value not in choices.get(key, (value,)):
            allowed = f"one of {', '.join(choices[key])}"
        if key == RUNTIME_HANDLER and not value:
            allowed = "the name of a runtime handler"
        if allowed:
            raise errors.InvalidRequest.named(
                "InvalidParameter",
                f"the parameter {key} cannot be {value[:64]!r}",
                why=f"it must be {allowed}",
            )
    kept = {key: value for key, value in parameters.items() if key in KEYS}
    deferral_keys.format_in(kept)
    if deferral_keys.GROW_IN in kept:
        deferral_keys.grows_on_host(kept)
    first = parse_mutable({key: value for key, value in kept.items() if key in LIMIT_KEYS})
    thick = kept[PROVISIONING] == "thick" if PROVISIONING in kept else None
    return Parameters(kept.get(FS_TYPE, ""), kept, thick, first)


def volume_context(kept: Mapping[str, str]) -> dict[str, str]:
    """The recorded parameters that every later call gets: the choice of the mounter, and nothing that may change."""
    return {key: kept[key] for key in _IN_CONTEXT if key in kept}
