#!/bin/sh
# in_memory.sh COMMAND…: run a command in a mount namespace of its own, whose $TMPDIR is a file system in memory.
# Tests sync their files some ten thousand times, which takes 2 to 20 ms on a disk. A tmpfs alone has no FIEMAP.
set -eu
exec unshare --mount --propagation private sh -euc '
mount -t tmpfs -o size=75% tmpfs "$TMPDIR"
truncate --size=32G "$TMPDIR/disk"
mkfs.ext4 -q -O ^has_journal -i 65536 "$TMPDIR/disk"
mount -o loop,discard,noinit_itable "$TMPDIR/disk" "$TMPDIR"
exec "$@"' sh "$@"
