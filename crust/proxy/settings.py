"""The settings of `crust proxy`, and of the drivers that it serves."""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field

from crust.core.settings.program import (
    AbsolutePath,
    CsiName,
    KubernetesAccess,
    ProgramSettings,
    SocketPath,
    Table,
    check_differ,
)


class ServedDriver(Table):
    """A CSI driver that the proxy serves."""

    name: CsiName
    """The driver's name, as GetPluginInfo reports it."""

    socket: SocketPath
    """The socket that the CO calls, e.g. /var/lib/kubelet/plugins/<driver>/csi.sock."""

    backend: SocketPath
    """The shim's socket."""

    defer: Literal["", "always", "never", "runtime-class"] = ""
    """Decides where the volume says nothing: `crust.dev/defer` in its context comes first. Empty: never."""

    register_plugin: bool = True
    """Whether the proxy registers it with the kubelet, if `plugins_registry` is set."""


class KubernetesSettings(KubernetesAccess):
    """Access to the Kubernetes API, for volumes whose pod's RuntimeClass decides."""

    runtime_handlers: Annotated[tuple[str, ...], Field(min_length=1)]
    """The handlers (RuntimeClass.handler) whose pods get deferred volumes. The runtime registers by the same name."""

    node_name: Annotated[str, Field(min_length=1, max_length=253)] = os.uname().nodename
    """The name of this node's Node object. Default: the host's name."""


class ProxySettings(ProgramSettings):
    """`crust proxy`."""

    run_dir: AbsolutePath = "/run/crust"
    """The directory of the proxy's own sockets and locks. It is made 0700; an existing one keeps its mode."""

    volumes_root: AbsolutePath = "/run/crust/volumes"
    """The handoff directory. It belongs on a tmpfs: its entries are invalid after a reboot."""

    target_roots: Annotated[tuple[AbsolutePath, ...], Field(min_length=1)] = ("/var/lib/kubelet",)
    """Targets may be deferred below these directories: the kubelet's root."""

    drivers: tuple[ServedDriver, ...] = ()
    """The CSI drivers on the node."""

    plugins_registry: AbsolutePath | Literal[""] = ""
    """The kubelet's /var/lib/kubelet/plugins_registry, where drivers are registered. Empty: others register them."""

    kubernetes: KubernetesSettings | None = None
    """Access to the Kubernetes API, a table of its own. Without it `runtime-class` cannot be decided."""

    check_propagation: bool = True
    """Refuse to start where mounts would not reach the host. False: CO and runtimes live in our mount namespace."""

    handler_grace_s: Annotated[float, Field(ge=0, le=60)] = 3.0
    """After a start, how long a call waits for its handler to register again. Handlers reconnect within a second."""

    @pydantic.model_validator(mode="after")
    def _check_drivers(self) -> Self:
        if not self.drivers:
            raise ValueError(
                "drivers is empty: name one as [[drivers]] in the settings file, or by --driver"
            )
        for key in ("name", "socket", "backend"):
            check_differ("drivers", **{key: [getattr(driver, key) for driver in self.drivers]})
        return self

    @classmethod
    def at_endpoint(cls, values: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
        """`endpoint` becomes the socket of the one driver without a socket."""
        drivers = values.get("drivers", ())
        is_list = isinstance(drivers, list | tuple)
        if not is_list or not all(isinstance(driver, Mapping) for driver in drivers):
            return dict(values)  # refused by its type
        sockets = [str(driver.get("socket") or "") for driver in drivers]
        if endpoint in sockets:
            return dict(values)
        if sockets.count("") != 1:
            raise ValueError(
                "CSI_ENDPOINT is set, and it is the socket of the one driver that has no socket: "
                f"{sockets.count('')} of {len(drivers)} drivers have none"
            )
        served = [{**driver, "socket": driver.get("socket") or endpoint} for driver in drivers]
        return {**values, "drivers": tuple(served)}
