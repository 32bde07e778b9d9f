"""Which daemons that run are of another version than this command, so were not restarted since an upgrade."""

from collections.abc import Iterable, Mapping

import crust
from crust.cli.inspecting import views
from crust.core.settings.driver import OWN_DRIVER

TODO = "restart it: first the runtimes, then the proxy, then shims, then the driver"
WHY = "it was not restarted since the upgrade"


def running(proxy: str, drivers: Iterable[views.Driver]) -> Mapping[str, str]:
    """The version of each daemon of crust; empty if it is too old to say it. Drivers of others are none of ours."""
    found = {"the proxy": proxy}
    for driver in drivers:
        if driver.shim_version:
            found[f"the shim of driver {driver.name}"] = driver.shim_version
        if driver.name == OWN_DRIVER and driver.version:
            found[f"driver {driver.name}"] = driver.version
    return found


def outdated(found: Mapping[str, str]) -> Iterable[views.Problem]:
    """What `crust status` warns of."""
    for name, version in found.items():
        if version != crust.__version__:
            yield views.Problem(name, "", f"{sentence(version)}: {WHY}; {TODO}")


def sentence(version: str) -> str:
    """The two versions."""
    return f"runs {version or 'an older version'}, installed is {crust.__version__}"
