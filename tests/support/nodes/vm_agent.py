"""Runs as the first process of a node's kernel (`kernel_node`): commands over TCP, and the driver's socket over TCP.

port 7000   one JSON line {"argv", "input"}, answered by one line {"code", "out"}; the standard streams are one
port 7001   bytes, to and from the UNIX socket that the driver listens on
"""

import asyncio
import contextlib
import json
import os
import sys

COMMANDS, DRIVER = 7000, 7001
UP = "NODE-IS-UP"


async def command(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    request = json.loads(await reader.readline())
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *request["argv"], stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate(request["input"].encode())
    answer = {"code": process.returncode, "out": output.decode(errors="replace")}
    writer.write(json.dumps(answer).encode() + b"\n")
    await writer.drain()
    writer.close()


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connect to the driver; a socket that nobody listens on ends the connection."""
    with contextlib.suppress(OSError):
        inner_reader, inner_writer = await asyncio.open_unix_connection(sys.argv[1])
        await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))
    writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def main() -> None:
    await asyncio.start_server(command, "0.0.0.0", COMMANDS)
    await asyncio.start_server(forward, "0.0.0.0", DRIVER)
    sys.stdout.write(f"{UP}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    asyncio.run(main())
