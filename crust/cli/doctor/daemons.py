"""The daemons: their settings, sockets, versions and own reports, and the handlers.

Every settings file is accepted, and each program calls the socket that the next one serves.
"""

from collections.abc import Iterator
from functools import partial

import crust
from crust.blockdriver.settings import DriverSettings
from crust.cli.doctor.node import Finding, Node, doctor_check, error, of_error, ok, tried, warning
from crust.cli.programs.daemons import CONFIG_DIR
from crust.core import errors
from crust.csi_shim.settings import ShimSettings
from crust.inspection import daemon_calls, views
from crust.node.settings import mismatches
from crust.proxy.settings import ProxySettings

_SOCKETS = ("runtime.sock", "handlers.sock", "inspect.sock")


@doctor_check("settings")
def accepted(node: Node) -> Iterator[Finding]:
    """Every settings file has valid keys and values, and only the administrator can change it."""
    paths = node.installed()
    if not paths:
        yield warning(
            f"there are no settings in {CONFIG_DIR}",
            "the daemons have other files, or no files",
            "run crust install --systemd, or ignore this if flags have all settings",
        )
    for program, path in paths.items():
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
            why = "other users could change the settings of daemons that run as root"
            yield error(f"{path} can be written by others", why, f"chmod go-w {path}")
        else:
            yield ok(f"{path} is accepted")


@doctor_check("sockets-match")
def sockets_match(node: Node) -> Iterator[Finding]:
    """The files of proxy, shim and driver name the same sockets."""
    proxy, shim, driver = (node.settings_of(program) for program in ("proxy", "shim", "driver"))
    if not (isinstance(proxy, ProxySettings) and isinstance(shim, ShimSettings)):
        return
    drivers = (driver,) if isinstance(driver, DriverSettings) else ()
    wrong = list(mismatches(proxy, (shim,), drivers))
    for what, why in wrong:
        yield error(what, why, f"name the same socket in both files of {CONFIG_DIR}")
    if not wrong:
        yield ok("proxy, shim and driver name the same sockets")


@doctor_check("sockets")
def sockets(node: Node) -> Iterator[Finding]:
    """Each socket of the proxy is served, and by its mode for root alone."""
    paths = [f"{node.run_dir}/{name}" for name in _SOCKETS]
    if served := node.answer or node.proxy_settings():
        paths += [driver.socket for driver in served.drivers]
    volumes = f"{node.run_dir}/volumes"
    # a kubelet makes the run directory of pods 0755
    for path, refused in ((node.run_dir, 0o022), *((each, 0o077) for each in (volumes, *paths))):
        if node.has(path) and (mode := node.at(path).stat().st_mode) & refused:
            why = "another user could call crust, or be a runtime handler, which gets passphrases"
            yield error(f"{path} has mode {mode & 0o777:04o}", why, f"chmod go= {path}")
    missing = [path for path in paths if not node.has(path)]
    for path in (path for path in paths if path not in missing):
        look = partial(daemon_calls.check_socket, "the proxy", str(node.at(path)), start="start it")
        yield tried(look, f"{path} is served")
    if missing:
        yield error(
            f"{', '.join(missing)}: missing",
            "the proxy that serves them does not run",
            "start crust-node or crust-proxy; its log says why it does not start",
        )


@doctor_check("proxy")
def proxy(node: Node) -> Iterator[Finding]:
    """The proxy answers, and is healthy."""
    if isinstance(node.proxy, errors.CrustError):
        yield of_error(node.proxy)
    elif node.answer is not None:
        for exception in node.answer.warnings:
            yield warning(exception.message, "", f"crust explain {exception.error_name}")
        problems = (*node.answer.problems, *views.unreadable(node.answer.volumes))
        for problem in problems:
            todo = f"crust explain {problem.error_name}" if problem.error_name else "crust volumes"
            yield error(f"{problem.component}: {problem.message}", "", todo)
        if not problems:
            yield ok("the proxy is healthy")


@doctor_check("drivers")
def drivers(node: Node) -> Iterator[Finding]:
    """Each driver answers a Probe."""
    if (answer := node.answer) is None:
        return
    for driver in answer.drivers:
        if driver.state == "ready":
            yield ok(f"driver {driver.name} answers")
            for full in views.pool_problems((driver,), "full"):
                yield error(full.component, full.message, "crust pool")
            for condition in driver.pool.conditions if driver.pool is not None else ():
                todo = f"crust explain {condition.error_name}"
                yield error(f"{condition.component}: {condition.message}", "", todo)
            for low in views.pool_problems((driver,), "low"):
                yield warning(low.component, low.message, "crust pool")
        else:
            todo = f"crust explain {driver.error_name}"
            yield error(f"driver {driver.name} is not ready", driver.message, todo)


@doctor_check("versions")
def versions(node: Node) -> Iterator[Finding]:
    """Each running daemon has the installed version."""
    if (answer := node.answer) is None:
        return
    for name, version in views.versions(answer).items():
        other = f"{name} {views.other_version(version)}"
        different = warning(other, views.NOT_RESTARTED, views.RESTART)
        yield ok(f"{name} runs {version}") if version == crust.__version__ else different


@doctor_check("handlers")
def handlers(node: Node) -> Iterator[Finding]:
    """A runtime handler is registered."""
    if (answer := node.answer) is None:
        return
    for handler in answer.handlers:
        bad = error(f"handler {handler.name} cannot be called", handler.message, "crust handlers")
        yield bad if handler.message else ok(f"handler {handler.name} is registered")
    if not answer.handlers:
        yield error(
            "no runtime handler is registered",
            "every publish that is to be deferred is refused",
            "start the runtime's daemon: crust explain HandlerNotRegistered",
        )


@doctor_check("orphans")
def orphans(node: Node) -> Iterator[Finding]:
    """No virtual machine with a volume is lost to its runtime."""
    if (answer := node.answer) is None:
        return
    orphaned = [volume for volume in answer.volumes if volume.is_orphaned]
    for volume in orphaned:
        yield error(
            f"volume {volume.name}: {volume.message}",
            "another virtual machine would write to the same filesystem, so every other pod is refused the volume",
            f"crust end-orphan {volume.volume_id}",
        )
    if not orphaned:
        yield ok("no virtual machine with a volume is lost to its runtime")
