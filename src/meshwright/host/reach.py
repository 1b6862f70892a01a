"""Check whether processes on this host reach each other and other hosts; find network cards (`Nic`).

The ranks of a run meet at ``MASTER_ADDR:MASTER_PORT`` (a TCP store on rank 0's host) and then open sockets between all
ranks, on the interface with the host name's address or the one that ``GLOO_SOCKET_IFNAME`` / ``NCCL_SOCKET_IFNAME``
name. Each check tests one of these steps with real sockets and a time limit. `reaping` ends processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from meshwright.host.findings import Finding
from meshwright.host.host import Host, answer_within
from meshwright.spec import format_bytes


@contextlib.contextmanager
def reaping(processes: Sequence[BaseProcess], grace_s: float) -> Iterator[None]:
    """End all processes when the block ends: terminate them, and kill those still running after ``grace_s`` seconds."""
    try:
        yield
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join(grace_s)
            if process.is_alive():
                process.kill()
                process.join()


_LOOPBACK = "lo"


# Ethernet: ``/sys/class/net/NAME`` with ``speed`` (Mbit/s, −1 if unknown), ``operstate`` and ``device`` (absent for
# virtual interfaces). InfiniBand and RoCE: ``/sys/class/infiniband/NAME/ports/N`` with ``rate`` (as in ``400 Gb/sec (4X
# NDR)``), ``state`` (``4: ACTIVE``) and ``link_layer``. Source: the kernel's Documentation/ABI/testing/sysfs-class-net
# and ABI/stable/sysfs-class-infiniband.
@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network card, or one port of a card.

    ``kind`` is Ethernet, InfiniBand or RoCE. ``bytes_per_s`` is per direction, None if the system does not report it.
    ``virtual`` interfaces have no hardware behind them.
    """

    name: str
    kind: str
    up: bool
    bytes_per_s: float | None
    virtual: bool = False


def find_interfaces(host: Host) -> tuple[Nic, ...]:
    """Return all network interfaces except the loopback, as Ethernet cards."""
    return tuple(_read_interface(host, name) for name in host.names("/sys/class/net") if name != _LOOPBACK)


def find_fabric(host: Host) -> tuple[Nic, ...]:
    """Return the ports of InfiniBand and RoCE cards."""
    return tuple(
        _read_port(host, card, port)
        for card in host.names("/sys/class/infiniband")
        for port in host.names(f"/sys/class/infiniband/{card}/ports")
    )


def choose_nics(host: Host) -> tuple[Nic, ...]:
    """Return the network cards to use between nodes: the fastest that are up, all of the same speed.

    InfiniBand and RoCE ports come before Ethernet. If all of them have unknown speeds, only the first is returned.
    Virtual interfaces are never chosen. Bonded or partly used cards are not recognised, so check the result.
    """
    for candidates in (find_fabric(host), find_interfaces(host)):
        ready = [nic for nic in candidates if nic.up and not nic.virtual]
        speeds = [nic.bytes_per_s for nic in ready if nic.bytes_per_s is not None]
        if speeds:
            return tuple(nic for nic in ready if nic.bytes_per_s == max(speeds))
        if ready:
            return tuple(ready[:1])
    return ()


def parse_rate(text: str) -> float | None:
    """Return the B/s of an InfiniBand port's ``rate`` text: ``400 Gb/sec (4X NDR)`` → 5e10; None for other text."""
    match = re.match(r"\s*([\d.]+)\s*Gb/sec", text)
    return float(match[1]) * 1e9 / 8 if match is not None and match[1].count(".") < 2 else None


def check_nics(host: Host) -> Iterator[Finding]:
    """Report each physical network card, or that no such card was found."""
    nics = [nic for nic in (*find_fabric(host), *find_interfaces(host)) if not nic.virtual]
    if not nics:
        known = bool(host.names("/sys/class/net"))
        yield Finding(area="links", name="network card", found="only virtual ones" if known else "not known")
    for nic in nics:
        speed = "speed not known" if nic.bytes_per_s is None else f"{format_bytes(nic.bytes_per_s)}/s"
        down = "" if nic.up else ", down"
        finding = Finding(area="links", name="network card", found=f"{nic.name}: {nic.kind}, {speed}{down}")
        if nic.kind != "Ethernet" and not nic.up:
            remedy = "A port of the fast network is down: check cable, switch and subnet manager (ibstat)."
            finding = finding.amended("note", remedy, "the-network-is-slower-than-its-cards")
        yield finding


def _read_interface(host: Host, name: str) -> Nic:
    folder = f"/sys/class/net/{name}"
    speed = host.read_number(f"{folder}/speed")
    return Nic(
        name=name,
        kind="Ethernet",
        up=host.read(f"{folder}/operstate") in ("up", "unknown"),
        bytes_per_s=speed * 1e6 / 8 if speed is not None and speed > 0 else None,
        virtual=not host.exists(f"{folder}/device"),
    )


def _read_port(host: Host, card: str, port: str) -> Nic:
    folder = f"/sys/class/infiniband/{card}/ports/{port}"
    return Nic(
        name=f"{card}/{port}",
        kind="RoCE" if host.read(f"{folder}/link_layer") == "Ethernet" else "InfiniBand",
        up=(host.read(f"{folder}/state") or "").endswith("ACTIVE"),
        bytes_per_s=parse_rate(host.read(f"{folder}/rate") or ""),
    )


LOOPBACK = "127.0.0.1"
_RESOLVE_TIMEOUT_S = 3.0
_CONNECT_TIMEOUT_S = 3.0
_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^:\s\[\]]+)):(?P<port>\d{1,5})")


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``host:port`` or ``[::1]:port`` into host and port. Raises ValueError for any other text."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ValueError(
            f"{text[:80]!r} is not an address. Expected HOST:PORT with a port from 1 to 65535, such as node1:29500."
        )
    return match["six"] or match["host"], int(match["port"])


def find_address(name: str) -> str | None:
    """Return the IPv4 address of a host name; None if it does not resolve, or not within the time limit."""
    try:
        found = answer_within(_RESOLVE_TIMEOUT_S, lambda: socket.getaddrinfo(name, None, socket.AF_INET))
    except (OSError, UnicodeError):
        return None
    return str(found[0][4][0]) if found else None


def can_bind(address: str, port: int = 0) -> str | None:
    """Return None if a server can listen at this address and port (0: any free port), else the reason as text."""
    try:
        # As in TCPStore: a port that a finished run left in TIME_WAIT is free.
        with socket.create_server((address, port), reuse_port=False):
            return None
    except (OSError, OverflowError, UnicodeError) as error:
        return _reason(error)


def check_loopback(_host: Host) -> Iterator[Finding]:
    """Send a byte from one socket to another on this host, over 127.0.0.1."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            server.settimeout(_CONNECT_TIMEOUT_S)
            with socket.create_connection(server.getsockname(), timeout=_CONNECT_TIMEOUT_S) as near:
                far, _address = server.accept()
                with far:
                    near.sendall(b"x")
                    far.settimeout(_CONNECT_TIMEOUT_S)
                    reached = far.recv(1) == b"x"
        found = "sockets reach each other" if reached else "a byte was lost"
    except OSError as error:
        found, reached = f"sockets do not reach each other: {_reason(error)}", False
    finding = Finding(area="reach", name="loopback", found=found)
    remedy = "Bring the loopback up (ip link set lo up) and allow it in the firewall."
    yield finding if reached else finding.amended("problem", remedy, "no-ranks-meet")


def check_host_name(host: Host) -> Iterator[Finding]:
    """Check that the host's own name resolves to an address of this host that others could reach."""
    address = find_address(host.name)
    remedy = "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface that other hosts reach."
    topic = "another-host-is-not-reached"
    if address is None:
        found = f"{host.name!r} does not resolve: ranks fall back to the loopback"
        finding = Finding(area="reach", name="host name", found=found)
        yield finding.amended("note", f"Add it to /etc/hosts, or set {remedy}", topic)
    elif (reason := can_bind(address)) is not None:
        found = f"{host.name!r} resolves to {address}, which is not an address of this host ({reason})"
        finding = Finding(area="reach", name="host name", found=found)
        yield finding.amended("problem", f"Correct /etc/hosts, or set {remedy}", topic)
    else:
        alone = ": enough for runs on this host alone" if address.startswith("127.") else ""
        yield Finding(area="reach", name="host name", found=f"{host.name!r} resolves to {address}{alone}")


def check_rendezvous(host: Host) -> Iterator[Finding]:
    """Check MASTER_ADDR and MASTER_PORT, if set: the name has to resolve, and a port on this host has to be free."""
    name, port_text = (host.environment.get(f"MASTER_{part}") for part in ("ADDR", "PORT"))
    if name is None and port_text is None:
        yield Finding(area="reach", name="MASTER_ADDR", found="not set (torchrun sets it)")
        return
    where = f"MASTER_ADDR={name or '(not set)'}, MASTER_PORT={port_text or '(not set)'}"
    if name is None or port_text is None:
        yield _meeting_problem(where, "only one of the two is set", "Set both or neither.")
    elif not port_text.isdigit() or not 1 <= int(port_text) <= 65535:
        yield _meeting_problem(where, "the port is not valid", "Choose a port from 1024 to 65535.")
    elif (address := find_address(name)) is None:
        yield _meeting_problem(where, f"{name!r} does not resolve", "Use an address, or add the name to /etc/hosts.")
    elif can_bind(address) is not None:
        yield Finding(area="reach", name="MASTER_ADDR", found=f"{where}: another host ({address})")
    elif (reason := can_bind(address, int(port_text))) is not None:
        yield _meeting_problem(
            where, f"this host's port is not free ({reason})", "Choose another port, or end the run that holds it."
        )
    else:
        yield Finding(area="reach", name="MASTER_ADDR", found=f"{where}: the port is free here")


def check_interfaces(host: Host) -> Iterator[Finding]:
    """Check that interfaces named by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME exist.

    gloo reads a list of exact names. NCCL reads a list of prefixes; after ``=`` the names are exact, after ``^`` they
    are excluded (NCCL user guide, environment variables).
    """
    present = host.names("/sys/class/net")
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        given = host.environment.get(variable)
        if given is None or not present:
            continue
        wanted = given.lstrip("^=").split(",")
        exact = variable.startswith("GLOO") or given.startswith("=")
        missing = [name for name in wanted if not any(_names(name, there, exact=exact) for there in present)]
        if not missing or given.startswith("^"):
            yield Finding(area="reach", name=variable, found=f"{given!r}: exists")
            continue
        finding = Finding(area="reach", name=variable, found=f"{given!r}: no interface {', '.join(map(repr, missing))}")
        yield finding.amended("problem", f"Unset it, or name one of {', '.join(present)}.", "no-ranks-meet")


def check_addresses(addresses: Sequence[tuple[str, int]]) -> Iterator[Finding]:
    """Report for each address (host, port) whether a connection succeeds within a time limit; all are tried at once."""
    if not addresses:
        return
    with ThreadPoolExecutor(len(addresses)) as pool:
        reasons = list(pool.map(_try_connect, addresses))
    for (name, port), reason in zip(addresses, reasons, strict=True):
        finding = Finding(area="reach", name=f"{name}:{port}", found=reason or "answers")
        remedy = "Does something listen there (start rank 0 first)? Is the address right, the port open in firewalls?"
        yield finding.amended("problem", remedy, "another-host-is-not-reached") if reason else finding


def _try_connect(address: tuple[str, int]) -> str | None:
    """None if something answers, else the reason why not."""

    def connect() -> bool:
        with socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S):
            return True

    try:
        answered = answer_within(_RESOLVE_TIMEOUT_S + _CONNECT_TIMEOUT_S, connect)
    except (OSError, UnicodeError) as error:
        return f"not reached: {_reason(error)}"
    return None if answered else f"no answer within {_RESOLVE_TIMEOUT_S + _CONNECT_TIMEOUT_S:g} s"


def _names(wanted: str, there: str, *, exact: bool) -> bool:
    return there == wanted if exact else there.startswith(wanted)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {_CONNECT_TIMEOUT_S:g} s"
    # create_server appends its address to the system's message; errors of name resolution have numbers below 0.
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _meeting_problem(where: str, found: str, remedy: str) -> Finding:
    finding = Finding(area="reach", name="MASTER_ADDR", found=f"{where}: {found}")
    return finding.amended("problem", remedy, "no-ranks-meet")
