"""The settings of `crust shim`."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

import pydantic
from pydantic import Field

from crust.core.settings.program import (
    AbsolutePath,
    CsiName,
    CsiProfile,
    KubernetesAccess,
    ProgramSettings,
    SocketPath,
)


class DetachAccess(KubernetesAccess):
    """Access to the Kubernetes API, to find the users of a volume before a detach."""

    node_absent_s: Annotated[float, Field(ge=60, le=86400)] = 300.0
    """A node whose Node object is absent for so long is gone: its volumes may be detached."""


class ShimSettings(ProgramSettings):
    """`crust shim`."""

    gone: ClassVar[Mapping[str, str]] = {
        "defer": "the proxy decides: set `defer` in its table of the driver"
    }

    socket: SocketPath
    """The socket that the proxy calls."""

    driver_socket: SocketPath
    """The socket of the wrapped driver."""

    driver_name: Literal[""] | CsiName = ""
    """The driver's name for the CO. Empty: the driver's own answer, which an upgrade may change."""

    runtime_socket: SocketPath = "/run/crust/runtime.sock"
    """The proxy's Runtime API."""

    csi_profile: CsiProfile = "1.12"
    """1.12: statistics include the volume condition, which CSI 1.13 removed."""

    wrap: bool = True
    """Whether a driver without deferral is wrapped: its deferred volumes are raw block devices to it."""

    kubelet_root: AbsolutePath = "/var/lib/kubelet"
    """The kubelet's root directory, as the driver's pod has it."""

    check_propagation: bool = True
    """Refuse to start where the driver's mounts would not be seen. False: driver and shim share a mount namespace."""

    controller: bool = False
    """Whether it runs beside the driver's controller, and is called by the CSI sidecars."""

    check_detach: bool = True
    """With `controller`: refuse to detach a deferred volume unless Kubernetes knows that no node uses it. False: for
    a CO other than Kubernetes that detaches a volume only after its guest has ended."""

    kubernetes: DetachAccess | None = None
    """With `controller` and `check_detach`: access to the Kubernetes API, a table of its own. Without the table it is
    reached by the service account of the pod."""

    @pydantic.model_validator(mode="after")
    def _controller_wraps(self) -> Self:
        if self.controller and not self.wrap:
            raise ValueError(
                "controller is set, and wrap is not: without wrap it has nothing to do"
            )
        return self
