"""`crust kata`: which runtimes get volumes, and which of the layers of docs/kata.md hold on this node.

`crust.kata.preflight` has the rules for a configuration of Kata; this module reads containerd's configuration.
"""

import contextlib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from crust.cli.doctor.node import Finding, Node, doctor_check, error, of_error, ok, warning
from crust.host.files import listing
from crust.kata import preflight

_CONFIG = "/etc/containerd/config.toml"
_NRI = "io.containerd.nri.v1.nri"
_PLUGIN = "crust"
_HAS_NRI, _STARTS_NRI, _VALIDATES = (1, 7), (2, 0), (2, 2)


@doctor_check("kata")
def runtimes(node: Node) -> Iterator[Finding]:
    """Each runtime of kata.toml may get volumes, and is registered."""
    node = node.on_host()
    settings = node.kata_settings()
    if settings is None:
        yield ok("crust kata does not run here")
        return
    for runtime in settings.runtimes:
        configuration = node.at(runtime.configuration)
        shim = runtime.shim and str(node.at(runtime.shim))
        placed = runtime.model_copy(update={"configuration": str(configuration), "shim": shim})
        try:
            fit = preflight.check_configuration(placed, preflight.read(configuration))
        except preflight.KataUnfit as problem:
            finding = of_error(problem)
            yield replace(finding, what=f"runtime {runtime.name} gets no volumes: {finding.what}")
            continue
        if fit.flushes_dropped is not None:
            finding = of_error(fit.flushes_dropped)
            yield warning(f"runtime {runtime.name}: {finding.what}", finding.why, finding.todo)
        registered = node.answer is not None and any(
            handler.name == runtime.name for handler in node.answer.handlers
        )
        if node.answer is not None and not registered:
            yield error(
                f"runtime {runtime.name} is not registered",
                "crust kata does not run, or containerd has not accepted its plugin: every publish for it is refused",
                "systemctl status crust-kata; its log has the reason",
            )
        else:
            yield ok(
                f"runtime {runtime.name}: Kata itself refuses a volume that no sandbox may have"
            )


@doctor_check("kata-engine")
def engine(node: Node) -> Iterator[Finding]:
    """The containers that containerd refuses while `crust kata` runs, hangs or is away."""
    node = node.on_host()
    if node.kata_settings() is None:
        yield ok("no engine with NRI is needed: crust kata does not run here")
        return
    match = re.search(r"\bv?(\d+)\.(\d+)\.\d+", node.version_of("containerd --version"))
    version = (int(match[1]), int(match[2])) if match else None
    if version is None:
        yield warning(
            "there is no containerd on the PATH, and its version decides which calls a plugin gets",
            "CRI-O asks before it creates a container, but not a start: then guard mount and Kata's entry hold",
            "nothing, if CRI-O runs; else install containerd 2.2 or later",
        )
        return
    nri = _nri(node)
    shown = ".".join(map(str, version))
    if nri.get("disable", version < _STARTS_NRI) or nri.get("disable_connections", False):
        todo = "disable = false, disable_connections = false"
        yield error(
            f"containerd {shown} takes no plugins"
            if version >= _HAS_NRI
            else f"containerd {shown} has no NRI",
            "no runtime of Kata is registered: crust kata is an NRI plugin",
            _lines("", todo) if version >= _HAS_NRI else "install containerd 2.2 or later",
        )
        return
    yield ok(
        f"containerd {shown} asks crust kata before a container is created, and before it starts"
    )
    if version < _VALIDATES:
        yield warning(
            f"containerd {shown} skips a plugin that hangs or dies during a call",
            "the container is created then, and Kata refuses it: its entry names no device",
            "install containerd 2.2 or later",
        )
        return
    yield ok(f"containerd {shown} refuses a container if crust kata hangs or dies during a call")
    validator = nri.get("default_validator", {})
    if validator.get("enable") is True and _PLUGIN in validator.get("required_plugins", ()):
        yield ok("no container starts while crust kata is away")
    else:
        yield warning(
            "containers start while crust kata is away",
            "Kata refuses a container, whose entry names no device; another runtime starts it on the guard",
            _lines(".default_validator", f'enable = true, required_plugins = ["{_PLUGIN}"]')
            + '; static pods need the annotation crust.dev/tolerate-missing-plugin/pod: "true"',
        )


def _lines(table: str, lines: str) -> str:
    return f'in [plugins."{_NRI}"{table}] of {_CONFIG}: {lines}'


def _nri(node: Node) -> Mapping[str, Any]:
    """The table of NRI in containerd's configuration and its imports; empty if they do not mention NRI."""
    merged: dict[str, Any] = {}
    main = _toml(node, _CONFIG)
    imports = [pattern for pattern in main.get("imports", ()) if isinstance(pattern, str)]
    # below the root; in containerd an import is relative to the importing file
    patterns = [os.path.normpath(Path(_CONFIG).parent / text).lstrip("/") for text in imports]
    names = [
        f"/{path.relative_to(node.root)}"
        for pattern in patterns
        for path in listing.matching(node.root, pattern)
    ]
    for table in (main, *(_toml(node, name) for name in names)):
        plugins = table.get("plugins", {})
        merged |= plugins.get(_NRI, {}) if isinstance(plugins, dict) else {}
    return merged


def _toml(node: Node, path: str) -> dict[str, Any]:
    with contextlib.suppress(tomllib.TOMLDecodeError):
        return tomllib.loads(node.text(path))
    return {}
