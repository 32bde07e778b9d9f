"""The daemons: their sockets, their versions, what they say of themselves, the handlers."""

from collections.abc import Iterator

import crust
from crust.cli import asking
from crust.cli.doctor.finding import Finding, check, error, of, ok, warning
from crust.cli.doctor.node import Node, ProxyAnswer
from crust.cli.inspecting import versions as versions_
from crust.cli.inspecting import views
from crust.core import errors

_OWN = ("runtime.sock", "handlers.sock", "inspect.sock")


@check("sockets")
def sockets(node: Node) -> Iterator[Finding]:
    """Each socket of the proxy is served, or does not exist; none is stale."""
    paths = [f"{node.run_dir}/{each}" for each in _OWN]
    if isinstance(node.proxy, ProxyAnswer):
        paths += [each.socket for each in node.proxy.drivers]
    elif found := node.proxy_settings():
        paths += [each.socket for each in found.drivers]
    run_dir = node.at(node.run_dir)
    if run_dir.is_dir() and run_dir.stat().st_mode & 0o022:
        why = "daemons do not start: a socket there could be another user's"
        yield error(f"{node.run_dir} can be written by others", why, f"chmod 0700 {node.run_dir}")
    missing = [path for path in paths if not node.at(path).exists()]
    for path in (each for each in paths if each not in missing):
        try:
            asking.check_socket("the proxy", str(node.at(path)), start="start it")
        except errors.CrustError as problem:
            yield of(problem)
        else:
            yield ok(f"{path} is served")
    if missing:
        yield error(
            f"{', '.join(missing)}: not there",
            "the proxy that serves them does not run",
            "start crust-node or crust-proxy; its log says why it does not start",
        )


@check("proxy")
def proxy(node: Node) -> Iterator[Finding]:
    """The proxy answers, and is healthy."""
    if isinstance(node.proxy, errors.CrustError):
        yield of(node.proxy)
    elif node.proxy is not None:
        for problem in node.proxy.problems:
            yield error(
                f"{problem.part}: {problem.message}", "", f"crust explain {problem.error_name}"
            )
        if not node.proxy.problems:
            yield ok("the proxy is healthy")


@check("drivers")
def drivers(node: Node) -> Iterator[Finding]:
    """Each driver answers a Probe."""
    if node.proxy is None or isinstance(node.proxy, errors.CrustError):
        return
    for driver in node.proxy.drivers:
        if driver.state == "ready":
            yield ok(f"driver {driver.name} answers")
            for low in views.low_pools((driver,)):
                yield warning(low.part, low.message, "crust pool")
        else:
            error_name = driver.message[1:].partition("]")[0]
            todo = f"crust explain {error_name}"
            yield error(f"driver {driver.name} is not ready", driver.message, todo)


@check("versions")
def versions(node: Node) -> Iterator[Finding]:
    """Each daemon that runs is of the version that is installed."""
    if node.proxy is None or isinstance(node.proxy, errors.CrustError):
        return
    for name, version in versions_.running(node.proxy.version, node.proxy.drivers).items():
        if version == crust.__version__:
            yield ok(f"{name} runs {version}")
        else:
            yield warning(f"{name} {versions_.sentence(version)}", versions_.WHY, versions_.TODO)


@check("handlers")
def handlers(node: Node) -> Iterator[Finding]:
    """A runtime handler is registered."""
    if node.proxy is None or isinstance(node.proxy, errors.CrustError):
        return
    for handler in node.proxy.handlers:
        if handler.message:
            yield error(
                f"handler {handler.name} cannot be called", handler.message, "crust handlers"
            )
            continue
        yield ok(f"handler {handler.name} is registered")
    if not node.proxy.handlers:
        yield error(
            "no runtime handler is registered",
            "every publish that is to be deferred is refused",
            "start the runtime's daemon: crust explain HandlerNotRegistered",
        )


@check("orphans")
def orphans(node: Node) -> Iterator[Finding]:
    """No virtual machine has a volume that nobody can stop any more."""
    if node.proxy is None or isinstance(node.proxy, errors.CrustError):
        return
    found = [each for each in node.proxy.volumes if each.is_orphaned]
    for volume in found:
        yield error(
            f"volume {volume.name}: {volume.message}",
            "another virtual machine would write to the same filesystem, so the volume is refused to everybody",
            f"crust end-orphan {volume.volume_id}",
        )
    if not found:
        yield ok("no virtual machine with a volume is lost to its runtime")
