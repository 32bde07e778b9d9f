"""The settings files: each is accepted, and the sockets that they name lead from one program to the next."""

from collections.abc import Iterator

from crust.cli.doctor.finding import Finding, check, error, ok, warning
from crust.cli.doctor.node import CONFIG_DIR, Node
from crust.core import errors
from crust.core.settings.driver import DriverSettings
from crust.core.settings.proxy import ProxySettings
from crust.core.settings.shim import ShimSettings


@check("settings")
def accepted(node: Node) -> Iterator[Finding]:
    """Every file that is there has valid keys and values, and is the administrator's alone to change."""
    found = node.installed()
    if not found:
        yield warning(
            f"there are no settings in {CONFIG_DIR}",
            "the daemons have been given other files, or none",
            "run crust install --systemd, or ignore this where flags say everything",
        )
    for program, path in found.items():
        try:
            node.load(program)
        except errors.InvalidRequest as problem:
            yield error(
                f"{path} is refused",
                problem.why,
                "correct it; man crust-node has the settings' flags",
            )
            continue
        if node.at(path).stat().st_mode & 0o022:
            why = "others than its owner can change what daemons run as root do"
            yield error(f"{path} can be written by others", why, f"chmod go-w {path}")
        else:
            yield ok(f"{path} is accepted")


@check("sockets-match")
def sockets_match(node: Node) -> Iterator[Finding]:
    """Files of proxy, shim and driver that are used together name the same sockets."""
    proxy, shim, driver = (node.settings_of(each) for each in ("proxy", "shim", "driver"))
    if not (isinstance(proxy, ProxySettings) and isinstance(shim, ShimSettings)):
        return
    wrong = [*_proxy_and_shim(proxy, shim)]
    if isinstance(driver, DriverSettings):
        wrong += _driver_and_others(driver, proxy, shim)
    for what, why in wrong:
        yield error(what, why, f"name the same socket in both files of {CONFIG_DIR}")
    if not wrong:
        yield ok("proxy, shim and driver name the same sockets")


def _proxy_and_shim(proxy: ProxySettings, shim: ShimSettings) -> Iterator[tuple[str, str]]:
    backends = {each.backend for each in proxy.drivers}
    runtime = f"{proxy.run_dir}/runtime.sock"
    if shim.socket not in backends:
        why = f"the proxy calls {', '.join(sorted(backends)) or 'none'}"
        yield f"nobody calls the shim at {shim.socket}", why
    if not shim.controller and shim.runtime_socket != runtime:
        yield f"the shim asks the proxy at {shim.runtime_socket}", f"the proxy serves {runtime}"


def _driver_and_others(
    driver: DriverSettings, proxy: ProxySettings, shim: ShimSettings
) -> Iterator[tuple[str, str]]:
    runtime = f"{proxy.run_dir}/runtime.sock"
    if driver.socket != shim.driver_socket:
        yield f"nobody calls the driver at {driver.socket}", f"the shim calls {shim.driver_socket}"
    if driver.runtime_socket and driver.runtime_socket != runtime:
        yield f"the driver asks the proxy at {driver.runtime_socket}", f"the proxy serves {runtime}"
