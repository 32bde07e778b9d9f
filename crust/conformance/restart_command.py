"""The operator's `--restart-command`, which kills the driver and starts it again.

What it starts inherits its output and lives on, so the output goes to a file: a pipe would end with the driver only,
and a reader of the pipe would wait for that.
"""

import subprocess
import tempfile

_PRINTED_BYTES = 2000


def run(command: str, timeout_s: float) -> None:
    """Run it with `sh -c`, to its end. Raises AssertionError, with its output, if it fails or takes too long."""
    with tempfile.TemporaryFile() as output:
        try:
            ended = subprocess.run(
                ["/bin/sh", "-c", command],
                check=False,
                timeout=timeout_s,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            how = f"ended with {ended.returncode}" if ended.returncode else ""
        except subprocess.TimeoutExpired:
            how = f"did not return within {timeout_s:g} s"
        output.seek(0)
        printed = output.read().decode(errors="replace")[-_PRINTED_BYTES:].strip()
    assert not how, f"the restart command {how}: {printed or 'it printed nothing'}"
