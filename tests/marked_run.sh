#!/bin/bash
# marked_run.sh COMMAND…: run a command whose $TMPDIR is a directory of its own, the mark of all that the run makes. The
# lock says that the run lives. What has a mark and no lock is removed (tests/support/killed_runs.py): at the end of the
# run, whatever ends it, or by the next one. The path is short, for the sockets below it.
# Who holds the lock of /tmp begins a run, or looks for those that have ended.
cd "$(dirname "$0")/.." || exit
remove() { .venv/bin/python -m tests.support.killed_runs; }
remove
trap 'exec 8<&- 9<&-; remove' EXIT
exec 8</tmp && flock 8 && directory=$(mktemp -d /tmp/ct-XXXXXX) && exec 9>"$directory/.run" && flock 9 && exec 8<&- &&
	TMPDIR="$directory" "$@" 9<&-
