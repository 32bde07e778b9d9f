"""The operator's options: the driver's sockets, and the parameters of its volumes."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pydantic

from crust.core import errors
from crust.rpc import channel

MIB = 1 << 20

RUNTIME_TIMEOUT_S = 120.0
"""The time for one answer of a runtime: a virtual machine boots meanwhile."""

Profile = Literal["1.12", "1.13"]


class Parameters(pydantic.BaseModel):
    """The `--parameters` file (TOML). Every field may be left out."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    parameters: dict[str, str] = pydantic.Field(default_factory=dict)
    """The StorageClass's parameters, sent with every CreateVolume."""
    snapshot_parameters: dict[str, str] = pydantic.Field(default_factory=dict)
    """The VolumeSnapshotClass's parameters."""
    group_parameters: dict[str, str] = pydantic.Field(default_factory=dict)
    """The VolumeGroupSnapshotClass's parameters."""
    mutable_parameters: dict[str, str] = pydantic.Field(default_factory=dict)
    """The parameters that ControllerModifyVolume may set; without them its cases are skipped."""
    ephemeral_context: dict[str, str] = pydantic.Field(default_factory=dict)
    """The attributes of an inline ephemeral volume; without them its cases are skipped."""
    secrets: dict[str, str] = pydantic.Field(default_factory=dict)
    """The secrets that the driver needs to authenticate."""
    size_bytes: int = pydantic.Field(default=64 * MIB, gt=0)
    """The size of a volume."""
    raw_size_bytes: int = pydantic.Field(default=0, ge=0)
    """The size of a raw block volume, which is read from end to end; `size_bytes` without it."""
    fs_types: tuple[str, ...] = ()
    """Filesystems that the driver makes; cases use the first if the filesystem does not matter.
    Default: ext4 if CreateVolume takes it, else no name.
    """
    block: bool | None = None
    """Whether the driver takes raw block volumes. Without it, CreateVolume is tried."""
    multi_node: bool = False
    """Whether a volume can be used on several nodes at once; without it the MULTI_NODE modes are not tried."""
    other_node_id: str = ""
    """A second node that the driver knows; without it the cases of two nodes are skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of both suites. `only`, `skip` and `focus` choose cases; `strict` fails on any finding."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    focus: tuple[str, ...] = ()
    strict: bool = False
    junit: Path | None = None
    json: Path | None = None
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(RunOptions):
    """A run's options for a driver. With a `controller_socket`, `socket` is the node part's."""

    socket: str
    target_root: Path
    controller_socket: str = ""
    profile: Profile | None = None
    parameters: Parameters = field(default_factory=Parameters)
    log: Path | None = None
    restart_command: str = ""

    @property
    def sockets(self) -> str:
        """The sockets, for a message."""
        return " and ".join(filter(None, (self.socket, self.controller_socket)))


def socket_of(endpoint: str) -> str:
    """The path of a CSI endpoint, `unix:///a/csi.sock` or the bare path. Raises `errors.InvalidRequest`."""
    path = endpoint.removeprefix("unix://")
    if not path.startswith("/"):
        raise errors.InvalidRequest(
            f"the endpoint {endpoint!r} cannot be used",
            why="it is no absolute path of a socket",
            hint="give unix:///path/of/csi.sock",
        )
    channel.target_of(path)
    return path


def parameters_of(path: Path | None) -> Parameters:
    """Read the parameters file; the defaults without one. Raises `errors.InvalidRequest`."""
    if path is None:
        return Parameters()
    try:
        return Parameters.model_validate(tomllib.loads(path.read_text()))
    except (OSError, tomllib.TOMLDecodeError, pydantic.ValidationError) as err:
        mistakes = err.errors() if isinstance(err, pydantic.ValidationError) else ()
        texts = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in mistakes)
        raise errors.InvalidRequest.named(
            "InvalidParametersFile",
            f"the parameters file {path} cannot be used",
            why="; ".join(texts) or str(err),
            hint=f"correct it; its keys are {', '.join(Parameters.model_fields)}",
        ) from err
