"""The kinds of values that settings have. A pattern has its meaning in words here, for whoever is refused by it."""

from typing import Annotated, Literal

from pydantic import Field

CsiProfile = Literal["1.12", "1.13"]

_PATH = r"^/"
_ADDRESS = r"^$|^([0-9A-Za-z.-]+|\[[0-9a-f:.]+\]):[0-9]{1,5}$"
_DRIVER_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
MEANT = {
    _PATH: "an absolute path, without unix://",
    _ADDRESS: "host:port or [IPv6]:port, e.g. 127.0.0.1:9090",
    _DRIVER_NAME: "a driver's name: letters, digits, '.', '-', '_', at most 63",
}
"""The patterns of settings, in words."""

AbsolutePath = Annotated[str, Field(pattern=_PATH, max_length=4095)]
SocketPath = Annotated[str, Field(pattern=_PATH, max_length=107)]
MetricsAddress = Annotated[str, Field(pattern=_ADDRESS, max_length=261)]
CsiName = Annotated[str, Field(pattern=_DRIVER_NAME)]
"""The name of a CSI driver, as GetPluginInfo reports it."""
