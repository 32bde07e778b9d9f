// Package deferral lets a CSI driver that uses the public Go package defer its mounts (specs/deferral.md).
//
// The public package does not know the extension's fields. protobuf keeps what it does not know, byte for byte: a
// request's flag is read from there, and the answer's metadata is put there. So nothing has to be generated, and the
// fork of csi.proto must not be: one Go binary cannot have two packages csi.v1.
package deferral

import (
	"context"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Numbers of specs/deferral.md, D-1 and D-2.
const (
	publishFlag, unpublishFlag, expandFlag = 9, 3, 7
	supportedFileSystems                   = 4
	deferredMount                          = 20526

	// Capability is DEFER_FS_OPS.
	Capability = csi.NodeServiceCapability_RPC_Type(20526)
)

// Mount is what a guest needs to mount a volume (DeferredMount). All fields but MountOptions are required.
type Mount struct {
	Device                           string
	Major, Minor                     uint32
	DiskSequence                     uint64
	FsType                           string
	MountOptions                     []string
	Readonly                         bool
	CapacityBytes, ContentGeneration int64
}

// OptedIn says whether the caller knows the extension: only then it is told of Capability (D-3).
func OptedIn(ctx context.Context) bool {
	md, _ := metadata.FromIncomingContext(ctx)
	for _, value := range md.Get("crust-extensions") {
		for _, name := range strings.Split(value, ",") {
			if strings.TrimSpace(name) == "deferral" {
				return true
			}
		}
	}
	return false
}

// Requested says whether the call has the flag defer_fs_ops.
func Requested(request proto.Message) bool {
	var number protowire.Number
	switch request.(type) {
	case *csi.NodePublishVolumeRequest:
		number = publishFlag
	case *csi.NodeUnpublishVolumeRequest:
		number = unpublishFlag
	case *csi.NodeExpandVolumeRequest:
		number = expandFlag
	}
	unknown, flag := request.ProtoReflect().GetUnknown(), false
	for len(unknown) > 0 {
		found, kind, length := protowire.ConsumeField(unknown)
		if length < 0 {
			return false
		}
		if found == number && kind == protowire.VarintType {
			_, _, tag := protowire.ConsumeTag(unknown)
			value, _ := protowire.ConsumeVarint(unknown[tag:])
			flag = value != 0
		}
		unknown = unknown[length:]
	}
	return flag
}

// Answer puts the metadata into the answer to a deferred publish.
func Answer(response *csi.NodePublishVolumeResponse, mount Mount) {
	identity := varint(nil, 1, uint64(mount.Major))
	identity = varint(identity, 2, uint64(mount.Minor))
	identity = varint(identity, 3, mount.DiskSequence)
	device := text(nil, 1, mount.Device)
	device = message(device, 2, identity)
	encoded := message(nil, 1, device)
	encoded = text(encoded, 3, mount.FsType)
	for _, option := range mount.MountOptions {
		encoded = text(encoded, 4, option)
	}
	encoded = varint(encoded, 7, protowire.EncodeBool(mount.Readonly))
	encoded = varint(encoded, 8, uint64(mount.CapacityBytes))
	encoded = varint(encoded, 9, uint64(mount.ContentGeneration))
	response.ProtoReflect().SetUnknown(message(nil, deferredMount, encoded))
}

// Filesystems names the filesystems that can be deferred; a driver that defers must (CSI PR #526).
func Filesystems(response *csi.NodeGetInfoResponse, names ...string) {
	var unknown []byte
	for _, name := range names {
		unknown = text(unknown, supportedFileSystems, name)
	}
	response.ProtoReflect().SetUnknown(unknown)
}

func varint(to []byte, number protowire.Number, value uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(to, number, protowire.VarintType), value)
}

func text(to []byte, number protowire.Number, value string) []byte {
	return message(to, number, []byte(value))
}

func message(to []byte, number protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(to, number, protowire.BytesType), value)
}
