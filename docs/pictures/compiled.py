"""Draws docs/images/compiled.svg: when in a backward the gradients of GPT-2 small are there, compiled in three ways.

    python docs/pictures/compiled.py

Costs are those of an H100 as it ships; a test (tests/docs/test_pictures.py) runs this and compares with the file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from drawing import WIDTH, picture

from meshwright.cost import CostModel
from meshwright.spec import Graph, compiled_units, load_cluster, load_shipped_graph, write_text

PICTURE = Path(__file__).resolve().parent.parent / "images" / "compiled.svg"
LEFT, TOP, HEIGHT, PANEL = 60.0, 40.0, 260.0, 820.0
BATCH = 8


def draw() -> str:
    """The picture as SVG."""
    graph = load_shipped_graph("gpt2-small")
    assert graph is not None, "it ships"
    whole = [(0, len(graph.ops))]
    ways = (
        ("not compiled", "#5b6770", [(op, op + 1) for op in range(len(graph.ops))]),
        ("each layer compiled", "#2f6db3", list(compiled_units(replace(graph, compiled=1)))),
        ("compiled as a whole", "#c8731a", whole),
    )
    body = [f'<rect x="{LEFT:g}" y="{TOP:g}" width="{PANEL:g}" height="{HEIGHT:g}" fill="none" stroke="#b0b7bd"/>']
    for number, (words, colour, units) in enumerate(ways):
        x = LEFT + number * 190
        body.append(f'<line x1="{x:g}" x2="{x + 22:g}" y1="20" y2="20" stroke="{colour}" stroke-width="2"/>')
        body.append(f'<text x="{x + 28:g}" y="24">{words}</text>')
        points = " ".join(
            f"{LEFT + PANEL * now:.1f},{TOP + HEIGHT * (1 - share):.1f}" for now, share in _ready(graph, units)
        )
        body.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    for share in (0.0, 0.5, 1.0):
        y, x = TOP + HEIGHT * (1 - share), LEFT + PANEL * share
        body.append(f'<text x="{LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
        body.append(f'<text x="{x:g}" y="{TOP + HEIGHT + 18:g}" text-anchor="middle">{share:.0%}</text>')
    bottom = TOP + HEIGHT + 38
    body.append(f'<text x="{WIDTH / 2:g}" y="{bottom:g}" text-anchor="middle">of the backward is over</text>')
    body.append(f'<text x="{LEFT + 8:g}" y="{TOP + 18:g}">gradients that are there, and may leave</text>')
    return picture("When gradients are there, by what is compiled together", body, bottom + 12)


def _ready(graph: Graph, units: list[tuple[int, int]]) -> list[tuple[float, float]]:
    """Shares of the backward's time and of the gradients' bytes, as steps."""
    cluster = load_cluster("1xH100")
    backward = CostModel(cluster=cluster, precision="amp").estimate_ops(graph, BATCH, cluster.device_kind(0)).backward_s
    first = {
        i: op for op in reversed(range(len(graph.ops))) for i in graph.ops[op].inputs if graph.tensors[i].requires_grad
    }
    size = np.zeros(len(graph.ops))
    for i in graph.parameters:
        size[first[i]] += graph.tensors[i].num_bytes(1)
    passed = made = 0.0
    points = [(0.0, 0.0)]
    for start, stop in reversed(units):
        passed += backward[start:stop].sum() / backward.sum()
        points.append((float(passed), made))
        made += float(size[start:stop].sum() / size.sum())
        points.append((float(passed), made))
    return points


if __name__ == "__main__":
    write_text(draw(), PICTURE)
