#!/bin/sh
# in_node_namespaces.sh COMMAND…: run a command as on a machine of its own: processes, mounts, network, host name.
# Process 1 is a shell that waits for all orphans, as a node's init does; with it every process in here ends. The
# command has mounts of its own once more, so that process 1 shares none of them.
set -eu
exec unshare --mount --pid --net --uts --ipc --fork --kill-child --mount-proc --propagation private bash -euc '
hostname node-1
ip link set lo up
code=0
unshare --mount --propagation private "$@" || code=$?
exit "$code"' bash "$@"
