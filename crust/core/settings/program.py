"""The common part of all daemons' settings: kinds of values, and the tables that several daemons have.

Each pattern has its meaning in words here, for the message of a refusal.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from crust.core import volumes

CsiProfile = Literal["1.12", "1.13"]

_PATH = r"^/"
_GROUP = r"^/[^\n]*[^/\n]$"
_ADDRESS = r"^$|^([0-9A-Za-z.-]+|\[[0-9a-f:.]+\]):[0-9]{1,5}$"
_DRIVER_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
_POOL_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
_NAMESPACE = r"^[^/@]*$"
_HANDLER = rf"^{volumes.HANDLER_NAME}$"
_FILESYSTEM = r"^[a-z0-9]{1,32}$"
_KERNEL = r"^([0-9]{1,4}\.[0-9]{1,4}[!-~]{0,50})?$"
MEANT = {
    _PATH: "an absolute path, without unix://",
    _GROUP: "the path of a control group below the root, e.g. /system.slice/agent.service",
    _ADDRESS: "host:port or [IPv6]:port, e.g. 127.0.0.1:9090",
    _DRIVER_NAME: "a driver's name: letters, digits, '.', '-', '_', at most 63",
    _POOL_NAME: "a pool's name: small letters, digits, '-', at most 63",
    _NAMESPACE: "the name of a namespace of a Ceph pool, without '/' and '@'",
    _HANDLER: "a runtime's name: small letters, digits, '.', '-', at most 63",
    _FILESYSTEM: "a filesystem's name: small letters and digits, at most 32",
    _KERNEL: "a kernel's version as `uname -r` says it, e.g. 6.1.0-40-amd64",
}
"""The patterns of settings, in words."""

ControlGroup = Annotated[str, Field(pattern=_GROUP, max_length=4095)]
AbsolutePath = Annotated[str, Field(pattern=_PATH, max_length=4095)]
SocketPath = Annotated[str, Field(pattern=_PATH, max_length=107)]
MetricsAddress = Annotated[str, Field(pattern=_ADDRESS, max_length=261)]
CsiName = Annotated[str, Field(pattern=_DRIVER_NAME)]
"""The name of a CSI driver, as GetPluginInfo reports it."""
PoolName = Annotated[str, Field(pattern=_POOL_NAME)]
HandlerName = Annotated[str, Field(pattern=_HANDLER)]
Filesystem = Annotated[str, Field(pattern=_FILESYSTEM)]
KernelVersion = Annotated[str, Field(pattern=_KERNEL)]
CephNamespace = Annotated[str, Field(pattern=_NAMESPACE, max_length=128)]


def check_differ(tables: str, **values: Sequence[Any]) -> None:
    """Raise `ValueError` if two tables of a list, of which these are the values of some keys, have the same value."""
    for key, of_tables in values.items():
        for number, value in enumerate(of_tables, 1):
            if (first := of_tables.index(value) + 1) != number:
                both = f"tables {first} and {number} of {tables} have the {key} {value!r}"
                raise ValueError(f"{both}: give each its own")


class Table(BaseModel):
    """A table of a settings file, which has no other keys and never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    gone: ClassVar[Mapping[str, str]] = {}
    """Settings of the version before, and what to do instead. For one more version a file may have them."""


class ProgramSettings(Table):
    """Settings of every daemon."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is logged. Level info has one line per RPC."""

    log_format: Literal["json", "console"] = "console"
    """json for a log collector."""

    metrics_address: MetricsAddress = ""
    """Where Prometheus reads the metrics, host:port or [IPv6]:port; empty: no metrics. There is no authentication."""

    excepted_groups: tuple[ControlGroup, ...] = ()
    """Control groups whose processes the kernel may hide from this daemon. A volume that they use is not seen."""

    traces: bool = False
    """Whether spans go to the OpenTelemetry collector that OTEL_EXPORTER_OTLP_ENDPOINT names; extra otel."""

    @classmethod
    def at_endpoint(cls, values: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
        """The settings of a program whose CSI socket is `endpoint`. Raises `ValueError` if it has no such socket."""
        return {**values, "socket": endpoint}


class KubernetesAccess(Table):
    """How the Kubernetes API is reached."""

    kubeconfig: AbsolutePath | Literal[""] = ""
    """Empty: by the service account of the pod that the program runs in."""
