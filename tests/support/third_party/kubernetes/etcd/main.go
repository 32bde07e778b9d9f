// The etcd of the cluster, in a module of its own: its modules are newer than those of the API server.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
