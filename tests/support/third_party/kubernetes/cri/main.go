// A container runtime that starts no process: the kubelet's own fake, which keeps pods and containers in memory.
package main

import (
	"context"
	"log"
	"os"

	"github.com/coreos/go-systemd/v22/daemon"
	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-client/pkg/fake"
	"k8s.io/cri-client/pkg/util"
)

type runtime struct{ *fake.RemoteRuntime }

// ContainerStatus names a log, as the fake does not: with a container the kubelet removes all files whose names begin with
// its log's, and for an empty name that is each file of the kubelet's working directory.
func (r runtime) ContainerStatus(ctx context.Context, asked *cri.ContainerStatusRequest) (*cri.ContainerStatusResponse, error) {
	answer, err := r.RemoteRuntime.ContainerStatus(ctx, asked)
	if err == nil {
		answer.Status.LogPath = "/nonexistent/log"
	}
	return answer, err
}

func main() {
	served := runtime{fake.NewFakeRemoteRuntime()}
	served.ImageService.SetFakeImageSize(1)
	served.RuntimeService.FakeStatus = &cri.RuntimeStatus{Conditions: []*cri.RuntimeCondition{
		{Type: cri.RuntimeReady, Status: true},
		{Type: cri.NetworkReady, Status: true},
	}}
	server := grpc.NewServer()
	cri.RegisterRuntimeServiceServer(server, served)
	cri.RegisterImageServiceServer(server, served)
	listener, err := util.CreateListener(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	if _, err := daemon.SdNotify(false, daemon.SdNotifyReady); err != nil {
		log.Fatal(err)
	}
	log.Fatal(server.Serve(listener))
}
