#!/bin/sh
# Builds examples/go as $1/driver, in one binary with the messages of crust.v1, as a runtime in Go generates them from
# specs/proto: beside the public csi.v1, a second package of that name would end the program at its start.
# $1/deferral.test has the tests of its package.
set -eu
directory=$(realpath -m "$1") source=$(realpath -m "$1/source") python=$(realpath -s .venv/bin/python)
go=$(tests/find_go.sh "$directory")
tests/build_go_program.sh google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.11 "$directory"
tests/build_go_program.sh google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.5.1 "$directory"

rm -rf "$source"
mkdir -p "$source/wire"
cp -r examples/go/. "$source"
(cd specs/proto && PATH=$directory:$PATH "$python" -m grpc_tools.protoc --proto_path=. \
	--go_out="$source" --go_opt=module=crust.dev --go-grpc_out="$source" --go-grpc_opt=module=crust.dev \
	crust/wire/v1/handlers.proto crust/wire/v1/types.proto crust/wire/v1/runtime.proto)

cd "$source"
printf 'module crust.dev/wire\n\ngo 1.25\n' >wire/go.mod
printf 'package main\n\nimport _ "crust.dev/wire/v1"\n' >runtime.go
export GOTOOLCHAIN=local GOFLAGS=-mod=mod
{
	"$go" mod edit -require=crust.dev/wire@v0.0.0 -replace=crust.dev/wire=./wire &&
		"$go" vet ./... && "$go" test -c -o "$directory/deferral.test" ./deferral && "$go" build -o "$directory/driver" .
} || {
	echo "error: examples/go cannot be built, see above: check the network, and GOPROXY" >&2
	exit 1
}
