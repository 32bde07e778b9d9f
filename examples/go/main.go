// A node driver in Go that defers: go.csi.example. A volume's id is the path of a block device that has an ext4.
//
//	go run . unix:///run/go.csi.example/csi.sock
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"net"
	"os"
	"strings"
	"syscall"

	"crust.dev/examples/go/deferral"
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
}

func (driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: "go.csi.example", VendorVersion: "1"}, nil
}

func (driver) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{}, nil
}

func (driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

func (driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	response := &csi.NodeGetInfoResponse{NodeId: host}
	deferral.Filesystems(response, "ext4")
	return response, nil
}

func (driver) NodeGetCapabilities(ctx context.Context, _ *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	response := &csi.NodeGetCapabilitiesResponse{}
	deferral.Advertise(ctx, response)
	return response, nil
}

func (driver) NodePublishVolume(_ context.Context, request *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if !deferral.Requested(request) {
		return nil, status.Error(codes.FailedPrecondition, "go.csi.example mounts nothing on the host: defer the volume")
	}
	if request.GetVolumeCapability().GetMount() == nil {
		return nil, status.Error(codes.InvalidArgument, "a raw block volume is not deferred")
	}
	mount, err := deferral.Describe(request.GetVolumeId(), "ext4")
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, deferral.ErrNoBlockDevice) {
		return nil, status.Errorf(codes.NotFound, "volume %s: %v", request.GetVolumeId(), err)
	}
	if err != nil { // any other error does not say that there is no volume
		return nil, status.Errorf(codes.Internal, "volume %s: %v", request.GetVolumeId(), err)
	}
	response := &csi.NodePublishVolumeResponse{}
	deferral.Answer(request, response, mount)
	return response, nil
}

// NodeUnpublishVolume has nothing to undo: a deferred publish has mounted nothing.
func (driver) NodeUnpublishVolume(context.Context, *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// listen listens at the path of a Unix socket, in place of a socket that a killed driver has left.
func listen(path string) (net.Listener, error) {
	listener, err := net.Listen("unix", path)
	if !errors.Is(err, syscall.EADDRINUSE) {
		return listener, err
	}
	found, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if found.Mode().Type() != fs.ModeSocket {
		return nil, fmt.Errorf("%s is no socket", path)
	}
	connection, err := net.Dial("unix", path)
	if err == nil {
		connection.Close()
		return nil, fmt.Errorf("another process listens at %s", path)
	}
	if !errors.Is(err, syscall.ECONNREFUSED) { // any other error does not say that nobody listens
		return nil, err
	}
	if err := os.Remove(path); err != nil {
		return nil, err
	}
	return net.Listen("unix", path)
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintf(os.Stderr, "usage: %s unix://SOCKET\n", os.Args[0])
		os.Exit(2)
	}
	listener, err := listen(strings.TrimPrefix(os.Args[1], "unix://"))
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	csi.RegisterIdentityServer(server, driver{})
	csi.RegisterNodeServer(server, driver{})
	log.Fatal(server.Serve(listener))
}
