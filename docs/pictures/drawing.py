"""What the pictures of these pages share: a chain of layers to simulate, even devices, and timelines as SVG.

A layer of the chain takes the given seconds forward per sample and twice that time backward (by default), on
devices of 10^12 FLOP/s. Links take no time unless a picture is about them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.report.schedule_pictures import COLOURS as COMPUTING
from meshwright.report.schedule_pictures import IDLE
from meshwright.simulator import ControlledRun, Simulation, simulate_plan
from meshwright.spec import (
    Cluster,
    DeviceGroup,
    DeviceKind,
    Extent,
    GradientExchange,
    Graph,
    Layer,
    Link,
    Node,
    Op,
    Opcode,
    Optimizer,
    Plan,
    StagePlan,
    Tensor,
    Workload,
)

WIDTH = 960
MARGIN = 76
ROW = 26
INSTANT = Link(latency_s=0.0, bandwidth_bytes_per_s=1e18)
COLOURS = {
    **COMPUTING,
    Opcode.ALL_REDUCE: "#d9a7c7",
    Opcode.SEND_ACTIVATION: "#c9b8e8",
    Opcode.SEND_GRADIENT: "#e8b48f",
}


def chain(seconds: Sequence[float] = (1,) * 8, num_weights: int = 1, width: int = 1, backward: float = 2.0) -> Graph:
    """A graph with one op per layer and given time, ``num_weights`` weights each, ``width`` numbers per sample."""
    shape = (Extent(0, 1),) if width == 1 else (Extent(0, 1), Extent(width))
    tensors = [Tensor(name="x", shape=shape, dtype="float32", role="input", storage=0)]
    ops = []
    for index, forward_s in enumerate(seconds):
        weight, output = len(tensors), len(tensors) + 1
        last = index == len(seconds) - 1
        for role, name, size in (
            ("parameter", f"{index}.weight", (Extent(num_weights),)),
            ("activation", f"y{index}", () if last else shape),
        ):
            tensors.append(
                Tensor(name=name, shape=size, dtype="float32", role=role, storage=len(tensors), requires_grad=True)
            )
        ops.append(
            Op(
                name=f"op{index}",
                kind="aten.mul.Tensor",
                inputs=(weight - 1 if index else 0, weight),
                outputs=(output,),
                flops=Extent(0, round(forward_s * 10**12)),
                backward_flops=Extent(0, round(backward * forward_s * 10**12)),
                saved=(weight - 1 if index else 0,),
            )
        )
    return Graph(
        name="chain",
        tensors=tuple(tensors),
        ops=tuple(ops),
        layers=tuple(Layer(name=f"layers.{i}", start=i, stop=i + 1) for i in range(len(ops))),
        inputs=(0,),
        outputs=(len(tensors) - 1,),
        has_loss=True,
    )


def cluster(devices_per_node: int, num_nodes: int = 1, *, link: Link = INSTANT, nic: Link = INSTANT) -> Cluster:
    """Devices of 10^12 FLOP/s; each node has one network card."""
    kind = DeviceKind(
        name="even",
        memory_bytes=10**12,
        memory_bandwidth_bytes_per_s=1e18,
        peak_flops_per_s={"float32": 1e12},
        source="chosen so that one layer's forward takes a second",
    )
    nodes = tuple(
        Node(
            name=f"node{index}",
            devices=(DeviceGroup(kind="even", count=devices_per_node),),
            host_memory_bytes=10**12,
            num_cores=devices_per_node,
            device_link=link,
            pcie=INSTANT,
            nic=nic,
        )
        for index in range(num_nodes)
    )
    return Cluster(name="even", device_kinds=(kind,), nodes=nodes)


def lay_out(
    graph: Graph,
    stages: Sequence[tuple[int, Sequence[int]]],
    schedule: str,
    *,
    num_microbatches: int = 8,
    batch: int = 8,
    exchange: GradientExchange | None = None,
) -> Plan:
    """The plan of a pipeline whose stages are (number of layers, ranks)."""
    placed, layer = [], 0
    for num_layers, ranks in stages:
        placed.append(StagePlan(start=layer, stop=layer + num_layers, ranks=tuple(ranks)))
        layer += num_layers
    return Plan(
        model="chain",
        graph_hash=graph.content_hash,
        cluster="even",
        workload=Workload(global_batch=batch, optimizer=Optimizer(kind="sgd")),
        stages=tuple(placed),
        num_microbatches=num_microbatches,
        schedule=schedule,
        exchange=exchange or GradientExchange(),
    )


def simulate(
    stages: Sequence[tuple[int, Sequence[int]]],
    schedule: str,
    *,
    num_microbatches: int = 8,
    batch: int = 8,
    graph: Graph | None = None,
    machines: Cluster | None = None,
    exchange: GradientExchange | None = None,
    num_steps: int = 1,
) -> Simulation:
    """Simulate what `lay_out` lays out."""
    graph = graph or chain()
    plan = lay_out(graph, stages, schedule, num_microbatches=num_microbatches, batch=batch, exchange=exchange)
    return simulate_plan(plan, graph, machines or cluster(plan.num_ranks), num_steps=num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One timeline of a picture: which tracks, how long a second is, and what the numbers of spans are."""

    title: str
    result: Simulation | ControlledRun
    pixels_per_s: float
    tracks: tuple[tuple[int, str], ...] = ()
    note: str = ""
    number: Literal["microbatch", "stage"] = "microbatch"

    def draw(self, top: float) -> tuple[list[str], float]:
        """Its SVG, and where the next one begins."""
        timeline = self.result.timeline
        tracks = self.tracks or tuple((rank, "compute") for rank in range(timeline.num_ranks))
        note = self.note
        if not note and isinstance(self.result, Simulation):
            note = f"step {self.result.step_time_s:.0f} s, bubble {100 * self.result.bubble_fraction:.1f} %"
        lines = [
            f'<text x="{MARGIN}" y="{top + 16:g}" font-weight="bold">{self.title}</text>',
            f'<text x="{WIDTH - 16}" y="{top + 16:g}" text-anchor="end">{note}</text>',
        ]
        top += 26
        length = max(timeline.end_ps) / 1e12 * self.pixels_per_s
        for row, (rank, stream) in enumerate(tracks):
            y = top + row * ROW
            label = f"rank {rank}" if stream == "compute" else stream
            lines.append(f'<text x="{MARGIN - 8}" y="{y + 16:g}" text-anchor="end">{label}</text>')
            lines.append(f'<rect x="{MARGIN}" y="{y:g}" width="{length:.1f}" height="{ROW - 4}" fill="{IDLE}"/>')
        for index in range(timeline.num_spans):
            lines += self._span(index, tracks, top)
        return lines, top + len(tracks) * ROW + 18

    def _span(self, index: int, tracks: tuple[tuple[int, str], ...], top: float) -> list[str]:
        timeline = self.result.timeline
        stream = timeline.tracks[timeline.track[index]]
        opcode = Opcode(int(timeline.opcode[index]))
        if (stream.rank, stream.name) not in tracks or opcode is Opcode.OPTIMIZER_STEP:
            return []
        x = MARGIN + timeline.start_ps[index] / 1e12 * self.pixels_per_s
        width = (timeline.end_ps[index] - timeline.start_ps[index]) / 1e12 * self.pixels_per_s
        if width < 0.5:
            return []
        y = top + tracks.index((stream.rank, stream.name)) * ROW
        lines = [
            f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{ROW - 4}" fill="{COLOURS[opcode]}" '
            f'stroke="#ffffff"/>'
        ]
        numbers = getattr(timeline, self.number)
        microbatch, last = int(numbers[index]), int(numbers.max())
        # All numbers of a panel or those of the wider kind alone, so that none of a row is missing.
        if microbatch >= 0 and width >= 7.0 * len(str(last)):
            lines.append(
                f'<text x="{x + width / 2:.1f}" y="{y + 15:g}" text-anchor="middle" font-size="12">{microbatch}</text>'
            )
        return lines


def legend(*entries: tuple[str, str], top: float = 12) -> list[str]:
    """Coloured squares with their meaning, in one line."""
    lines, x = [], float(MARGIN)
    for colour, text in entries:
        lines.append(f'<rect x="{x:g}" y="{top:g}" width="16" height="14" fill="{colour}"/>')
        lines.append(f'<text x="{x + 22:g}" y="{top + 12:g}">{text}</text>')
        x += 22 + 6.8 * len(text) + 24
    return lines


def picture(title: str, body: Sequence[str], height: float) -> str:
    """The SVG document."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" '
        'role="img" font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" font-size="14" fill="#1c232a">'
        f'<title>{title}</title><rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>'
    )
    return "\n".join((head, *body, "</svg>", ""))


def stack(title: str, head: Sequence[str], panels: Sequence[Panel], top: float = 40.0) -> str:
    """A picture of panels below each other."""
    body = list(head)
    for panel in panels:
        lines, top = panel.draw(top)
        body += lines
    return picture(title, body, top)


def draw_schedules(
    title: str,
    head: Sequence[str],
    rows: Sequence[tuple[str, Sequence[tuple[int, Sequence[int]]], str]],
    pixels_per_s: float,
    *,
    note: Callable[[Simulation], str] = lambda _: "",
    **work: int,
) -> str:
    """A picture of schedules below each other; each row is a title, the stages as `lay_out` takes them, a schedule."""
    panels = []
    for words, stages, schedule in rows:
        result = simulate(stages, schedule, **work)
        panels.append(Panel(title=words, result=result, pixels_per_s=pixels_per_s, note=note(result)))
    return stack(title, head, panels)
