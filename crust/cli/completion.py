"""The script that completes `crust` in a shell, for `crust completion` and `crust install`."""

from typing import Literal, get_args

import click

Shell = Literal["bash", "zsh", "fish"]

SHELLS: tuple[Shell, ...] = get_args(Shell)


def script(shell: Shell) -> str:
    """The script. It asks the `crust` of the PATH at each completion, so it need not change with the commands."""
    from click import shell_completion  # for this command only

    made = shell_completion.get_completion_class(shell)
    assert made is not None
    of_crust = made(click.Command("crust"), {}, "crust", "_CRUST_COMPLETE")
    # Bash's own `source` starts this machine's bash, for its version: there may be none, and another may read this.
    return shell_completion.ShellComplete.source(of_crust)
