"""Processes that connect to a Unix socket of this host and do not shake hands as they should.

As a script this file is one such process: ``hostile.py NAME KIND COUNT WAY HELLO``, with the name and the
hello in hexadecimal. It keeps ``COUNT`` connections open, and connects again where one was closed, until its
input ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket as net
import subprocess
import sys
from collections.abc import Iterator, Sequence

SOMEBODY = 65534
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

ALL_WAYS = ("silent", "garbage", "no descriptor", "no memory", "wrong hello") + (
    ("another user",) if os.geteuid() == 0 else ()
)


@contextlib.contextmanager
def hostile_processes(
    name: bytes, kind: net.SocketKind, ways: Sequence[str], count: int, hello: bytes, wrong_hello: bytes
) -> Iterator[None]:
    """One process for each of ``ways``, with ``count`` connections each when the block begins.

    Args:
        hello: one that would be accepted.
        wrong_hello: a well-formed one that would not.
    """
    with contextlib.ExitStack() as stack:
        for way in ways:
            said = wrong_hello if way == "wrong hello" else hello
            command = [sys.executable, __file__, name.hex(), str(int(kind)), str(count), way, said.hex()]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == b"connected\n"
        yield


def arena() -> int:
    """The descriptor of memory as it has to be."""
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 38)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def connect(name: bytes, kind: int, way: str, hello: bytes, fd: int) -> net.socket | None:
    """A connection on which ``way`` was done; None if there is no room for one now."""
    socket = net.socket(net.AF_UNIX, kind)
    socket.setblocking(False)
    try:
        socket.connect(name)
        if way == "garbage":
            socket.send(b"\xc1garbage")
        elif way == "no descriptor":
            socket.send(hello)
        elif way != "silent":
            net.send_fds(socket, [hello], [fd])
    except BlockingIOError:
        socket.close()
        return None
    except OSError:  # it was closed meanwhile
        pass
    return socket


def main(name: str, kind: str, count: str, way: str, hello: str) -> None:
    fd = os.open("/dev/null", os.O_RDWR) if way == "no memory" else arena()
    if way == "another user":
        os.setuid(SOMEBODY)
    sockets: dict[int, net.socket] = {}
    poller = select.poll()
    poller.register(sys.stdin, select.POLLIN | select.POLLHUP)
    is_ready = False
    while True:
        while len(sockets) < int(count):
            socket = connect(bytes.fromhex(name), int(kind), way, bytes.fromhex(hello), fd)
            if socket is None:
                break
            sockets[socket.fileno()] = socket
            poller.register(socket, select.POLLHUP)
        if not is_ready:
            is_ready = True
            print("connected", flush=True)
        for descriptor, _ in poller.poll(5):
            if descriptor == sys.stdin.fileno():
                return
            poller.unregister(descriptor)
            sockets.pop(descriptor).close()


if __name__ == "__main__":
    main(*sys.argv[1:])
