// Package deferral lets a CSI driver that uses the public Go package defer its mounts (specs/deferral.md).
//
// The public package does not know the extension's fields. protobuf keeps what it does not know, byte for byte: a
// request's flag and its group are read from there, and the answer's metadata is put there. So nothing has to be
// generated, and the fork of csi.proto must not be: one Go binary cannot have two packages csi.v1.
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
	supplementalGroup, groupChangePolicy   = 4, 5
	supportedFileSystems                   = 4
	deferredMount                          = 20526
)

// DEFER_FS_OPS, and the two for groups: Answer gives the runtime the group of the request.
var capabilities = []csi.NodeServiceCapability_RPC_Type{20526, 20527, 20528}

// Mount is what a driver knows of a volume that a guest mounts (DeferredMount). All fields but ContentGeneration are
// required; Describe fills in those of a device.
type Mount struct {
	Device                           string
	Major, Minor                     uint32
	DiskSequence                     uint64
	FsType                           string
	CapacityBytes, ContentGeneration int64
}

// Advertise adds the capabilities of deferral to the answer for a caller that knows it: no other is told (D-3).
func Advertise(ctx context.Context, response *csi.NodeGetCapabilitiesResponse) {
	if !optedIn(ctx) {
		return
	}
	for _, number := range capabilities {
		rpc := &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: number}}
		response.Capabilities = append(response.Capabilities, &csi.NodeServiceCapability{Type: rpc})
	}
}

func optedIn(ctx context.Context) bool {
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
	default:
		return false
	}
	value, _ := protowire.ConsumeVarint(unknown(request, number, protowire.VarintType))
	return value != 0
}

// Answer puts the metadata into the answer to a deferred publish. Options, group and read-only are those of the request.
func Answer(request *csi.NodePublishVolumeRequest, response *csi.NodePublishVolumeResponse, mount Mount) {
	wanted := request.GetVolumeCapability().GetMount()
	options, readonly := forGuest(wanted.GetMountFlags())
	readonly = readonly || request.GetReadonly() || readers[request.GetVolumeCapability().GetAccessMode().GetMode()]
	identity := varint(nil, 1, uint64(mount.Major))
	identity = varint(identity, 2, uint64(mount.Minor))
	identity = varint(identity, 3, mount.DiskSequence)
	device := text(nil, 1, mount.Device)
	device = message(device, 2, identity)
	encoded := message(nil, 1, device)
	encoded = text(encoded, 3, mount.FsType)
	for _, option := range options {
		encoded = text(encoded, 4, option)
	}
	encoded = text(encoded, 5, unknownText(wanted, supplementalGroup))
	encoded = text(encoded, 6, unknownText(wanted, groupChangePolicy))
	encoded = varint(encoded, 7, protowire.EncodeBool(readonly))
	encoded = varint(encoded, 8, uint64(mount.CapacityBytes))
	encoded = varint(encoded, 9, uint64(mount.ContentGeneration))
	add(response, message(nil, deferredMount, encoded))
}

// The access modes under which nobody writes.
var readers = map[csi.VolumeCapability_AccessMode_Mode]bool{
	csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY: true,
	csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:  true,
}

// forGuest gives the options without those that the metadata says otherwise.
func forGuest(flags []string) (options []string, readonly bool) {
	for _, flag := range flags {
		switch flag {
		case "ro":
			readonly = true
		case "rw", "bind":
		default:
			options = append(options, flag)
		}
	}
	return options, readonly
}

// Filesystems names the filesystems that can be deferred; a driver that defers must (CSI PR #526).
func Filesystems(response *csi.NodeGetInfoResponse, names ...string) {
	var fields []byte
	for _, name := range names {
		fields = text(fields, supportedFileSystems, name)
	}
	add(response, fields)
}

// unknown is the value of the last field of that number; empty if there is none.
func unknown(of proto.Message, number protowire.Number, kind protowire.Type) []byte {
	var value []byte
	for fields := of.ProtoReflect().GetUnknown(); len(fields) > 0; {
		found, itsKind, length := protowire.ConsumeField(fields)
		if length < 0 {
			return nil
		}
		if found == number && itsKind == kind {
			_, _, tag := protowire.ConsumeTag(fields)
			value = fields[tag:length]
		}
		fields = fields[length:]
	}
	return value
}

func unknownText(of proto.Message, number protowire.Number) string {
	value, _ := protowire.ConsumeBytes(unknown(of, number, protowire.BytesType))
	return string(value)
}

func add(to proto.Message, fields []byte) {
	to.ProtoReflect().SetUnknown(append(to.ProtoReflect().GetUnknown(), fields...))
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
