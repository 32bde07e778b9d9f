"""What the daemons of a node answer, and how a command prints it: for the commands of crust and of a driver.

daemon_calls               questions to the proxy and to the drivers
views, show                the answers as values, and as texts
output, screen, refusals   tables and documents, a watch of a terminal, and an error on one line
options                    the options that commands share
"""

from typing import Literal

Format = Literal["table", "wide", "json", "yaml", "name"]
"""Here, because `output` imports rich, which would slow down each start of a daemon."""
