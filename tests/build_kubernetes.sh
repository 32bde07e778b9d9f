#!/bin/sh
# Builds etcd, the API server, kubelet, kubectl and the kubelet's fake of a container runtime into the directory $1, with Go
# 1.26 or newer; with `whole` as $2 the rest of Kubernetes, its storage suite, containerd, the plugins of a pod's network
# and CSI's sidecars. Beside it are the CustomResourceDefinitions of snapshots and of the Prometheus operator, and the modules
# and what Go compiles: 9 GB.
# The versions: tests/support/third_party/kubernetes.
set -eu
directory=$(realpath -m "$1") source=$(realpath tests/support/third_party/kubernetes)
go=$(tests/find_go.sh "$directory/..")
mkdir -p "$directory"
export GOTOOLCHAIN=local CGO_ENABLED=0 GOFLAGS=-trimpath
export GOMODCACHE="$directory/../modules" GOCACHE="$directory/../compiled"
GOMODCACHE=$(realpath -m "$GOMODCACHE") GOCACHE=$(realpath -m "$GOCACHE")

# the API server compares versions, and refuses to start without one
version=$(sed -n 's/.*k8s.io\/kubernetes \(v[0-9.]*\)$/\1/p' "$source/go.mod")
flags="-s -w"
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
	flags="$flags -X $package.gitVersion=$version -X $package.gitTreeState=clean"
done
client=github.com/kubernetes-csi/external-snapshotter/client/v8
monitoring=github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1
of=k8s.io/kubernetes/cmd
{
	(cd "$source/etcd" && "$go" build -ldflags "-s -w" -o "$directory/" .) &&
		cd "$source" &&
		"$go" build -ldflags "$flags" -o "$directory/" ./cri $of/kube-apiserver $of/kubectl $of/kubelet &&
		if [ "${2:-}" = whole ]; then
			"$go" build -ldflags "$flags" -o "$directory/" $of/kube-controller-manager $of/kube-scheduler &&
				xargs -n 1 env GOBIN="$directory" "$go" install -ldflags "-s -w" <containerd.txt &&
				"$go" test -c -vet=off -ldflags "-s -w" -o "$directory/e2e.test" ./e2e &&
				GOBIN="$directory" "$go" install -ldflags "-s -w" tool &&
				cd sidecars && GOBIN="$directory" "$go" install -ldflags "-s -w" tool &&
				cat "$("$go" list -m -f '{{.Dir}}' $client)"/config/crd/*snapshot*.yaml >"$directory/../snapshots.yaml" &&
				cd ../monitoring &&
				"$go" tool controller-gen crd paths=$monitoring output:stdout >"$directory/../monitoring.yaml"
		fi
} || {
	echo "error: Kubernetes cannot be built, see above: check the network, and GOPROXY" >&2
	exit 1
}
