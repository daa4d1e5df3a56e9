"""Testbed of several hosts on one machine: network namespaces with their own addresses, names and /etc/hosts.

Bridges in one more namespace join the hosts, so that the machine's own network, even its packet filter,
does not affect them. Any number of testbeds, of any number of processes, may exist at once: all have the
same addresses, and none sees another. A guard process outlives the creator of a testbed and removes it,
however the creator ends.

Needs root and iproute2. Namespaces have names, for debugging: ``ip netns exec NAME CMD``.

Run as a program, without torch, this module is that guard, or moves a command to a host.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NAMESPACES: Final = Path("/run/netns")
FILES: Final = Path("/etc/netns")

# linux/sched.h and linux/mount.h
CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWNET: Final = 0x40000000
MS_BIND: Final = 1 << 12
MS_REC: Final = 1 << 14
MS_SLAVE: Final = 1 << 19

# The burst of a shaped link, and how long a packet may wait before it is dropped: as in a switch, or in
# Linux's own queues. A longer queue delays acknowledgements of packets in the other direction.
BURST_BYTES: Final = 128 * 1024
LATENCY_MS: Final = 20

# Linux passes up to 64 KiB from host to host as one packet, and a full queue would drop it whole, which no
# switch does: its flow has nothing left that tells of the loss, and stands still for a fifth of a second.
# Single segments would take more time of this machine's cores than of the links.
PACKET_SEGMENTS: Final = 4

# Linux's default, as on the hosts of most. BBR shares a short queue unevenly.
USUAL_CONGESTION_CONTROL: Final = "cubic"
TCP: Final = Path("/proc/sys/net/ipv4")

END_SECONDS: Final = 5.0

# The creator may have been killed while a program of its own was adding a host.
SETTLE_SECONDS: Final = 0.5

# -I and -S: it needs the standard library alone, and starts in a third of the time.
_PROGRAM: Final = (sys.executable, "-I", "-S", str(Path(__file__).resolve()))

_serial = itertools.count()


@dataclass(frozen=True)
class Host:
    """One host. It can be pickled, for a process that is to enter it."""

    name: str
    namespace: str
    number: int
    networks: tuple[int, ...]

    def ipv4(self, network: int | None = None) -> str:
        """Its address on a network; by default on its first."""
        return f"10.77.{self.networks[0] if network is None else network}.{self.number}"

    def ipv6(self, network: int | None = None) -> str:
        """Its address on a network; by default on its first."""
        return f"fd77::{self.networks[0] if network is None else network}:{self.number}"

    def enter(self) -> None:
        """Moves the calling process, which must have one thread, to this host. Serves as ``preexec_fn``."""
        with open(NAMESPACES / self.namespace) as namespace:
            _call("setns", namespace.fileno(), CLONE_NEWNET)
        _call("unshare", CLONE_NEWNS | CLONE_NEWUTS)
        # Mounts from now on are invisible to other processes.
        _call("mount", b"none", b"/", None, MS_REC | MS_SLAVE, None)
        _call("mount", bytes(FILES / self.namespace / "hosts"), b"/etc/hosts", None, MS_BIND, None)
        socket.sethostname(self.name)

    def entering(self) -> list[str]:
        """The prefix of a command that runs on this host."""
        return [*_PROGRAM, "enter", self.namespace, self.name]

    def ip(self, *arguments: str) -> None:
        """``ip`` with these arguments, on this host."""
        _ip("-n", self.namespace, *arguments)

    def carried_bytes(self) -> tuple[int, int]:
        """Bytes sent and received over its first network, which is shaped, with the headers of all packets.

        They are the shapers' counts. The devices count fewer: they see large packets before segmentation.
        """
        network = self.networks[0]
        out = _carried(self.namespace, f"eth{network}")
        return out, _carried(_bridges_of(self.namespace), _port(self.number, network))

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """Without its cable to the first network; it keeps its addresses, and packets are lost."""
        bridges, port = _bridges_of(self.namespace), _port(self.number, self.networks[0])
        _ip("-n", bridges, "link", "set", port, "down")
        try:
            yield
        finally:
            _ip("-n", bridges, "link", "set", port, "up")


class Hosts(contextlib.AbstractContextManager["Hosts"]):
    """Hosts on common networks; they exist from the beginning of the ``with`` block to its end.

    At the end, all processes on them are killed. If the creator was killed, the guard does this; if the guard
    was killed, too, the next creator on the machine does.

    Args:
        networks: the hosts by name, and which networks each is on. All hosts have all names, of which
            ``NAME`` leads to the IPv4 and IPv6 address on the host's first network, ``NAME.v4`` and
            ``NAME.v6`` to one of them.
        bits_per_second: of each link in each direction; 0: as fast as the machine can.
        delay_seconds: what each link adds in each direction.
        racks: by their hosts. Each rack's hosts reach the others over one uplink. Hosts that are in none are
            between the racks.
        uplink_bits_per_second: of each rack's uplink in each direction; 0: as fast as the machine can.
        lines: of a host's own /etc/hosts, in place of its own names there.
    """

    def __init__(
        self,
        networks: Mapping[str, Sequence[int]],
        bits_per_second: int = 0,
        lines: Mapping[str, Sequence[str]] | None = None,
        delay_seconds: float = 0.0,
        racks: Mapping[str, int] | None = None,
        uplink_bits_per_second: int = 0,
    ) -> None:
        self._racks = racks or {}
        self._uplink_bits_per_second = uplink_bits_per_second
        self._prefix = f"{_own_prefix()}{next(_serial)}-"
        self._bits_per_second = bits_per_second
        self._delay_seconds = delay_seconds
        self._lines = lines or {}
        self._hosts = {
            name: Host(name, self._prefix + name, number, tuple(joined))
            for number, (name, joined) in enumerate(networks.items(), start=1)
        }

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def get(self, name: str, default: Host) -> Host:
        """The host of that name, or ``default`` where there is none."""
        return self._hosts.get(name, default)

    def __enter__(self) -> Hosts:
        _sweep()
        self._guard = subprocess.Popen(
            [*_PROGRAM, "guard", self._prefix, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            bridges = _bridges_of(self._prefix)
            _ip("netns", "add", bridges)
            for network in {network for host in self._hosts.values() for network in host.networks}:
                _batch(bridges, f"link add net{network} type bridge", f"link set net{network} up")
            for rack in set(self._racks.values()):
                self._add_rack(rack, bridges)
            for host in self._hosts.values():
                self._add(host, bridges)
        except BaseException:  # Ctrl-C too: nothing that was made may be left behind
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        _remove(self._prefix)
        self._guard.kill()
        self._guard.wait()

    def _add_rack(self, rack: int, bridges: str) -> None:
        """Joins a bridge for the rack to the first network."""
        up, down = f"up{rack}", f"down{rack}"
        _batch(
            bridges,
            f"link add rack{rack} type bridge",
            f"link add {up} type veth peer {down}",
            f"link set {up} master rack{rack} up",
            f"link set {down} master net0 up",
            f"link set rack{rack} up",
        )
        for device in (up, down):
            _shape(bridges, device, self._uplink_bits_per_second, 0.0)

    def _add(self, host: Host, bridges: str) -> None:
        files = FILES / host.namespace
        files.mkdir(parents=True)
        lines = [*self._lines.get(host.name, ()), "127.0.0.1 localhost", "::1 localhost"]
        for other in self._hosts.values():
            if other is host and host.name in self._lines:
                continue
            lines.append(f"{other.ipv4()} {other.name} {other.name}.v4")
            lines.append(f"{other.ipv6()} {other.name} {other.name}.v6")
        (files / "hosts").write_text("\n".join(lines) + "\n")
        _ip("netns", "add", host.namespace)
        _batch(host.namespace, "link set lo up")
        control = f"echo {congestion_control()} > {TCP}/tcp_congestion_control"
        _ip("netns", "exec", host.namespace, "sh", "-c", control)
        for network in host.networks:
            port, device = _port(host.number, network), f"eth{network}"
            _batch(
                bridges,
                f"link add {port} type veth peer {device} netns {host.namespace}",
                f"link set {port} master {self._bridge(host, network)} up",
            )
            _batch(
                host.namespace,
                f"addr add {host.ipv4(network)}/24 dev {device}",
                # Without nodad the address could not be used for a second, in which others are asked for it.
                f"addr add {host.ipv6(network)}/112 dev {device} nodad",
                f"link set {device} gso_max_segs {PACKET_SEGMENTS} up",
            )
            _shape(bridges, port, self._bits_per_second, self._delay_seconds)
            _shape(host.namespace, device, self._bits_per_second, self._delay_seconds)

    def _bridge(self, host: Host, network: int) -> str:
        rack = None if network else self._racks.get(host.name)
        return f"net{network}" if rack is None else f"rack{rack}"


def why_not_here() -> str:
    """Why hosts cannot be made on this machine; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is missing; it comes with Debian's package iproute2"
    try:
        with _trial():
            return ""
    except OSError as error:
        return f"network namespaces cannot be made: {error}"


def why_no_delay() -> str:
    """Why links cannot have a delay on this machine, where hosts can be made; empty where they can."""
    try:
        with _trial() as namespace:
            _shape(namespace, "lo", 0, 0.001)
    except OSError as error:
        return f"this kernel has no netem: {error}"
    return ""


@contextlib.contextmanager
def _trial() -> Iterator[str]:
    name = f"{_own_prefix()}{next(_serial)}-trial"
    _ip("netns", "add", name)
    try:
        yield name
    finally:
        _ip("netns", "del", name)


# ── names ───────────────────────────────────────────────────────────────────────────────────────


def _own_prefix() -> str:
    """Begins the names of this process's namespaces; no other process ever has the same."""
    return f"zenps-{os.getpid()}.{_started(os.getpid())}-"


def _started(pid: int) -> str:
    """When a process began, in ticks since boot, because PIDs are reused; "" if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]  # field 22 of proc(5); the second may have blanks


def _bridges_of(name: str) -> str:
    """The namespace of the bridges, by a name that begins with the testbed's prefix."""
    return "-".join(name.split("-")[:3]) + "-net"


def _port(number: int, network: int) -> str:
    return f"host{number}.{network}"


# ── the machine ─────────────────────────────────────────────────────────────────────────────────


def congestion_control() -> str:
    """TCP's on all hosts: the usual one, or this machine's own.

    In a network namespace, root is not asked: Linux sets what is in the machine's list of allowed ones.
    """
    allowed = (TCP / "tcp_allowed_congestion_control").read_text().split()
    own = (TCP / "tcp_congestion_control").read_text().strip()
    return USUAL_CONGESTION_CONTROL if USUAL_CONGESTION_CONTROL in allowed else own


def _shape(namespace: str, device: str, bits_per_second: int, delay_seconds: float) -> None:
    """Shapes traffic sent on ``device``: a delay, then a token bucket, in the order of tc-netem(8)."""
    add = ("tc", "-n", namespace, "qdisc", "add", "dev", device)
    place = ["root", "handle", "1:"]
    if delay_seconds:
        in_flight = int(bits_per_second / 8 * delay_seconds) // 1000 + 1000  # in packets
        _run(*add, *place, "netem", "delay", f"{1000 * delay_seconds:g}ms", "limit", str(in_flight))
        place = ["parent", "1:1"]
    if bits_per_second:
        bucket = ("burst", f"{BURST_BYTES}b", "latency", f"{LATENCY_MS}ms")
        _run(*add, *place, "tbf", "rate", f"{bits_per_second}bit", *bucket)


def _carried(namespace: str, device: str) -> int:
    shapers = json.loads(_run("tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", device))
    (counted,) = (shaper["bytes"] for shaper in shapers if shaper["kind"] == "tbf")
    return int(counted)


def _sweep() -> None:
    """Removes testbeds whose creators have ended."""
    found = NAMESPACES.iterdir() if NAMESPACES.exists() else ()
    for prefix in {"-".join(path.name.split("-")[:3]) for path in found if path.name.startswith("zenps-")}:
        pid, _, started = prefix.split("-")[1].partition(".")
        if _started(int(pid)) != started:
            _remove(f"{prefix}-")


def _remove(prefix: str) -> None:
    """Kills what runs in the namespaces of a testbed, and removes them with their files."""
    for path in FILES.glob(f"{prefix}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in NAMESPACES.glob(f"{prefix}*"):
        try:
            # They would keep the namespace alive, without a name.
            _kill_all_in(path.name)
            _ip("netns", "del", path.name)
        except OSError:
            if path.exists():  # else a guard or another creator was faster
                raise


def _kill_all_in(namespace: str) -> None:
    until = time.monotonic() + END_SECONDS
    while pids := [int(pid) for pid in _ip("netns", "pids", namespace).split()]:
        assert time.monotonic() < until, f"processes {pids} in {namespace} outlive SIGKILL"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _batch(namespace: str, *lines: str) -> None:
    _run("ip", "-n", namespace, "-batch", "-", text="\n".join(lines))


def _run(*command: str, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _call(name: str, *arguments: object) -> None:
    """A system call that Python 3.11 has no name for."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


# ── the program ─────────────────────────────────────────────────────────────────────────────────


def _guard(prefix: str, creator: int) -> None:
    """Waits for the end of the process ``creator``, then removes the rest of its testbed."""
    # The end of a pipe would come late: processes that were forked hold the other end, too.
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(creator)
        # Its number may have passed to another before.
        if prefix.startswith(f"zenps-{creator}.{_started(creator)}-"):
            select.select([descriptor], [], [])
    for _ in range(2):
        _remove(prefix)
        time.sleep(SETTLE_SECONDS)


def _enter(namespace: str, name: str, *command: str) -> None:
    Host(name, namespace, 0, ()).enter()
    os.execvp(command[0], command)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["guard", prefix, creator]:
            _guard(prefix, int(creator))
        case ["enter", *arguments]:
            _enter(*arguments)
        case _:
            sys.exit("expected: guard PREFIX PID, or enter NAMESPACE NAME COMMAND...")
