"""The tests of crust.

gRPC reads the variable below where it is first imported, so it stands here, before any import. Without it gRPC makes
its threads again after each fork of a test. In a process that has moved its children to another PID namespace it
tries for ever: clone(2) gives such a process no thread (EINVAL).
"""

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
