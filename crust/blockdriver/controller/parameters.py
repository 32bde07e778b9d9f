"""The parameters of a StorageClass, read once at CreateVolume.

An unknown key is refused: a misspelt one would have no effect for the life of the volume. Keys of sidecars
(`csi.storage.k8s.io/…`, from --extra-create-metadata) do not concern the volume and are not kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from crust import deferral_keys, errors, volumes
from crust.blockdriver.controller import io_limit_parameters
from crust.deferral_keys import DEFER, ENCRYPTION, FORMAT_IN, RUNTIME_HANDLER, Defer
from crust.host.filesystems import mkfs_options

FS_TYPE = "csi.storage.k8s.io/fstype"
_SIDECARS = "csi.storage.k8s.io/"
_IN_CONTEXTS = (_SIDECARS, "storage.kubernetes.io/")
"""The attributes of a PersistentVolume hold the provisioner's identity under the second prefix."""
_IN_CONTEXT = (DEFER, RUNTIME_HANDLER, FORMAT_IN, ENCRYPTION)
KEYS = (FS_TYPE, *_IN_CONTEXT, *mkfs_options.KEYS, *io_limit_parameters.KEYS)
_DEFER_VALUES = tuple(each.value for each in Defer)


class UnknownParameter(errors.InvalidRequest):
    """A parameter that this driver does not know."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the parameter {key[:128]!r} is not known",
            why=f"this driver knows {', '.join(KEYS)}",
            hint="correct the StorageClass",
        )
        self.key = key


class InvalidParameter(errors.InvalidRequest):
    """A parameter with an invalid value."""

    def __init__(self, key: str, value: str, allowed: str) -> None:
        super().__init__(
            f"the parameter {key} cannot be {value[:64]!r}",
            why=f"it must be {allowed}",
            hint="correct the StorageClass",
        )
        self.key = key


@dataclass(frozen=True, slots=True)
class Parameters:
    """The decoded parameters. `kept` is recorded, and decides whether two requests differ."""

    fs_type: str
    kept: dict[str, str]
    limits: volumes.IoLimits = volumes.IoLimits()  # noqa: RUF009 - frozen
    """The first I/O limits; mutable parameters override them."""

    @property
    def volume_context(self) -> dict[str, str]:
        """The keys that every later call gets: who mounts, and nothing that may change."""
        return {key: self.kept[key] for key in _IN_CONTEXT if key in self.kept}


def parse(parameters: Mapping[str, str], fs_types: tuple[str, ...]) -> Parameters:
    """Read parameters.

    Raises `UnknownParameter`, `InvalidParameter`, `deferral_keys.InvalidDeferKey`,
    `io_limit_parameters.InvalidIoLimit`.
    """
    kept: dict[str, str] = {}
    for key, value in parameters.items():
        if key in KEYS:
            kept[key] = _checked(key, value, fs_types)
        elif not key.startswith(_SIDECARS):
            raise UnknownParameter(key)
    deferral_keys.formats_in_guest(kept)
    limits = io_limit_parameters.changed(volumes.IoLimits(), io_limit_parameters.among(kept))
    return Parameters(kept.get(FS_TYPE, ""), kept, limits)


def without_sidecars(context: Mapping[str, str]) -> dict[str, str]:
    """The part of a volume context from the CO that this driver gave."""
    return {key: value for key, value in context.items() if not key.startswith(_IN_CONTEXTS)}


def _checked(key: str, value: str, fs_types: tuple[str, ...]) -> str:
    if key == FS_TYPE and value not in fs_types:
        raise InvalidParameter(key, value, f"one of {', '.join(fs_types)}")
    if key == DEFER and value not in _DEFER_VALUES:
        raise InvalidParameter(key, value, f"one of {', '.join(_DEFER_VALUES)}")
    if key == RUNTIME_HANDLER and not value:
        raise InvalidParameter(key, value, "the name of a runtime handler")
    if key in mkfs_options.KEYS and (allowed := mkfs_options.allowed(key, value)):
        raise InvalidParameter(key, value, allowed)
    return value
