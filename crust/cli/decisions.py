"""The output of `crust explain --volume`, `--target` and `crust policy explain`: plain lines, one fact each."""

import json
from collections.abc import Sequence
from pathlib import Path

import aiofiles.os
import click

from crust.core import deferral_keys
from crust.core.printable import printable
from crust.host.process import workers
from crust.inspection import daemon_calls, show
from crust.wire.v1 import inspect_pb2

TIMEOUT_S = 15.0
"""The proxy may ask the Kubernetes API."""
_text_of = aiofiles.os.wrap(Path.read_text)


async def volume(run_dir: str, *, volume: str, target: str) -> None:
    """Every deferred publish of a volume, or the one at a target. Raises `VolumeNotDeferred`."""
    async with daemon_calls.inspecting(run_dir) as inspect:
        rows = await show.find(inspect, volume or target, hint=await _how_to_ask(target))
    for row in rows:
        _print(
            ("volume", f"{row.driver}/{row.volume_id}"),
            ("target", row.target_path),
            ("handler", row.handler),
            ("device", row.device),
            ("state", f"{row.state} {row.sandbox_id}".strip()),
            ("decided by", row.decided_by),
            ("message", row.message),
        )


async def _how_to_ask(target: str) -> str:
    """The entry of a deferred volume names the rule that decided. For another volume the proxy's log names it, and
    the kubelet's own file names the PersistentVolume whose attributes decide.
    """
    try:
        path = Path(target).parent / "vol_data.json"
        data = json.loads(await _text_of(path, executor=workers.EXECUTOR))
        driver, pv = str(data["driverName"]), str(data["specVolID"])
    except (OSError, ValueError, KeyError, TypeError):
        driver, pv = "DRIVER", "PV"
    return (
        "`decided_by` in the proxy's log line of a publish on the host names the rule; for the present rule: "
        f"crust policy explain --driver {driver} --context KEY=VALUE, with the volumeAttributes "
        f"that kubectl get pv {pv} -o jsonpath='{{.spec.csi.volumeAttributes}}' prints"
    )


async def policy(
    run_dir: str, *, driver: str, pairs: Sequence[str], pod: str | None, flag: bool, block: bool
) -> None:
    """Print the decision for a publish. Raises the error with which it would be refused."""
    context = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not (key and separator):
            raise click.UsageError(f"--context {pair!r} is not KEY=VALUE")
        context[key] = value
    if pod is not None:
        parts = pod.split("/")
        if len(parts) != 3 or not all(parts):
            raise click.UsageError(f"--pod {pod!r} is not NAMESPACE/NAME/UID")
        names = zip(("namespace", "name", "uid"), parts, strict=True)
        context |= {f"{deferral_keys.POD_INFO}{key}": value for key, value in names}
    request = inspect_pb2.ExplainPolicyRequest(
        driver=driver, defer_fs_ops=flag, block=block, volume_context=context
    )
    async with daemon_calls.inspecting(run_dir) as stub:
        answer = await stub.ExplainPolicy(request, timeout=TIMEOUT_S)
    handler = answer.handler or "the only registered one"
    _print(
        ("decision", "deferred" if answer.deferred else "ordinary mount on the host"),
        ("handler", handler if answer.deferred else ""),
        ("decided by", answer.decided_by),
    )


def _print(*lines: tuple[str, str]) -> None:
    for title, text in lines:
        if text:
            click.echo(f"{title:<12}{printable(text)}")
