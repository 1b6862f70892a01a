"""Draws docs/images/system-*.svg: one picture per page of docs/systems, each by the simulator.

    python docs/pictures/systems.py

A test (tests/docs/test_pictures.py) runs this and compares with the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from drawing import (
    COLOURS,
    IDLE,
    MARGIN,
    WIDTH,
    Panel,
    chain,
    cluster,
    lay_out,
    legend,
    picture,
    simulate,
    stack,
)

from meshwright import Choices, Cluster, Limits, Plan, Problem, Workload, load_cluster, search_plans, simulate_plan
from meshwright.simulator import Simulation, schedule_exchange
from meshwright.spec import GradientExchange, Link, Opcode, Optimizer, StagePlan, load_shipped_graph, write_text

IMAGES = Path(__file__).resolve().parent.parent / "images"
FORWARD = (COLOURS[Opcode.FORWARD], "forward")
BACKWARD = (COLOURS[Opcode.BACKWARD], "backward")
NUMBERED = (COLOURS[Opcode.FORWARD], "forward of the microbatch with this number")
SUM = (COLOURS[Opcode.ALL_REDUCE], "all-reduce of a bucket")
NOTHING = (IDLE, "idle")
FOUR_STAGES = [(2, (rank,)) for rank in range(4)]


def gpipe() -> str:
    """The same batch in 1, 4 and 16 microbatches."""
    panels = []
    for count in (1, 4, 16):
        result = simulate(FOUR_STAGES, "gpipe", num_microbatches=count, batch=16)
        words = "1 microbatch" if count == 1 else f"{count} microbatches"
        panels.append(Panel(title=f"{words} of {16 // count}", result=result, pixels_per_s=2.27))
    return stack("GPipe: more microbatches, less bubble", legend(NUMBERED, BACKWARD, NOTHING), panels)


def pipedream() -> str:
    """Activations that rank 0 keeps, under GPipe and under 1F1B."""
    graph = chain(width=2**18)
    body = legend(NUMBERED, BACKWARD, (MEMORY, "activations that rank 0 keeps"))
    top = 40.0
    for schedule, words in (("gpipe", "GPipe: all 16 microbatches in flight"), ("1f1b", "1F1B: at most 4 in flight")):
        result = simulate(FOUR_STAGES, schedule, num_microbatches=16, batch=16, graph=graph)
        lines, top = Panel(title=words, result=result, pixels_per_s=7.6).draw(top)
        body += lines
        lines, top = _memory(result, 7.6, top - 12)
        body += lines
    return picture("GPipe and 1F1B: time and memory", body, top)


MEMORY = "#b08968"


def _memory(result: Simulation, pixels_per_s: float, top: float) -> tuple[list[str], float]:
    """Memory of rank 0 over time as an area, on one scale for all panels."""
    timeline, height, most = result.timeline, 56.0, 56.0
    points, level = [], 0.0
    for rank, time_ps, num_bytes in zip(
        timeline.memory_rank, timeline.memory_time_ps, timeline.memory_bytes, strict=True
    ):
        if rank == 0:
            x = MARGIN + time_ps / 1e12 * pixels_per_s
            points.append((x, level))
            level = num_bytes / 2**20
            points.append((x, level))
    bottom = top + height
    path = " ".join(f"{x:.1f},{bottom - level / most * height:.1f}" for x, level in points)
    right = points[-1][0]
    peak = max(level for _, level in points)
    return [
        f'<polygon points="{MARGIN},{bottom:g} {path} {right:.1f},{bottom:g}" fill="{MEMORY}"/>',
        f'<text x="{MARGIN - 8}" y="{bottom - 4:g}" text-anchor="end">memory</text>',
        f'<text x="{right - 4:.1f}" y="{top + 12:g}" text-anchor="end">peak {peak:.0f} MiB</text>',
    ], bottom + 22


def ddp() -> str:
    """One step of data parallelism: sums after the backward, and within it."""
    graph = chain((0.25,) * 8, num_weights=2**20)
    link = Link(latency_s=0.02, bandwidth_bytes_per_s=1.6e7)
    panels = []
    for words, exchange in (
        ("after the backward", GradientExchange(bucket_bytes=8 * 2**20, overlap=False)),
        ("overlapped, buckets of 8 MiB", GradientExchange(bucket_bytes=8 * 2**20)),
        ("overlapped, one bucket", GradientExchange(bucket_bytes=2**30)),
        ("overlapped, a bucket per layer", GradientExchange(bucket_bytes=2**20)),
    ):
        result = simulate(
            [(8, (0, 1))],
            "1f1b",
            num_microbatches=2,
            batch=2,
            graph=graph,
            machines=cluster(2, link=link),
            exchange=exchange,
        )
        exposed = result.ranks[0].exposed_exchange_s
        panels.append(
            Panel(
                title=words,
                result=result,
                pixels_per_s=104,
                tracks=((0, "compute"), (0, "exchange")),
                note=f"step {result.step_time_s:.2f} s, exposed {exposed:.2f} s",
            )
        )
    return stack("Data parallelism: when gradients are summed", legend(FORWARD, BACKWARD, SUM), panels)


def bytescheduler() -> str:
    """Three steps of six layers: whole tensors in turn, and parts by priorities that go on into the next step."""
    graph = chain((0.25,) * 6, num_weights=2**20)
    machines = cluster(2, link=Link(latency_s=0.01, bandwidth_bytes_per_s=6.2e6))
    layers = [(1, (0, 1))] * 6
    first = GradientExchange(bucket_bytes=2**22)
    parts = GradientExchange(bucket_bytes=2**22, partition_bytes=2**21, across_steps=True)
    plan = lay_out(graph, layers, "interleaved", num_microbatches=2, batch=2, exchange=parts)
    ordered = schedule_exchange(plan, graph, machines).exchange
    panels = []
    for words, exchange, num_steps in (
        ("whole tensors, first in first out", first, 3),
        ("halves of tensors, the first layers' first, across steps", ordered, 2),
    ):
        result = simulate(
            layers,
            "interleaved",
            num_microbatches=2,
            batch=2,
            graph=graph,
            machines=machines,
            exchange=exchange,
            num_steps=num_steps,
        )
        panels.append(
            Panel(
                title=words,
                result=result,
                pixels_per_s=46,
                tracks=((0, "compute"), (0, "exchange")),
                note=f"step {result.step_time_s:.2f} s",
                number="stage",
            )
        )
    words = (COLOURS[Opcode.FORWARD], "forward of the layer with this number")
    return stack("ByteScheduler: what is needed first goes first", legend(words, BACKWARD, SUM), panels)


def servers() -> str:
    """Seconds to sum a gigabyte of eight machines at 10 GB/s, by the number of machines that only serve."""
    count, size = 8, 2**28
    graph = chain((1e-9,), num_weights=size)
    machines = cluster(1, 2 * count, nic=Link(latency_s=0.0, bandwidth_bytes_per_s=1e10))
    ring_s = 2 * (count - 1) / count * 4 * size / 1e10
    left, bottom, width, height = 80.0, 300.0, WIDTH - 330.0, 250.0

    def place(spare: int, seconds: float) -> tuple[float, float]:
        return left + spare * width / count, bottom - seconds / (5 * ring_s) * height

    body = ['<text x="80" y="26" font-weight="bold">Seconds to sum 1 GiB of 8 machines with 10 GB/s each</text>']
    for spare in range(count + 1):
        x, y = place(spare, 0)
        body.append(f'<text x="{x:.1f}" y="{y + 20:g}" text-anchor="middle">{spare}</text>')
    for lines in range(6):
        _, y = place(0, lines * ring_s)
        body.append(f'<line x1="{left}" y1="{y:g}" x2="{left + width}" y2="{y:g}" stroke="#d5dade"/>')
        body.append(f'<text x="{left - 8}" y="{y + 5:g}" text-anchor="end">{lines * ring_s:.2f}</text>')
    own = range(count)
    curves = (
        ("#b9598b", "the ring", [()] * (count + 1), 5),
        ("#3d7fb8", "further machines serve", [tuple(range(count, count + k)) for k in range(1, count + 1)], 0),
        ("#3f8f4f", "all machines serve", [(*own, *range(count, count + k)) for k in range(count + 1)], 18),
    )
    for colour, words, serving, lower in curves:
        points = []
        for chosen in serving:
            exchange = GradientExchange(servers=chosen, partition_bytes=2**20 if chosen else 0)
            plan = lay_out(graph, [(1, own)], "1f1b", num_microbatches=8, batch=8, exchange=exchange)
            step_s = simulate_plan(plan, graph, machines, contention="fair").step_time_s
            points.append(place(count + 1 - len(serving) + len(points), step_s))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points]
        x, y = points[-1]
        body.append(f'<text x="{x + 12:.1f}" y="{y + lower:.1f}" fill="{colour}">{words}</text>')
    x, y = place(count // 2, 0)
    body.append(f'<text x="{x:.1f}" y="{y + 44:g}" text-anchor="middle">machines that only serve</text>')
    return picture("Parameter servers and the ring", body, bottom + 60)


def horovod() -> str:
    """Scaling of data parallelism, simulated on the machines of Horovod's benchmark; its two published points."""
    ranks = [2**k for k in range(10)]
    left, bottom, width, height = 80.0, 310.0, WIDTH - 300.0, 260.0

    def place(index: int, share: float) -> tuple[float, float]:
        return left + index * width / (len(ranks) - 1), bottom - share * height

    body = ['<text x="80" y="26" font-weight="bold">Samples/s of k GPUs over k times those of one</text>']
    for index, count in enumerate(ranks):
        x, y = place(index, 0)
        body.append(f'<text x="{x:.1f}" y="{y + 20:g}" text-anchor="middle">{count}</text>')
    for fifth in range(6):
        _, y = place(0, fifth / 5)
        body.append(f'<line x1="{left}" y1="{y:g}" x2="{left + width}" y2="{y:g}" stroke="#d5dade"/>')
        body.append(f'<text x="{left - 8}" y="{y + 5:g}" text-anchor="end">{20 * fifth} %</text>')
    for name, published, colour, row in (("resnet101", 0.90, "#2f6fb0", 52), ("vgg16", 0.68, "#c0603a", 70)):
        shares = scaling(name, ranks)
        points = [place(index, share) for index, share in enumerate(shares)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        x, y = place(len(ranks) - 1, published)
        words = f"{name}, simulated: {100 * shares[-1]:.0f} %"
        body.append(f'<text x="{x + 14:.1f}" y="{row}" fill="{colour}">{words}</text>')
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
        words = f"{name}, published: {100 * published:.0f} %"
        body.append(f'<text x="{x + 14:.1f}" y="{max(y + 5, 88):.1f}" fill="{colour}">{words}</text>')
    body.append(f'<text x="{left + width / 2:g}" y="{bottom + 42:g}" text-anchor="middle">GPUs k, four per node</text>')
    return picture("Scaling of data parallelism over a ring", body, bottom + 56)


def scaling(model: str, ranks: list[int]) -> list[float]:
    """Samples/s of k GPUs as a share of k times those of one; 64 samples each, four GPUs per node."""
    graph = load_shipped_graph(model)
    machines = load_cluster(IMAGES.parent.parent / "examples" / "pascal.toml")
    (kind,), (node,) = machines.device_kinds, machines.nodes
    rates = []
    for count in ranks:
        nodes = tuple(replace(node, name=f"node{index}") for index in range(max(1, count // 4)))
        here = Cluster(name="pascal", device_kinds=(kind,), nodes=nodes)
        plan = Plan(
            model=model,
            graph_hash=graph.content_hash,
            cluster="pascal",
            workload=Workload(global_batch=64 * count, optimizer=Optimizer.named("sgd-momentum")),
            stages=(StagePlan(start=0, stop=len(graph.layers), ranks=tuple(range(count))),),
            num_microbatches=count,
        )
        rates.append(simulate_plan(plan, graph, here).samples_per_s / count)
    return [rate / rates[0] for rate in rates]


def alpa() -> str:
    """Uneven layers in four stages: the same number of layers in each, and sliced exactly."""
    seconds = (0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 1.0, 1.0, 1.6, 1.6, 2.4, 2.8)
    graph, machines = chain(seconds), cluster(4)
    equal = [(3, (rank,)) for rank in range(4)]
    best = search_plans(
        Problem(
            graph_for=lambda _: graph,
            cluster=machines,
            workload=Workload(global_batch=8, optimizer=Optimizer(kind="sgd")),
            choices=Choices(num_stages=(4,), microbatch_sizes=(1,), schedules=("1f1b",)),
        ),
        limits=Limits(max_plans=1),
    ).best.plan
    exact = [(stage.stop - stage.start, stage.ranks) for stage in best.stages]
    counts = ", ".join(str(count) for count, _ in exact)
    panels = [
        Panel(title=words, result=simulate(stages, "1f1b", graph=graph, machines=machines), pixels_per_s=3.75)
        for words, stages in (("3 layers in each stage", equal), (f"sliced exactly: {counts} layers", exact))
    ]
    return stack("Uneven layers, sliced equally and exactly", legend(NUMBERED, BACKWARD, NOTHING), panels)


def flexflow() -> str:
    """Two pipelines of two nodes: with a card for each sender, and with one card that both share."""
    graph = chain(width=2**20)
    pairs = [(4, (0, 1)), (4, (2, 3))]
    panels = []
    for words, bandwidth in (("a fast card", 1e18), ("one slow card, shared by ranks 0 and 1", 1.0e6)):
        machines = cluster(2, 2, nic=Link(latency_s=0.0, bandwidth_bytes_per_s=bandwidth))
        result = simulate(pairs, "1f1b", graph=graph, machines=machines)
        tracks = ((0, "compute"), (0, "send"), (1, "compute"), (1, "send"), (2, "compute"), (3, "compute"))
        panels.append(Panel(title=words, result=result, pixels_per_s=7.2, tracks=tracks))
    key = legend(NUMBERED, BACKWARD, (COLOURS[Opcode.SEND_ACTIVATION], "holds the card"), NOTHING)
    return stack("Transfers that wait for each other", key, panels)


PICTURES: dict[str, Callable[[], str]] = {
    "system-gpipe": gpipe,
    "system-pipedream": pipedream,
    "system-ddp": ddp,
    "system-horovod": horovod,
    "system-bytescheduler": bytescheduler,
    "system-servers": servers,
    "system-alpa": alpa,
    "system-flexflow": flexflow,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        print(f"written: {write_text(draw(), IMAGES / f'{name}.svg')}")
