"""`crust policy explain`."""

from typing import Any

import click

from crust.inspection.options import RUN_DIR


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
def policy_explain(run_dir: str, **question: Any) -> None:
    """Show whether a publish would be deferred, to which handler, and by which rule.

    Exit codes: 0 it was decided, 1 it is refused, 2 the command cannot be understood, 3 the proxy does not answer.
    """
    import asyncio

    from crust.cli import decisions

    asyncio.run(decisions.policy(run_dir, **question))
