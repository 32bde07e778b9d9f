package deferral

import (
	"context"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// received is a request as a driver gets it: with the fields that the public package does not know.
func received(t *testing.T, request *csi.NodePublishVolumeRequest, fields, ofMount []byte) *csi.NodePublishVolumeRequest {
	t.Helper()
	if mount := request.GetVolumeCapability().GetMount(); mount != nil {
		mount.ProtoReflect().SetUnknown(ofMount)
	}
	request.ProtoReflect().SetUnknown(fields)
	data, err := proto.Marshal(request)
	if err != nil {
		t.Fatal(err)
	}
	decoded := &csi.NodePublishVolumeRequest{}
	if err := proto.Unmarshal(data, decoded); err != nil {
		t.Fatal(err)
	}
	return decoded
}

func capability(mode csi.VolumeCapability_AccessMode_Mode, flags ...string) *csi.VolumeCapability {
	mount := &csi.VolumeCapability_MountVolume{FsType: "ext4", MountFlags: flags}
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: mount},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
	}
}

// values are the values of an answer's DeferredMount, by their numbers; a number becomes its bytes on the wire.
func values(t *testing.T, response *csi.NodePublishVolumeResponse) map[protowire.Number][]string {
	t.Helper()
	encoded, length := protowire.ConsumeBytes(unknown(response, deferredMount, protowire.BytesType))
	if length < 0 {
		t.Fatal("the answer has no deferred_mount")
	}
	found := map[protowire.Number][]string{}
	for len(encoded) > 0 {
		number, kind, tag := protowire.ConsumeTag(encoded)
		length := protowire.ConsumeFieldValue(number, kind, encoded[tag:])
		if length < 0 {
			t.Fatal("deferred_mount is no message")
		}
		value := encoded[tag : tag+length]
		if kind == protowire.BytesType {
			value, _ = protowire.ConsumeBytes(value)
		}
		found[number] = append(found[number], string(value))
		encoded = encoded[tag+length:]
	}
	return found
}

func TestCapabilitiesAreForCallersThatKnowDeferral(t *testing.T) {
	for extensions, expected := range map[string]int{"": 0, "other": 0, "deferral": 3, "other, deferral": 3} {
		ctx := metadata.NewIncomingContext(context.Background(), metadata.Pairs("crust-extensions", extensions))
		response := &csi.NodeGetCapabilitiesResponse{}
		Advertise(ctx, response)
		if len(response.Capabilities) != expected {
			t.Errorf("%q: %v", extensions, response.Capabilities)
		}
	}
}

func TestFlagIsReadFromTheUnknownFields(t *testing.T) {
	for _, flag := range []uint64{0, 1} {
		fields := varint(text(nil, 100, "later"), publishFlag, flag)
		if Requested(received(t, &csi.NodePublishVolumeRequest{}, fields, nil)) != (flag == 1) {
			t.Errorf("flag %d", flag)
		}
	}
	if Requested(&csi.NodePublishVolumeRequest{}) || Requested(&csi.NodeStageVolumeRequest{}) {
		t.Error("a call without the flag is not deferred")
	}
}

func TestAnswerHasTheGroupOfTheRequest(t *testing.T) {
	ofMount := text(text(nil, supplementalGroup, "2000"), groupChangePolicy, "Always")
	request := &csi.NodePublishVolumeRequest{
		VolumeCapability: capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, "noatime", "rw"),
	}
	response := &csi.NodePublishVolumeResponse{}
	Answer(received(t, request, nil, ofMount), response, Mount{Device: "/dev/sda", FsType: "ext4", CapacityBytes: 4096})
	found := values(t, response)
	for number, expected := range map[protowire.Number][]string{
		3: {"ext4"}, 4: {"noatime"}, 5: {"2000"}, 6: {"Always"}, 7: {"\x00"}, 8: {"\x80\x20"},
	} {
		if !slices.Equal(found[number], expected) {
			t.Errorf("field %d: %q and not %q", number, found[number], expected)
		}
	}
}

func TestAnswerForReadersIsReadOnly(t *testing.T) {
	writer := csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	for name, request := range map[string]*csi.NodePublishVolumeRequest{
		"field": {Readonly: true, VolumeCapability: capability(writer)},
		"mode":  {VolumeCapability: capability(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY)},
		"flag":  {VolumeCapability: capability(writer, "ro")},
	} {
		response := &csi.NodePublishVolumeResponse{}
		Answer(request, response, Mount{})
		found := values(t, response)
		if !slices.Equal(found[7], []string{"\x01"}) || found[4] != nil {
			t.Errorf("%s: %q", name, found)
		}
	}
}

func TestFilesystemsAreAddedToWhatIsThere(t *testing.T) {
	response := &csi.NodeGetInfoResponse{}
	add(response, text(nil, 100, "later"))
	Filesystems(response, "ext4", "xfs")
	expected := text(text(text(nil, 100, "later"), supportedFileSystems, "ext4"), supportedFileSystems, "xfs")
	if !slices.Equal(response.ProtoReflect().GetUnknown(), expected) {
		t.Errorf("%q", response.ProtoReflect().GetUnknown())
	}
}
