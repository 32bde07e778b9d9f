"""A driver that publishes something else than the device of its volume: its switch NodePublishVolume says what."""

import os
import stat

from crust.wire.csi.v1 import csi_pb2
from examples.drivers import disks
from examples.drivers.minimal import NAME, Minimal
from examples.drivers.serving import Arguments, Code, Plugin, Refused, serve

MODES = {
    "fifo": stat.S_IFIFO,
    "socket": stat.S_IFSOCK,
    "char": stat.S_IFCHR,
    "block": stat.S_IFBLK,
}


class Hostile(Minimal):
    """With a word and its operands in the switch."""

    def _publish(self, request: csi_pb2.NodePublishVolumeRequest) -> None:
        target = request.target_path
        word, *given = self.switches.of("NodePublishVolume").split()
        if word == "link":
            os.symlink(given[0], target)
        elif word == "bind":
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
            disks.run("mount", "--bind", given[0], target)
        elif word == "directory":
            os.mkdir(target)
        elif word == "parent":
            directory = os.path.dirname(target)
            os.rename(directory, f"{directory}.moved")
            os.symlink(given[0], directory)
        elif word == "error":
            raise Refused(Code.INTERNAL, "E" * 900_000)
        elif word != "nothing":
            os.mknod(target, MODES[word] | 0o600, os.makedev(*map(int, given or (0, 0))))


def main() -> None:
    """Serve."""
    given = Arguments.parse()
    driver = Hostile(given.state_dir)
    plugin = Plugin(NAME, "0.1", given.node_id, controller=("CREATE_DELETE_VOLUME",))
    serve(given.socket, driver.switches, plugin, driver)


if __name__ == "__main__":
    main()
