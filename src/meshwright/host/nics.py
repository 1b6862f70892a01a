"""Network cards of this machine, their speeds, and which of them messages between nodes would use.

Ethernet: ``/sys/class/net/NAME`` with ``speed`` (Mbit/s, −1 if unknown), ``operstate`` and ``device`` (absent for
virtual interfaces). InfiniBand and RoCE: ``/sys/class/infiniband/NAME/ports/N`` with ``rate`` (as in
``400 Gb/sec (4X NDR)``), ``state`` (``4: ACTIVE``) and ``link_layer``. Source: the kernel's
Documentation/ABI/testing/sysfs-class-net and ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.host.findings import Finding
from meshwright.host.host import Host
from meshwright.spec import format_bytes

_LOOPBACK = "lo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network card, or one port of it; ``bytes_per_s`` (per direction) is None if the system does not report it."""

    name: str
    kind: str
    up: bool
    bytes_per_s: float | None
    virtual: bool = False


def find_interfaces(host: Host) -> tuple[Nic, ...]:
    """Network interfaces without the loopback."""
    return tuple(_read_interface(host, name) for name in host.names("/sys/class/net") if name != _LOOPBACK)


def find_fabric(host: Host) -> tuple[Nic, ...]:
    """Ports of InfiniBand and RoCE cards."""
    return tuple(
        _read_port(host, card, port)
        for card in host.names("/sys/class/infiniband")
        for port in host.names(f"/sys/class/infiniband/{card}/ports")
    )


def choose_nics(host: Host) -> tuple[Nic, ...]:
    """The equal cards for messages between nodes: the fastest that are up, InfiniBand and RoCE first.

    A card of unknown speed is chosen only if no other is up; virtual interfaces never are. Bonded or partly used cards
    are not recognised: the result is a first guess to be checked.
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
    """Bytes per second of a port's ``rate``: ``400 Gb/sec (4X NDR)`` → 5e10."""
    match = re.match(r"\s*([\d.]+)\s*Gb/sec", text)
    return float(match[1]) * 1e9 / 8 if match is not None and match[1].count(".") < 2 else None


def check_nics(host: Host) -> Iterator[Finding]:
    """One finding per physical card, and one if no card is found."""
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
