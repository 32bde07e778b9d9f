"""The settings of `crust node`: the tables of its three parts, which have the keys of the three programs.

A common value is written once: a key that is left out follows from the others. A combination that cannot work in one
process is refused before the start: a part that no other part calls, two parts that name each other's sockets
differently, a setting of the process inside of a part.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, Self

import pydantic

from crust.blockdriver.settings import DriverSettings
from crust.core.settings import OWN_DRIVER
from crust.core.settings.program import ProgramSettings, check_differ
from crust.csi_shim.settings import ShimSettings
from crust.proxy.settings import ProxySettings

_KUBELET_SOCKET = "/var/lib/kubelet/plugins/{name}/csi.sock"
_RUN_DIR = "/run/crust"


class NodeSettings(ProgramSettings):
    """`crust node`."""

    proxy: ProxySettings
    """The settings of `crust proxy`. Without `drivers` it serves our own driver to the kubelet."""

    shim: tuple[ShimSettings, ...]
    """The settings of `crust shim`: one table, or one per driver (`[[shim]]`). Without `driver_socket` the shim is in
    front of our own driver, or of the first of several; each other one has a shim without a table too."""

    driver: tuple[DriverSettings, ...] = ()
    """The settings of `crust driver`: one table, or one per driver of ours (`[[driver]]`), each with its own name and
    `run_dir`. Without a table our driver runs if a shim has no `driver_socket`."""

    node_name: Annotated[str, pydantic.Field(min_length=1, max_length=253)] = os.uname().nodename
    """The name of this node's Node object: the `node_id` of our driver and the `node_name` of `proxy.kubernetes`.
    Default: the host's name."""

    @property
    def runtime_socket(self) -> str:
        return f"{self.proxy.run_dir}/runtime.sock"

    @property
    def inner_sockets(self) -> frozenset[str]:
        """The paths that only this process calls, and that have no socket."""
        shims = {shim.socket for shim in self.shim}
        return frozenset(shims | {driver.socket for driver in self.driver})

    @classmethod
    def at_endpoint(cls, values: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
        """As `crust proxy`; without drivers `endpoint` is the socket of our own driver."""
        proxy = values.get("proxy", {})
        if not isinstance(proxy, Mapping):
            return dict(values)  # refused by its type
        if not proxy.get("drivers"):
            ours = [{"name": _name_of(driver)} for driver in _tables(values.get("driver")) or [{}]]
            proxy = {**proxy, "drivers": tuple(ours)}
        return {**values, "proxy": ProxySettings.at_endpoint(proxy, endpoint)}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Add the keys that follow from the others. The models refuse values of a wrong type."""
        if not isinstance(values, Mapping):
            return values
        tables = dict(values)
        proxy = tables.get("proxy", {})
        drivers, shims = _tables(tables.get("driver")), _tables(tables.get("shim"))
        given = proxy.get("drivers") if isinstance(proxy, Mapping) else {}  # never one table
        if drivers is None or shims is None or isinstance(given, Mapping) or _tables(given) is None:
            return {"shim": (), **tables}
        for part in (proxy, *shims, *drivers):
            if misplaced := sorted(set(ProgramSettings.model_fields) & set(part)):
                raise ValueError(
                    f"{', '.join(misplaced)} is a setting of the process: write it above all tables"
                )
        run_dir = str(proxy.get("run_dir", _RUN_DIR))
        node_name = tables.get("node_name", os.uname().nodename)
        ours = [_driver(table, run_dir, node_name) for table in drivers or [{}]]
        run_dirs = [str(driver["run_dir"]) for driver in ours]
        check_differ("driver", driver_name=list(map(_name_of, ours)), run_dir=run_dirs)
        called = [shim.get("driver_socket") for shim in shims]
        further = [driver["socket"] for driver in ours[1:] if driver["socket"] not in called]
        in_front = [*(shims or [{}]), *({"driver_socket": socket} for socket in further)]
        fronts = [_shim(table, ours, run_dir) for table in in_front]
        served = _serving(proxy, ours, fronts)
        names = {str(one.get("backend")): one.get("name") for one in served["drivers"]}
        for front in fronts:
            if (socket := str(front["socket"])) in names:
                front.setdefault("driver_name", names[socket])
        access = served.get("kubernetes")
        if isinstance(access, Mapping) and "node_name" in tables:
            served["kubernetes"] = {"node_name": tables["node_name"], **access}
        completed = {**tables, "proxy": served, "shim": tuple(fronts)}
        if drivers or ours[0]["socket"] in [front["driver_socket"] for front in fronts]:
            completed["driver"] = tuple(ours)
        return completed

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Self:
        called = [shim.driver_socket for shim in self.shim]
        check_differ("shim", socket=[shim.socket for shim in self.shim], driver_socket=called)
        if any(shim.controller for shim in self.shim):
            raise ValueError("shim.controller is set: a controller's shim is a process of its own")
        for what, why in mismatches(self.proxy, self.shim, self.driver):
            raise ValueError(
                f"{what}, and {why}: leave the key out, or the table driver if another driver is wrapped"
            )
        return self


def mismatches(
    proxy: ProxySettings, shims: Collection[ShimSettings], drivers: Iterable[DriverSettings]
) -> Iterator[tuple[str, str]]:
    """The sockets on which the programs of one node do not agree, and why."""
    runtime_socket = f"{proxy.run_dir}/runtime.sock"
    is_served = f"the proxy serves {runtime_socket}"
    by_proxy = sorted({served.backend for served in proxy.drivers})
    by_shims = sorted({shim.driver_socket for shim in shims})
    for shim in shims:
        if shim.socket not in by_proxy:
            why = f"the backends of proxy.drivers are {', '.join(by_proxy) or 'none'}"
            yield f"nothing calls the shim at {shim.socket}", why
        if not shim.controller and shim.runtime_socket != runtime_socket:
            yield f"the runtime_socket of a shim is {shim.runtime_socket!r}", is_served
    for driver in drivers:
        if driver.socket not in by_shims:
            why = f"the driver_socket of a shim is {', '.join(by_shims)}"
            yield f"nothing calls the driver at {driver.socket}", why
        if driver.runtime_socket not in ("", runtime_socket):
            yield f"the runtime_socket of a driver is {driver.runtime_socket!r}", is_served


def _tables(value: Any) -> list[Mapping[str, Any]] | None:
    """The tables of a part: one, several, or none. None: the value has a wrong type."""
    tables = [value] if isinstance(value, Mapping) else value or []
    is_some = isinstance(tables, list | tuple) and all(isinstance(row, Mapping) for row in tables)
    return list(tables) if is_some else None


def _driver(table: Mapping[str, Any], run_dir: str, node_name: str) -> dict[str, Any]:
    own_run_dir = table.get("run_dir", f"{run_dir}/driver")
    defaults = {
        "socket": f"{own_run_dir}/csi.sock",
        "run_dir": own_run_dir,
        "runtime_socket": f"{run_dir}/runtime.sock",
        "node_id": node_name,
    }
    return defaults | dict(table)


def _shim(table: Mapping[str, Any], ours: list[dict[str, Any]], run_dir: str) -> dict[str, Any]:
    """The table of one shim. It does not wrap a driver of ours, which defers, in the same version."""
    shim = {"driver_socket": ours[0]["socket"], "runtime_socket": f"{run_dir}/runtime.sock"}
    shim |= dict(table)
    called = [driver for driver in ours if driver["socket"] == shim["driver_socket"]]
    socket_dir = called[0]["run_dir"] if called and called[0] is not ours[0] else run_dir
    shim.setdefault("socket", f"{socket_dir}/shim/csi.sock")
    if called and not shim.get("controller"):
        shim.setdefault("wrap", False)
    return shim


def _name_of(driver: Mapping[str, Any]) -> str:
    name = driver.get("driver_name")
    return name if isinstance(name, str) else OWN_DRIVER


def _serving(
    proxy: Mapping[str, Any], ours: list[dict[str, Any]], shims: list[dict[str, Any]]
) -> dict[str, Any]:
    """The proxy's table. Without drivers it serves our own, at CSI_ENDPOINT if given. Our others are always added."""
    drivers = list(proxy.get("drivers") or ())
    proxy_names = [driver.get("name") for driver in drivers]
    for name in map(_name_of, ours[1:] if drivers else ours):
        if name not in proxy_names:
            drivers.append({"name": name, "socket": _KUBELET_SOCKET.format(name=name)})
    backends = {}
    for driver in ours:
        callers = [shim for shim in shims if shim["driver_socket"] == driver["socket"]]
        backends[_name_of(driver)] = (callers or shims)[0]["socket"]
    # the shim of another vendor's driver that has no backend, if there is one of each
    own_sockets = [driver["socket"] for driver in ours]
    fronts = [shim["socket"] for shim in shims if shim["driver_socket"] not in own_sockets]
    names = [str(driver.get("name")) for driver in drivers if "backend" not in driver]
    open_ends = [name for name in names if name not in backends]
    if (len(open_ends), len(fronts)) == (1, 1):
        backends[open_ends[0]] = fronts[0]
    for at, driver in enumerate(drivers):
        if (name := str(driver.get("name"))) in backends:
            drivers[at] = {"backend": backends[name], **driver}
    return {**proxy, "drivers": tuple(drivers)}
