"""The completion scripts of the shells."""

from typing import Literal

import click

Shell = Literal["bash", "zsh", "fish"]


def completion_script(shell: Shell) -> str:
    """The script. It asks the `crust` of the PATH at each completion, so it need not change with the commands."""
    from click import shell_completion  # for this command only

    completion_class = shell_completion.get_completion_class(shell)
    assert completion_class is not None
    of_crust = completion_class(click.Command("crust"), {}, "crust", "_CRUST_COMPLETE")
    # click's `source` for bash starts this machine's bash, for its version; another machine may use the script.
    return shell_completion.ShellComplete.source(of_crust)
