"""The settings of `crust kata`."""

from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field

from crust.core.settings.program import (
    AbsolutePath,
    Filesystem,
    HandlerName,
    KernelVersion,
    ProgramSettings,
    SocketPath,
    Table,
    check_differ,
)


class KataRuntime(Table):
    """A runtime of containerd that is Kata's Go runtime or its runtime-rs."""

    name: HandlerName
    """The runtime's name in containerd's configuration, which is also the handler of the RuntimeClass."""

    configuration: AbsolutePath
    """Kata's configuration.toml that containerd gives to it (ConfigPath)."""

    shim: AbsolutePath | Literal[""] = ""
    """Its containerd-shim-kata-v2. Needed for runtime-rs, whose version decides about its features."""

    guest_kernel: KernelVersion = ""
    """The kernel of its guests, as `uname -r` says it: the host makes no filesystem that it cannot mount."""

    unproven: bool = False
    """Give volumes to a version, a hypervisor or a block driver that was not run with crust."""


class KataSettings(ProgramSettings):
    """`crust kata`."""

    runtimes: Annotated[tuple[KataRuntime, ...], Field(min_length=1)]
    """The runtimes that get deferred volumes. Each is a runtime handler of the proxy."""

    run_dir: Annotated[str, Field(pattern=r"^/", max_length=32)] = "/run/crust/kata"
    """The daemon's own sockets, and those of the processes `crust keeper`."""

    volumes_root: AbsolutePath = "/run/crust/volumes"
    """The handoff directory."""

    handlers_socket: SocketPath = "/run/crust/handlers.sock"
    """Where the proxy takes registrations."""

    nri_socket: SocketPath = "/run/nri/nri.sock"
    """The container engine's socket for NRI plugins."""

    default_runtime: str = ""
    """containerd's default_runtime_name. Empty: a pod without a RuntimeClass can use no deferred volume."""

    filesystems: Annotated[tuple[Filesystem, ...], Field(min_length=1)] = ("ext4", "xfs")
    """The filesystems that the guest's kernel can mount."""

    kata_volumes: AbsolutePath = "/run/kata-containers/shared/direct-volumes"
    """Kata's directory of direct volumes."""

    kata_sandboxes: AbsolutePath = "/run/vc/sbs"
    """Where Kata's Go runtime writes its state."""

    kata_rs_sandboxes: AbsolutePath = "/run/kata"
    """Where runtime-rs has its sockets."""

    kata_shares: AbsolutePath = "/run/kata-containers/shared/sandboxes"
    """Where Kata has the directories that it shares with its guests."""

    @pydantic.model_validator(mode="after")
    def _check_distinct(self) -> Self:
        check_differ("runtimes", name=[runtime.name for runtime in self.runtimes])
        return self
