"""The settings of `crust node`: the tables of its three parts, which have the keys of the three programs.

What the parts have in common needs to be said once: a key that is left out follows from the others. What cannot work
in one process is refused here, before anything is started: a part that nothing calls, two parts that name each
other's sockets differently, a setting of the process inside of a part.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Self

import pydantic

from crust.settings.driver import OWN_DRIVER, DriverSettings
from crust.settings.program import ProgramSettings
from crust.settings.proxy import ProxySettings
from crust.settings.shim import ShimSettings

_KUBELET_SOCKET = "/var/lib/kubelet/plugins/{name}/csi.sock"
_RUN_DIR = "/run/crust"


class NodeSettings(ProgramSettings):
    """`crust node`."""

    proxy: ProxySettings
    """As `crust proxy`. Without `drivers` and `drivers_dir` it serves our own driver to the kubelet."""

    shim: tuple[ShimSettings, ...]
    """As `crust shim`: one table, or one per driver (`[[shim]]`). Without `driver_socket` it wraps our own driver."""

    driver: DriverSettings | None = None
    """As `crust driver`. Without it our driver runs if a shim has no `driver_socket`."""

    node_name: Annotated[str, pydantic.Field(min_length=1, max_length=253)] = os.uname().nodename
    """The name of this node's Node object: the `node_id` of our driver and the `node_name` of `proxy.kubernetes`."""

    @property
    def runtime_socket(self) -> str:
        """The proxy's Runtime API."""
        return f"{self.proxy.run_dir}/runtime.sock"

    @property
    def inner_sockets(self) -> frozenset[str]:
        """The paths that only this process calls, and that have no socket."""
        shims = {each.socket for each in self.shim}
        return frozenset(shims | ({self.driver.socket} if self.driver else set()))

    @classmethod
    def at_endpoint(cls, given: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
        """As `crust proxy`; without drivers it is the socket of our own."""
        proxy = given.get("proxy", {})
        if not isinstance(proxy, Mapping):
            return dict(given)  # refused by its type
        if not (proxy.get("drivers") or proxy.get("drivers_dir")):
            proxy = {**proxy, "drivers": ({"name": _name_of(given.get("driver"))},)}
        return {**given, "proxy": ProxySettings.at_endpoint(proxy, endpoint)}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return _completed(dict(given))

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Self:
        for problem in (*self._shim_problems(), *self._driver_problems()):
            raise ValueError(problem)
        return self

    def _shim_problems(self) -> list[str]:
        backends = {each.backend for each in self.proxy.drivers}
        problems = [
            f"two tables of shim have the {key} {each!r}"
            for key in ("socket", "driver_socket")
            for each in _repeated(getattr(shim, key) for shim in self.shim)
        ]
        for shim in self.shim:
            if shim.controller:
                problems.append(
                    "shim.controller is set: a controller's shim is a process of its own"
                )
            if shim.runtime_socket != self.runtime_socket:
                problems.append(_other("shim", shim.runtime_socket, self.runtime_socket))
            if shim.socket not in backends and not self.proxy.drivers_dir:
                problems.append(
                    f"nothing calls the shim at {shim.socket}: no proxy.drivers has it as its backend"
                )
        return problems

    def _driver_problems(self) -> list[str]:
        if self.driver is None:
            return []
        problems = []
        if self.driver.socket not in {each.driver_socket for each in self.shim}:
            problems.append(
                f"nothing calls the driver at {self.driver.socket}: no shim has it as its driver_socket; leave the "
                "table driver out if another driver is wrapped"
            )
        if self.driver.runtime_socket != self.runtime_socket:
            problems.append(_other("driver", self.driver.runtime_socket, self.runtime_socket))
        return problems


def _repeated(values: Any) -> list[str]:
    seen = list(values)
    return sorted({each for each in seen if seen.count(each) > 1})


def _other(part: str, named: str, served: str) -> str:
    return f"{part}.runtime_socket is {named!r}, and the proxy of this process serves {served}: leave it out"


def _completed(given: dict[str, Any]) -> dict[str, Any]:
    """The tables, with what follows from the others. A value of a wrong type is left for the models to refuse."""
    tables = {"proxy": given.get("proxy", {}), "driver": given.get("driver")}
    shims = given.get("shim", {})
    shims = [shims] if isinstance(shims, Mapping) else shims
    if not (isinstance(tables["proxy"], Mapping) and isinstance(shims, list | tuple)):
        return given
    _check_own(tables["proxy"], *shims, tables["driver"])
    run_dir = str(tables["proxy"].get("run_dir", _RUN_DIR))
    own = {
        "socket": f"{run_dir}/driver/csi.sock",
        "run_dir": f"{run_dir}/driver",
        "runtime_socket": f"{run_dir}/runtime.sock",
        "node_id": given.get("node_name", os.uname().nodename),
    }
    if isinstance(tables["driver"], Mapping):
        own |= tables["driver"]
    shim = {
        "socket": f"{run_dir}/shim/csi.sock",
        "driver_socket": own["socket"],
        "runtime_socket": f"{run_dir}/runtime.sock",
    }
    shims = [{**shim, **each} if isinstance(each, Mapping) else each for each in shims]
    for each in shims:
        is_own = isinstance(each, dict) and each["driver_socket"] == own["socket"]
        if is_own and not each.get("controller"):
            each.setdefault("wrap", False)  # it defers by itself, in the same version
    first = shims[0] if shims and isinstance(shims[0], Mapping) else shim
    proxy = _serving(tables["proxy"], first["socket"], _name_of(tables["driver"]))
    wraps_own = any(
        isinstance(each, Mapping) and each["driver_socket"] == own["socket"] for each in shims
    )
    access = proxy.get("kubernetes")
    if isinstance(access, Mapping) and "node_name" in given:
        proxy["kubernetes"] = {"node_name": given["node_name"], **access}
    found = {**given, "proxy": proxy, "shim": tuple(shims)}
    if isinstance(tables["driver"], Mapping) or (wraps_own and tables["driver"] is None):
        found["driver"] = own
    return found


def _name_of(driver: Any) -> str:
    """The name of our own driver, by its table."""
    given = driver.get("driver_name") if isinstance(driver, Mapping) else None
    return given if isinstance(given, str) else OWN_DRIVER


def _serving(proxy: Mapping[str, Any], shim_socket: str, name: str) -> dict[str, Any]:
    """The proxy's table: without drivers it serves our own, of which CSI_ENDPOINT may have given the socket."""
    drivers = proxy.get("drivers") or ()
    if not (drivers or proxy.get("drivers_dir")):
        drivers = ({"name": name, "socket": _KUBELET_SOCKET.format(name=name)},)
    if not isinstance(drivers, list | tuple):
        return dict(proxy)
    served = [
        {"backend": shim_socket, **each}
        if isinstance(each, Mapping) and each.get("name") == name
        else each
        for each in drivers
    ]
    return {**proxy, "drivers": tuple(served)}


def _check_own(*parts: Any) -> None:
    for part in parts:
        misplaced = sorted(set(ProgramSettings.model_fields) & set(part or ()))
        if misplaced:
            raise ValueError(
                f"{', '.join(misplaced)} is a setting of the process: write it above all tables"
            )
