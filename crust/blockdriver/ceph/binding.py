"""librados and librbd by the bindings that Ceph ships for Python; stubs/ has the types of what crust uses of them.

They are two extension modules, `rados` and `rbd`, that a distribution builds for its own Python and that no package
index has. So a program that needs them looks for them once, at its start, and fails then and not at the first volume.
Nothing here is imported unless the settings name a Ceph cluster.
"""

import functools
import importlib
import sys
import sysconfig
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from crust.core import errors

if TYPE_CHECKING:
    import rados
    import rbd

Rados: TypeAlias = "rados.Rados"
Ioctx: TypeAlias = "rados.Ioctx"
WriteOp: TypeAlias = "rados.WriteOp"
Images: TypeAlias = "rbd.RBD"
Image: TypeAlias = "rbd.Image"


@dataclass(frozen=True, slots=True)
class Binding:
    rados: Any
    rbd: Any

    @property
    def failures(self) -> tuple[type[Exception], type[Exception]]:
        """The errors of their calls; each has `errno`, or none."""
        return (self.rados.Error, self.rbd.Error)

    @property
    def images(self) -> Images:
        """librbd's methods for images by name."""
        return cast("Images", self.rbd.RBD())

    def connection(self, user: str, options: dict[str, str]) -> Rados:
        """A connection that is not open yet; no configuration file is read."""
        return cast("Rados", self.rados.Rados(rados_id=user, conf=options))


@functools.cache
def load() -> Binding:
    """The binding; raises `CephBindingMissing`."""
    modules = {}
    for name in ("rados", "rbd"):
        try:
            modules[name] = importlib.import_module(name)
        except ImportError as err:
            version = ".".join(map(str, sys.version_info[:2]))
            module = f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
            raise errors.NotReady.named(
                "CephBindingMissing",
                f"Ceph cannot be used: this Python {version} has no module {name!r}",
                why=str(err),
                hint="install python3-rados and python3-rbd of a distribution with this Python, and make "
                f"{module} visible to this environment",
            ) from err
    return Binding(modules["rados"], modules["rbd"])
