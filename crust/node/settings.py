"""The settings of `crust node`: the tables of its three parts, which have the keys of the three programs.

What the parts have in common needs to be said once: a key that is left out follows from the others. What cannot work
in one process is refused here, before anything is started: a part that nothing calls, two parts that name each
other's sockets differently, a setting of the process inside of a part.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Self

import pydantic

from crust.core.settings import OWN_DRIVER
from crust.core.settings.driver import DriverSettings
from crust.core.settings.program import ProgramSettings
from crust.core.settings.proxy import ProxySettings
from crust.core.settings.shim import ShimSettings

_KUBELET_SOCKET = "/var/lib/kubelet/plugins/{name}/csi.sock"
_RUN_DIR = "/run/crust"


class NodeSettings(ProgramSettings):
    """`crust node`."""

    proxy: ProxySettings
    """As `crust proxy`. Without `drivers` it serves our own driver to the kubelet."""

    shim: tuple[ShimSettings, ...]
    """As `crust shim`: one table, or one per driver (`[[shim]]`). Without `driver_socket` it is in front of our own
    driver, of several the first; the others have one without a table too."""

    driver: tuple[DriverSettings, ...] = ()
    """As `crust driver`: one table, or one per driver of ours (`[[driver]]`), each with a name and a `run_dir` of its
    own. Without it our driver runs if a shim has no `driver_socket`."""

    node_name: Annotated[str, pydantic.Field(min_length=1, max_length=253)] = os.uname().nodename
    """The name of this node's Node object: the `node_id` of our driver and the `node_name` of `proxy.kubernetes`.
    Default: the host's name."""

    @property
    def runtime_socket(self) -> str:
        """The proxy's Runtime API."""
        return f"{self.proxy.run_dir}/runtime.sock"

    @property
    def inner_sockets(self) -> frozenset[str]:
        """The paths that only this process calls, and that have no socket."""
        shims, drivers = (each.socket for each in self.shim), (each.socket for each in self.driver)
        return frozenset((*shims, *drivers))

    @classmethod
    def at_endpoint(cls, given: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
        """As `crust proxy`; without drivers it is the socket of our own."""
        proxy = given.get("proxy", {})
        if not isinstance(proxy, Mapping):
            return dict(given)  # refused by its type
        if not proxy.get("drivers"):
            own = [{"name": _name_of(each)} for each in _tables(given.get("driver")) or [{}]]
            proxy = {**proxy, "drivers": tuple(own)}
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
        backends = {driver.backend for driver in self.proxy.drivers}
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
            if shim.socket not in backends:
                problems.append(
                    f"nothing calls the shim at {shim.socket}: no proxy.drivers has it as its backend"
                )
        return problems

    def _driver_problems(self) -> list[str]:
        problems = []
        for driver in self.driver:
            if driver.socket not in {each.driver_socket for each in self.shim}:
                problems.append(
                    f"nothing calls the driver at {driver.socket}: no shim has it as its driver_socket; leave the "
                    "table driver out if another driver is wrapped"
                )
            if driver.runtime_socket != self.runtime_socket:
                problems.append(_other("driver", driver.runtime_socket, self.runtime_socket))
        return problems


def _repeated(values: Any) -> list[str]:
    seen = list(values)
    return sorted({each for each in seen if seen.count(each) > 1})


def _other(part: str, named: str, served: str) -> str:
    return f"{part}.runtime_socket is {named!r}, and the proxy of this process serves {served}: leave it out"


def _completed(given: dict[str, Any]) -> dict[str, Any]:
    """The tables, with what follows from the others. A value of a wrong type is left for the models to refuse."""
    proxy = given.get("proxy", {})
    drivers, shims = _tables(given.get("driver")), _tables(given.get("shim"))
    if not isinstance(proxy, Mapping) or drivers is None or shims is None:
        return given
    _check_own(proxy, *shims, *drivers)
    run_dir = str(proxy.get("run_dir", _RUN_DIR))
    node_name = given.get("node_name", os.uname().nodename)
    own = [_driver(each, run_dir, node_name) for each in drivers or [{}]]
    for each in _repeated(str(each["run_dir"]) for each in own):
        raise ValueError(f"two tables of driver have the run_dir {each!r}: give each its own")
    named = [shim.get("driver_socket") for shim in shims]
    further = [each["socket"] for each in own[1:] if each["socket"] not in named]
    in_front = [*(shims or [{}]), *({"driver_socket": each} for each in further)]
    fronts = [_shim(each, own, run_dir) for each in in_front]
    served = _serving(proxy, own, fronts)
    names = _names(served.get("drivers"))
    fronts = [_named(front, names) for front in fronts]
    access = served.get("kubernetes")
    if isinstance(access, Mapping) and "node_name" in given:
        served["kubernetes"] = {"node_name": given["node_name"], **access}
    found = {**given, "proxy": served, "shim": tuple(fronts)}
    if drivers or own[0]["socket"] in [front["driver_socket"] for front in fronts]:
        found["driver"] = tuple(own)
    return found


def _tables(given: Any) -> list[Mapping[str, Any]] | None:
    """Of a part that may have one table, several, or none. None: of a wrong type."""
    found = [given] if isinstance(given, Mapping) else given or []
    is_some = isinstance(found, list | tuple) and all(isinstance(each, Mapping) for each in found)
    return list(found) if is_some else None


def _driver(given: Mapping[str, Any], run_dir: str, node_name: str) -> dict[str, Any]:
    """The table of one driver of ours."""
    its = given.get("run_dir", f"{run_dir}/driver")
    found = {
        "socket": f"{its}/csi.sock",
        "run_dir": its,
        "runtime_socket": f"{run_dir}/runtime.sock",
        "node_id": node_name,
    }
    return found | dict(given)


def _shim(given: Mapping[str, Any], own: list[dict[str, Any]], run_dir: str) -> dict[str, Any]:
    """The table of one shim. In front of a driver of ours it wraps nothing: that one defers, in the same version."""
    found = {"driver_socket": own[0]["socket"], "runtime_socket": f"{run_dir}/runtime.sock"}
    found |= dict(given)
    called = [each for each in own if each["socket"] == found["driver_socket"]]
    its = called[0]["run_dir"] if called and called[0] is not own[0] else run_dir
    found.setdefault("socket", f"{its}/shim/csi.sock")
    if called and not found.get("controller"):
        found.setdefault("wrap", False)
    return found


def _name_of(driver: Mapping[str, Any]) -> str:
    """The name of a driver of ours, by its table."""
    given = driver.get("driver_name")
    return given if isinstance(given, str) else OWN_DRIVER


def _serving(
    proxy: Mapping[str, Any], own: list[dict[str, Any]], shims: list[dict[str, Any]]
) -> dict[str, Any]:
    """The proxy's table: without drivers it serves our own, of which CSI_ENDPOINT may have given the socket; and of
    several of ours those after the first in any case.
    """
    drivers = proxy.get("drivers") or ()
    if not isinstance(drivers, list | tuple):
        return dict(proxy)
    named = [driver.get("name") for driver in drivers if isinstance(driver, Mapping)]
    names = [_name_of(each) for each in (own[1:] if drivers else own)]
    missing = [name for name in names if name not in named]
    drivers = [
        *drivers,
        *({"name": name, "socket": _KUBELET_SOCKET.format(name=name)} for name in missing),
    ]
    backends = {_name_of(each): _front(each, shims) for each in own}
    backends |= _wrapped(drivers, backends, own, shims)
    served = [
        {"backend": backends[str(driver["name"])], **driver}
        if isinstance(driver, Mapping) and str(driver.get("name")) in backends
        else driver
        for driver in drivers
    ]
    return {**proxy, "drivers": tuple(served)}


def _wrapped(
    drivers: list[Any],
    known: Mapping[str, Any],
    own: list[dict[str, Any]],
    shims: list[dict[str, Any]],
) -> dict[str, Any]:
    """The shim of the driver of somebody else that has no backend, if there is one of each."""
    ours = [each["socket"] for each in own]
    fronts = [shim["socket"] for shim in shims if shim["driver_socket"] not in ours]
    open_ends = [
        str(driver.get("name"))
        for driver in drivers
        if isinstance(driver, Mapping)
        and "backend" not in driver
        and driver.get("name") not in known
    ]
    return {open_ends[0]: fronts[0]} if (len(open_ends), len(fronts)) == (1, 1) else {}


def _front(driver: Mapping[str, Any], shims: list[dict[str, Any]]) -> Any:
    """The socket of the shim that calls the driver; else of the first one."""
    found = [shim for shim in shims if shim["driver_socket"] == driver["socket"]]
    return (found or shims)[0]["socket"]


def _named(shim: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A shim with the name by which the CO knows its driver."""
    known = names.get(str(shim["socket"]))
    return shim if known is None else {"driver_name": known, **shim}


def _names(drivers: Any) -> dict[str, str]:
    """The socket of a shim to the CO's name of its driver."""
    listed = drivers if isinstance(drivers, list | tuple) else ()
    found = [each for each in listed if isinstance(each, Mapping)]
    pairs = [(each.get("backend"), each.get("name")) for each in found]
    return {key: name for key, name in pairs if isinstance(key, str) and isinstance(name, str)}


def _check_own(*parts: Any) -> None:
    for part in parts:
        misplaced = sorted(set(ProgramSettings.model_fields) & set(part or ()))
        if misplaced:
            raise ValueError(
                f"{', '.join(misplaced)} is a setting of the process: write it above all tables"
            )
