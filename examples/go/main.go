// A node driver in Go that defers: go.csi.example. A volume's id is the path of a block device that has an ext4.
//
//	go run . unix:///run/go.csi.example/csi.sock
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"

	"crust.dev/examples/go/deferral"
	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
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
	if deferral.OptedIn(ctx) {
		rpc := &csi.NodeServiceCapability_RPC{Type: deferral.Capability}
		response.Capabilities = []*csi.NodeServiceCapability{{Type: &csi.NodeServiceCapability_Rpc{Rpc: rpc}}}
	}
	return response, nil
}

func (driver) NodePublishVolume(_ context.Context, request *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if !deferral.Requested(request) {
		return nil, status.Error(codes.FailedPrecondition, "go.csi.example mounts nothing on the host: defer the volume")
	}
	mount, err := describe(request.GetVolumeId())
	if err != nil {
		return nil, status.Errorf(codes.NotFound, "volume %s: %v", request.GetVolumeId(), err)
	}
	mount.Readonly = request.GetReadonly()
	mount.MountOptions = request.GetVolumeCapability().GetMount().GetMountFlags()
	response := &csi.NodePublishVolumeResponse{}
	deferral.Answer(response, mount)
	return response, nil
}

// NodeUnpublishVolume has nothing to undo: a deferred publish has mounted nothing.
func (driver) NodeUnpublishVolume(context.Context, *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// describe names a block device by its identity: another disk may have the path tomorrow, and another sequence then.
func describe(path string) (deferral.Mount, error) {
	var found syscall.Stat_t
	if err := syscall.Stat(path, &found); err != nil {
		return deferral.Mount{}, err
	}
	if found.Mode&syscall.S_IFMT != syscall.S_IFBLK {
		return deferral.Mount{}, fmt.Errorf("it is no block device")
	}
	major, minor := unix.Major(found.Rdev), unix.Minor(found.Rdev)
	of := fmt.Sprintf("/sys/dev/block/%d:%d/", major, minor)
	sequence, err := number(of + "diskseq")
	if err != nil {
		return deferral.Mount{}, err
	}
	sectors, err := number(of + "size")
	if err != nil {
		return deferral.Mount{}, err
	}
	return deferral.Mount{
		Device: path, Major: major, Minor: minor, DiskSequence: sequence, FsType: "ext4",
		CapacityBytes: int64(sectors) * 512,
	}, nil
}

func number(path string) (uint64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
}

func main() {
	path := strings.TrimPrefix(os.Args[1], "unix://")
	listener, err := net.Listen("unix", path)
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	csi.RegisterIdentityServer(server, driver{})
	csi.RegisterNodeServer(server, driver{})
	log.Fatal(server.Serve(listener))
}
