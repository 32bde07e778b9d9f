"""`crust policy explain`."""

from collections.abc import Mapping

import click

from crust.core.printable import printable
from crust.inspection.options import RUN_DIR

TIMEOUT_S = 15.0
"""The proxy may ask the Kubernetes API."""


@click.group("policy")
def command() -> None:
    """The rules by which the proxy decides whether a publish is deferred."""


@command.command("explain")
@click.option("--driver", required=True, help="The driver's name.")
@click.option(
    "--context", "pairs", multiple=True, metavar="KEY=VALUE", help="A pair of the volume context."
)
@click.option("--pod", metavar="NAMESPACE/NAME/UID", help="The pod that the volume is for.")
@click.option("--flag", is_flag=True, help="The CO's flag defer_fs_ops is set.")
@click.option("--block", is_flag=True, help="The volume is published as a raw block device.")
@RUN_DIR
def policy_explain(
    run_dir: str, driver: str, pairs: tuple[str, ...], pod: str | None, *, flag: bool, block: bool
) -> None:
    """Show whether a publish would be deferred, to which handler, and by which rule.

    Exit codes: 0 it was decided, 1 it is refused, 2 the command cannot be understood, 3 the proxy does not answer.
    """
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
        context |= {f"csi.storage.k8s.io/pod.{key}": value for key, value in names}
    import asyncio

    asyncio.run(_print_decision(run_dir, driver, context, flag=flag, block=block))


async def _print_decision(
    run_dir: str, driver: str, context: Mapping[str, str], *, flag: bool, block: bool
) -> None:
    from crust.inspection import daemon_calls
    from crust.wire.v1 import inspect_pb2

    request = inspect_pb2.ExplainPolicyRequest(
        driver=driver, defer_fs_ops=flag, block=block, volume_context=context
    )
    async with daemon_calls.inspecting(run_dir) as proxy:
        answer = await proxy.ExplainPolicy(request, timeout=TIMEOUT_S)
    decision, handler = "ordinary mount on the host", ""
    if answer.deferred:
        decision, handler = "deferred", answer.handler or "the only registered one"
    lines = (("decision", decision), ("handler", handler), ("decided by", answer.decided_by))
    for title, text in lines:
        if text:
            click.echo(f"{title:<12}{printable(text)}")
