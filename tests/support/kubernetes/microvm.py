"""A container runtime whose containers run in a microVM of examples/kata, if they have a deferred volume.

To containerd it is an OCI runtime, in the place of runc: it starts a microVM for the pod, claims the deferred volumes
of a container for it, and lets runc start a process that runs the container's command in there. The microVM ends with
the pod's sandbox. A volume that cannot be claimed refuses the container. As a command: what containerd's shim calls.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from crust.core import errors
from crust.runtime_handler import blocking
from examples.kata.runtime import messages
from examples.kata.runtime.client import Client
from tests.support.kubernetes.daemons import Daemon

HANDLER = "kata"
RUN_DIR = "/run/crust/example"
"""The proxy, in its pod, sees the handler's socket there."""
_CHECKOUT = Path(__file__).resolve().parents[3]
_VOLUMES = "/run/crust/volumes"
_SANDBOX = "io.kubernetes.cri.sandbox-id"
_NAME_LENGTH = 20
"""Of a sandbox: sockets are below a directory of its name."""


def daemon(directory: Path) -> Daemon:
    """The runtime's daemon, which registers the handler with the proxy of the node."""
    serve = f"{sys.executable} -m examples.kata serve --run-dir={RUN_DIR} --name={HANDLER}"
    script = f"mkdir -p {RUN_DIR} && exec {serve} --cache={_CHECKOUT}/.cache/guest"
    environment = {"PYTHONPATH": str(_CHECKOUT)}
    return Daemon(("sh", "-c", script), directory, notifies=False, environment=environment)


def oci_runtime(directory: Path) -> Path:
    """The program that containerd's configuration names: runc, but for a container's begin and end."""
    path = directory / "oci-runtime"
    own = f"PYTHONPATH={_CHECKOUT} exec {sys.executable} -m {__name__}"
    text = f'#!/bin/sh\ncase " $* " in *" create "* | *" delete "*) {own} "$@" ;; esac\nexec runc "$@"\n'
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def output(target: str, script: str) -> str:
    """The output of a script in the microVM that has the volume of a target path, at /data."""
    (name,) = (box["sandbox"] for box in asyncio.run(_client().list()) if target in box["volumes"])
    return run(name, target, script)


def run(name: str, target: str, script: str) -> str:
    """The output of a script in the microVM of this name, which is started if there is none, with that volume."""
    mount = messages.Mount(source=target, destination="/data")
    argv = ("/bin/sh", "-ec", script)
    request = messages.Run(sandbox=name, argv=argv, mounts=(mount,), keep=True)
    ended = asyncio.run(_client().run(request))
    assert ended.code == 0, ended
    return ended.stdout.decode().strip()


def stop(name: str) -> None:
    asyncio.run(_client().stop(name))


def sandboxes() -> list[str]:
    """The microVMs that run."""
    return [box["sandbox"] for box in asyncio.run(_client().list())]


def _client() -> Client:
    return Client(f"{RUN_DIR}/control.sock")


def _name(sandbox_id: str) -> str:
    return sandbox_id[:_NAME_LENGTH]


def _create(bundle: Path) -> None:
    """Change the container's specification (OCI Runtime Specification, config.md), if it has a deferred volume."""
    path = bundle / "config.json"
    spec = json.loads(path.read_text(encoding="utf-8"))
    mounts = [_mount(each) for each in spec["mounts"] if _is_deferred(each)]
    if not mounts:
        return
    name = _name(spec["annotations"][_SANDBOX])
    claimed = messages.Run(sandbox=name, argv=("true",), mounts=tuple(mounts), keep=True)
    asyncio.run(_client().run(claimed))
    options = [
        f"--mount=source={each.source},destination={each.destination}{',readonly' * each.readonly}"
        for each in mounts
    ]
    process = spec["process"]
    client = ("python", "-m", "examples.kata", "run", f"--run-dir={RUN_DIR}", f"--sandbox={name}")
    process["args"] = ["tini", "--", *client, *options, *process["args"]]
    process["env"].append("PYTHONPATH=/opt/checkout")
    for source, destination in ((RUN_DIR, RUN_DIR), (str(_CHECKOUT), "/opt/checkout")):
        bind = {"type": "bind", "options": ["rbind", "ro", "rslave"]}
        spec["mounts"].append({"source": source, "destination": destination, **bind})
    path.write_text(json.dumps(spec), encoding="utf-8")


def _is_deferred(mount: Any) -> bool:
    if mount.get("type") != "bind":
        return False
    resolved = blocking.resolve_source(_VOLUMES, mount["source"])
    return isinstance(resolved, blocking.Resolved)


def _mount(mount: Any) -> messages.Mount:
    return messages.Mount(
        source=mount["source"],
        destination=mount["destination"],
        readonly="ro" in mount["options"],
    )


def main(arguments: list[str]) -> int:
    """What runc is called with; the exit code."""
    try:
        if "create" in arguments:
            _create(Path(arguments[arguments.index("--bundle") + 1]))
        elif _name(arguments[-1]) in sandboxes():
            stop(_name(arguments[-1]))
    except errors.CrustError as error:
        log = Path(arguments[arguments.index("--log") + 1])
        with log.open(
            "a", encoding="utf-8"
        ) as file:  # the shim passes its last line to the pod's events
            file.write(json.dumps({"level": "error", "msg": error.shown()}) + "\n")
        return 1
    return subprocess.run(["runc", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
