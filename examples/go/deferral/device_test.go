package deferral

import (
	"os"
	"path/filepath"
	"testing"
)

// kernel has a disk of 8:0 with a partition 8:1, as /sys shows them.
func kernel(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range map[string]string{
		"sda/diskseq": "4711\n", "sda/size": "4096\n",
		"sda/sda1/partition": "1\n", "sda/sda1/size": "2048\n",
	} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for number, directory := range map[string]string{"8:0": "sda", "8:1": "sda/sda1"} {
		if err := os.Symlink(directory, filepath.Join(root, number)); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestPartitionHasTheSequenceOfItsDiskAndItsOwnSize(t *testing.T) {
	root := kernel(t)
	for minor, bytes := range map[uint32]int64{0: 4096 * 512, 1: 2048 * 512} {
		mount := Mount{Major: 8, Minor: minor}
		if err := mount.measure(root); err != nil {
			t.Fatal(err)
		}
		if mount.DiskSequence != 4711 || mount.CapacityBytes != bytes {
			t.Errorf("8:%d: %+v", minor, mount)
		}
	}
}

func TestDeviceThatIsGoneIsAnError(t *testing.T) {
	mount := Mount{Major: 8, Minor: 16}
	if err := mount.measure(kernel(t)); !os.IsNotExist(err) {
		t.Error(err)
	}
}

func TestFileIsNoBlockDevice(t *testing.T) {
	if mount, err := Describe(os.DevNull, "ext4"); err != ErrNoBlockDevice {
		t.Errorf("%+v, %v", mount, err)
	}
}
