package deferral

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const byNumber = "/sys/dev/block"

// ErrNoBlockDevice says that the path leads to something else.
var ErrNoBlockDevice = errors.New("it is no block device")

// Describe names a block device by its identity: another disk may have the path tomorrow, and another sequence then.
func Describe(path, fsType string) (Mount, error) {
	var found syscall.Stat_t
	if err := syscall.Stat(path, &found); err != nil {
		return Mount{}, err
	}
	if found.Mode&syscall.S_IFMT != syscall.S_IFBLK {
		return Mount{}, ErrNoBlockDevice
	}
	mount := Mount{Device: path, Major: unix.Major(found.Rdev), Minor: unix.Minor(found.Rdev), FsType: fsType}
	return mount, mount.measure(byNumber)
}

// measure reads sequence and size. A partition has the sequence of its disk, one directory above (H-23).
func (mount *Mount) measure(byNumber string) error {
	directory, err := filepath.EvalSymlinks(fmt.Sprintf("%s/%d:%d", byNumber, mount.Major, mount.Minor))
	if err != nil {
		return err
	}
	disk := directory
	switch _, err := os.Stat(filepath.Join(directory, "partition")); {
	case err == nil:
		disk = filepath.Dir(directory)
	case !os.IsNotExist(err):
		return err
	}
	if mount.DiskSequence, err = number(disk, "diskseq"); err != nil {
		return err
	}
	sectors, err := number(directory, "size")
	mount.CapacityBytes = int64(sectors) * 512
	return err
}

func number(directory, name string) (uint64, error) {
	text, err := os.ReadFile(filepath.Join(directory, name))
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
}
