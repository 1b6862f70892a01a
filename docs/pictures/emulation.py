"""Draws docs/images/emulation.svg: the namespaces, cables and queues of examples/emulated/two-labs.toml.

    python docs/pictures/emulation.py

A test (tests/docs/test_pictures.py) runs this and compares with the file.
"""

from __future__ import annotations

from pathlib import Path

from drawing import WIDTH, picture

from meshwright.emulation.layout import LabLayout, plan_layout, rank_shares
from meshwright.spec import load_cluster, write_text

DOCS = Path(__file__).resolve().parent.parent
PICTURE = DOCS / "images" / "emulation.svg"
CLUSTER = DOCS.parent / "examples" / "emulated" / "two-labs.toml"
CORES = 2
QUEUE = "#c8731a"
BOX, HIGH, TOP, SWITCH = 190.0, 62.0, 46.0, 196.0


def draw() -> str:
    """The picture as SVG."""
    cluster = load_cluster(CLUSTER)
    layout, shares = plan_layout(cluster), rank_shares(cluster, CORES)
    body = [
        '<text x="20" y="24">a namespace per NIC, with its ranks</text>',
        f'<circle cx="{WIDTH - 236}" cy="19" r="6" fill="{QUEUE}"/>',
        f'<text x="{WIDTH - 222}" y="24">queue that limits the rate (tbf)</text>',
        _box(20, SWITCH, WIDTH - 40, 176, "#f4f6f8"),
        f'<text x="32" y="{SWITCH + 166:g}">namespace of the switch</text>',
    ]
    for number, nic in enumerate(layout.nics):
        x = _x(layout, number)
        ranks = [rank for rank, place in enumerate(layout.nic_of_rank) if place == number]
        name = cluster.nodes[nic.node].name
        body += [
            _box(x, TOP, BOX, HIGH, "#e3edf7"),
            _words(x + BOX / 2, TOP + 24, f"{name}: {', '.join(f'rank {rank}' for rank in ranks)}"),
            _words(x + BOX / 2, TOP + 46, f"{shares[ranks[0]]:.2f} of a core"),
            _cable(x + BOX / 2, TOP + HIGH, SWITCH + 22, _rate(nic.bytes_per_s)),
        ]
    assert layout.uplink_bytes_per_s is not None
    for rack in range(layout.num_racks):
        mine = [_x(layout, number) for number, nic in enumerate(layout.nics) if nic.rack == rack]
        left, right = mine[0], mine[-1] + BOX
        middle = (left + right) / 2
        body += [
            _box(left, SWITCH + 22, right - left, 34, "#ffffff"),
            _words(middle, SWITCH + 44, f"bridge of rack {rack}"),
            _cable(middle, SWITCH + 56, SWITCH + 116, f"uplink, {_rate(layout.uplink_bytes_per_s)}"),
        ]
    body += [
        _box(_x(layout, 0), SWITCH + 116, WIDTH - 2 * _x(layout, 0), 34, "#ffffff"),
        _words(WIDTH / 2, SWITCH + 138, "bridge between racks"),
    ]
    return picture("two-labs.toml as namespaces, bridges and queues", body, SWITCH + 190)


def _x(layout: LabLayout, number: int) -> float:
    gap = (WIDTH - 80 - len(layout.nics) * BOX) / (len(layout.nics) - 1)
    return 40 + number * (BOX + gap)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:g} Mbit/s"


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="#90999f"/>'


def _words(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle">{text}</text>'


def _cable(x: float, top: float, bottom: float, text: str) -> str:
    """A cable with a queue (token bucket) at both ends."""
    queues = "".join(f'<circle cx="{x:g}" cy="{y:g}" r="6" fill="{QUEUE}"/>' for y in (top + 10, bottom - 10))
    return (
        f'<line x1="{x:g}" x2="{x:g}" y1="{top:g}" y2="{bottom:g}" stroke="#2f6db3" stroke-width="4"/>{queues}'
        f'<text x="{x + 12:g}" y="{(top + bottom) / 2 + 5:g}">{text}</text>'
    )


if __name__ == "__main__":
    write_text(draw(), PICTURE)
