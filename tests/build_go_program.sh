#!/bin/sh
# Builds the Go program $1 (path@version) into the directory $2, with Go 1.26 or newer.
set -eu
program=$1 directory=$(realpath -m "$2")
go=$(tests/find_go.sh "$directory")
mkdir -p "$directory"
GOBIN=$directory GOTOOLCHAIN=local "$go" install "$program" || {
	echo "error: $program cannot be built, see above: check the network, and GOPROXY" >&2
	exit 1
}
