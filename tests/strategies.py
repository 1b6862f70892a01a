"""Hypothesis strategies for everything in `meshwright.spec`: small, legal, and as different as the types allow."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from meshwright.spec import (
    DTYPE_BYTES,
    MAX_SECONDS,
    MIN_SECONDS,
    AllReduce,
    BatchMeasurement,
    Cluster,
    DeviceGroup,
    DeviceKind,
    Extent,
    Forward,
    GradientExchange,
    Graph,
    Layer,
    Link,
    Measurements,
    Node,
    Nvme,
    Op,
    Opcode,
    OpMeasurement,
    Optimizer,
    OptimizerMeasurement,
    OptimizerStep,
    PlacedStage,
    Placement,
    Plan,
    Program,
    Section,
    Send,
    StagePlan,
    Stream,
    Tensor,
    Timeline,
    TransferMeasurement,
    Workload,
)
from meshwright.spec.control import Decision, Issue, Rang, Started, Timer
from meshwright.spec.decision_log import make_log
from meshwright.spec.instructions import STREAM_NAMES

# No surrogates: they are not characters and no file can hold them.
names = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
positive = st.floats(min_value=1e-12, max_value=1e18)
not_negative = st.just(0.0) | positive
times = st.floats(MIN_SECONDS, MAX_SECONDS)
counts = st.integers(1, 4)
sizes = st.integers(1, 2**40)


def few(items, *, min_size=0, max_size=3):
    """Tuples of a few items."""
    return st.lists(items, min_size=min_size, max_size=max_size).map(tuple)


extents = st.builds(Extent, st.integers(0, 9), st.integers(0, 3))
links = st.builds(Link, latency_s=not_negative, bandwidth_bytes_per_s=positive)


@st.composite
def clusters(draw):
    kind_names = draw(st.lists(names, min_size=1, max_size=2, unique=True))
    kinds = [
        DeviceKind(
            name=name,
            memory_bytes=draw(sizes),
            memory_bandwidth_bytes_per_s=draw(positive),
            peak_flops_per_s=draw(
                st.dictionaries(st.sampled_from(sorted(DTYPE_BYTES)), positive, min_size=1, max_size=2)
            ),
            source=draw(names),
        )
        for name in kind_names
    ]
    groups = st.builds(DeviceGroup, kind=st.sampled_from(kind_names), count=counts)
    nodes = st.builds(
        Node,
        name=names,
        devices=few(groups, min_size=1, max_size=2),
        host_memory_bytes=sizes,
        num_cores=counts,
        device_link=links,
        pcie=links,
        nic=links,
        num_nics=counts,
        host_memory_bandwidth_bytes_per_s=not_negative,
        host_call_s=st.floats(0, 1),
        nvme=st.none() | st.builds(Nvme, capacity_bytes=sizes, read_bytes_per_s=positive, write_bytes_per_s=positive),
        source=names,
    )
    return Cluster(name=draw(names), device_kinds=tuple(kinds), nodes=draw(few(nodes, min_size=1)))


workloads = st.builds(
    Workload,
    kind=st.sampled_from(("training", "inference")),
    global_batch=st.integers(1, 2**40),
    precision=st.sampled_from(("float64", "float32", "bfloat16")),
    optimizer=st.builds(Optimizer, kind=st.sampled_from(("sgd", "adamw")), momentum=st.booleans()),
)


@st.composite
def graphs(draw, max_ops=8):
    """Graphs with skips, replicable and random ops, tied parameters, views, several inputs and outputs."""
    tensors: list[Tensor] = []

    def add(
        role: str, *, requires_grad: bool = False, storage: int | None = None, aliases: tuple[str, ...] = ()
    ) -> int:
        shape = draw(
            few(extents if role not in ("parameter", "buffer") else st.builds(Extent, st.integers(0, 9)), max_size=2)
        )
        tensors.append(
            Tensor(
                name=f"{role}{len(tensors)}",
                shape=shape,
                dtype=draw(st.sampled_from(("float32", "bfloat16", "int64", "bool"))),
                role=role,
                storage=len(tensors) if storage is None else storage,
                requires_grad=requires_grad,
                aliases=aliases,
            )
        )
        return len(tensors) - 1

    inputs = [add("input") for _ in range(draw(st.integers(1, 2)))]
    state = [
        add("parameter", requires_grad=draw(st.booleans()), aliases=draw(few(names, max_size=1)))
        for _ in range(draw(counts))
    ]
    state += [add(draw(st.sampled_from(("buffer", "constant")))) for _ in range(draw(st.integers(0, 2)))]
    # What depends on constants alone may be replicable.
    fixed = [i for i in state if tensors[i].role == "constant"]
    values, ops = list(inputs), []
    for index in range(draw(st.integers(1, max_ops))):
        if draw(st.integers(0, 3)) == 0:
            operands, random, replicable = (
                draw(few(st.sampled_from(fixed), max_size=2)) if fixed else (),
                False,
                draw(st.booleans()),
            )
        else:
            known = st.sampled_from([*values, *values, *state])
            operands, random, replicable = draw(few(known, min_size=1)), draw(st.integers(0, 3)) == 0, False
        requires_grad = any(tensors[i].requires_grad for i in operands)
        view = draw(st.sampled_from(operands)) if operands and draw(st.integers(0, 4)) == 0 else None
        storage = None if view is None else tensors[view].storage
        outputs = [add("activation", requires_grad=requires_grad, storage=storage)]
        outputs += [add("activation") for _ in range(draw(st.integers(0, 1)))]
        saved = [*draw(few(st.sampled_from([*operands, *outputs]), max_size=2)), *([add("saved")] if random else [])]
        (fixed if replicable else values).extend(outputs)
        ops.append(
            Op(
                name=f"op{index}",
                kind=draw(names),
                inputs=operands,
                outputs=tuple(outputs),
                attributes=draw(few(st.tuples(names, names), max_size=1)),
                flops=draw(extents),
                backward_flops=draw(extents),
                saved=tuple(saved),
                random=random,
                replicable=replicable,
                module=draw(names),
            )
        )
    cuts = sorted(draw(st.sets(st.integers(1, len(ops) - 1)))) if len(ops) > 1 else []
    edges = [0, *cuts, len(ops)]
    return Graph(
        name=draw(names),
        tensors=tuple(tensors),
        ops=tuple(ops),
        layers=tuple(
            Layer(name=f"layer{i}", start=start, stop=stop, block=draw(names))
            for i, (start, stop) in enumerate(pairwise(edges))
        ),
        inputs=tuple(inputs),
        outputs=draw(few(st.sampled_from([*values, *fixed]), min_size=1)),
        mode=draw(st.sampled_from(("training", "inference"))),
        has_loss=draw(st.booleans()),
        batch_size=draw(st.none() | counts),
    )


@st.composite
def bounds_of(draw, graph):
    """Stages that cover the layers of a graph."""
    cuts = draw(st.sets(st.integers(1, len(graph.layers) - 1))) if len(graph.layers) > 1 else set()
    edges = [0, *sorted(cuts), len(graph.layers)]
    return list(pairwise(edges))


@st.composite
def plans(draw):
    replicas = draw(st.lists(counts, min_size=1, max_size=3))
    num_ranks = sum(replicas)
    ranks = draw(st.permutations(range(num_ranks)))
    stages, layer, used = [], 0, 0
    num_microbatches = max(replicas) * draw(counts)
    for count in replicas:
        stop = layer + draw(counts)
        shares = (num_microbatches - count + 1, *[1] * (count - 1)) if draw(st.booleans()) else ()
        stages.append(StagePlan(start=layer, stop=stop, ranks=tuple(ranks[used : used + count]), shares=shares))
        layer, used = stop, used + count
    workload = draw(workloads)
    schedules = (("gpipe", ""), ("1f1b", ""), ("folder/mine.py:waves", "0123456789abcdef"))
    schedule, schedule_hash = draw(st.sampled_from(schedules))
    return Plan(
        model=draw(names),
        model_sizes=draw(few(st.tuples(names, sizes), max_size=2)),
        graph_hash=draw(names),
        cluster=draw(names),
        workload=Workload(
            kind=workload.kind,
            global_batch=num_microbatches * draw(counts),
            precision=workload.precision,
            optimizer=workload.optimizer,
        ),
        stages=tuple(stages),
        num_microbatches=num_microbatches,
        schedule=schedule,
        schedule_hash=schedule_hash,
        exchange=draw(st.builds(GradientExchange, bucket_bytes=sizes, overlap=st.booleans())),
    )


@st.composite
def placements(draw):
    ops = draw(
        st.lists(few(st.integers(0, 30), min_size=1).map(lambda ids: tuple(sorted({*ids}))), min_size=1, max_size=3)
    )
    num_microbatches = draw(counts)
    workload = draw(workloads)
    return Placement(
        model=draw(names),
        model_sizes=draw(few(st.tuples(names, sizes), max_size=2)),
        graph_hash=draw(names),
        cluster=draw(names),
        workload=Workload(
            kind=workload.kind,
            global_batch=num_microbatches * draw(counts),
            precision=workload.precision,
            optimizer=workload.optimizer,
        ),
        stages=tuple(PlacedStage(rank=draw(st.integers(0, 3)), ops=ids) for ids in ops),
        num_microbatches=num_microbatches,
    )


def columns(draw, dtype, count, low, high):
    """One column of integers from ``low`` to ``high``."""
    return np.array(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)), dtype)


def offsets(draw, rows, total):
    """CSR offsets that part ``total`` entries among ``rows``."""
    inner = sorted(draw(st.lists(st.integers(0, total), min_size=max(rows - 1, 0), max_size=max(rows - 1, 0))))
    return np.array([0, *inner, total] if rows else [0], np.int64)


@st.composite
def sections(draw, num_streams, num_groups):
    """Columns that are in range; whether the program makes sense is another matter."""
    count = draw(st.integers(0, 5)) if num_streams else 0
    num_marks = draw(st.integers(0, 2)) if count else 0
    num_waits = draw(st.integers(0, 4)) if count else 0
    wait_offsets = offsets(draw, count, num_waits)
    opcode = columns(draw, np.int8, count, 0, len(Opcode) - 1)
    receives = np.isin(opcode, (Opcode.RECEIVE_ACTIVATION, Opcode.RECEIVE_GRADIENT))
    joins = [i for i in np.flatnonzero((np.diff(wait_offsets) > 0) & ~receives).tolist() if draw(st.booleans())]
    return Section(
        stream_offsets=offsets(draw, num_streams, count),
        opcode=opcode,
        stage=columns(draw, np.int32, count, 0, 3),
        microbatch=columns(draw, np.int32, count, 0, 3),
        version=columns(draw, np.int32, count, 0, 3),
        peer=columns(draw, np.int32, count, -1, 3),
        group=columns(draw, np.int32, count, -1, num_groups - 1),
        num_bytes=columns(draw, np.int64, count, 0, 2**40),
        wait_offsets=wait_offsets,
        waits=columns(draw, np.int64, num_waits, 0, max(count + num_marks - 1, 0)),
        mark_instruction=columns(draw, np.int64, num_marks, 0, max(count - 1, 0)),
        mark_index=columns(draw, np.int32, num_marks, 0, 3),
        join_instruction=np.array(joins, np.int64),
        join_need=np.array([draw(st.integers(1, int(wait_offsets[i + 1] - wait_offsets[i]))) for i in joins], np.int32),
    )


@st.composite
def programs(draw):
    num_ranks = draw(counts)
    ranks = st.integers(0, num_ranks - 1)
    streams = draw(few(st.builds(Stream, rank=ranks, name=st.sampled_from(STREAM_NAMES)), max_size=4))
    groups = draw(few(few(ranks, min_size=1), max_size=2))
    parts = [draw(sections(len(streams), len(groups))) for _ in range(3)]
    return Program(
        schedule=draw(names),
        plan_hash=draw(names),
        num_ranks=num_ranks,
        streams=streams,
        groups=groups,
        prologue=parts[0],
        body=parts[1],
        epilogue=parts[2],
    )


@st.composite
def timelines(draw):
    num_ranks = draw(counts)
    tracks = draw(
        few(st.builds(Stream, rank=st.integers(0, num_ranks - 1), name=st.sampled_from(STREAM_NAMES)), min_size=1)
    )
    count, samples = draw(st.integers(0, 5)), draw(st.integers(0, 3))
    start = columns(draw, np.int64, count, 0, 2**50)
    return Timeline(
        origin=draw(st.sampled_from(("predicted", "measured"))),
        num_ranks=num_ranks,
        tracks=tracks,
        track=columns(draw, np.int32, count, 0, len(tracks) - 1),
        opcode=columns(draw, np.int8, count, 0, len(Opcode) - 1),
        stage=columns(draw, np.int32, count, 0, 3),
        microbatch=columns(draw, np.int32, count, 0, 3),
        peer=columns(draw, np.int32, count, -1, 3),
        step=columns(draw, np.int32, count, 0, 3),
        num_bytes=columns(draw, np.int64, count, 0, 2**40),
        start_ps=start,
        end_ps=start + columns(draw, np.int64, count, 0, 2**50),
        memory_rank=columns(draw, np.int32, samples, 0, num_ranks - 1),
        memory_time_ps=columns(draw, np.int64, samples, 0, 2**50),
        memory_bytes=columns(draw, np.int64, samples, 0, 2**40),
        peak_memory_bytes=draw(st.just(()) | st.tuples(*[sizes] * num_ranks)),
    )


measurements = st.builds(
    Measurements,
    device=names,
    software=names,
    date=names,
    conditions=names,
    ops=few(
        st.builds(
            OpMeasurement,
            key=names,
            forward_s=st.just(0.0) | times,
            backward_s=st.just(0.0) | times,
            num_samples=counts,
            spread=not_negative,
            accumulate_s=st.just(0.0) | times,
        )
    ),
    optimizers=few(
        st.builds(
            OptimizerMeasurement,
            kind=names,
            dtype=names,
            num_elements=sizes,
            num_tensors=counts,
            seconds=times,
        )
    ),
    transfers=few(
        st.builds(
            TransferMeasurement,
            kind=st.sampled_from(("send", "all_reduce")),
            num_ranks=st.integers(2, 8),
            num_bytes=sizes,
            seconds=times,
            spread=not_negative,
            host_s=st.just(0.0) | times,
        )
    ),
    overhead_s=st.just(0.0) | times,
    batches=few(
        st.builds(
            lambda seconds, **facts: BatchMeasurement(seconds=seconds[0], p90_s=seconds[1], p99_s=seconds[2], **facts),
            seconds=st.lists(times, min_size=3, max_size=3).map(sorted),
            model=names.filter(len),
            batch_size=counts,
            num_samples=counts,
        )
    ),
)

# Every type of document, by name.
numbers = st.integers(0, 5)
instructions = (
    st.builds(Forward, stage=numbers, microbatch=numbers, version=numbers)
    | st.builds(Send, stage=numbers, microbatch=numbers, peer=numbers, payload=st.just("gradient"), num_bytes=sizes)
    | st.builds(AllReduce, stage=numbers, bucket=numbers, num_bytes=sizes)
    | st.builds(OptimizerStep, stage=numbers, version=numbers)
)


@st.composite
def decision_logs(draw):
    num_ranks, num_instructions = draw(counts), draw(numbers)
    decided, handle, now_ps = [], num_instructions, 0
    for k in range(draw(numbers)):
        event = Rang(next_handle=handle, number=draw(numbers)) if k else Started(next_handle=handle)
        issues = []
        for _ in range(draw(st.integers(0, 3))):
            waits = draw(few(st.integers(-3, handle - 1))) if handle else ()
            issues.append(
                Issue(
                    rank=draw(st.integers(0, num_ranks - 1)),
                    stream=draw(st.sampled_from(STREAM_NAMES)),
                    instruction=draw(instructions),
                    group=draw(few(st.integers(0, num_ranks - 1))),
                    waits=waits,
                    need=draw(st.none() | st.integers(1, len(waits))) if waits else None,
                    watched=draw(st.booleans()),
                )
            )
        timers = draw(few(st.builds(Timer, at_ps=st.integers(now_ps, 2**50), number=numbers)))
        in_body = st.integers(0, num_instructions - 1)
        watch = () if k or not num_instructions else tuple(sorted(draw(st.sets(in_body))))
        decided.append((event, now_ps, Decision(issues=tuple(issues), timers=timers, watch=watch)))
        handle, now_ps = handle + len(issues), now_ps + draw(numbers)
    return make_log(num_ranks, num_instructions, decided), [decision for _, _, decision in decided]


DOCUMENTS = {
    "cluster": clusters(),
    "decisionlog": decision_logs().map(lambda drawn: drawn[0]),
    "graph": graphs(),
    "measurements": measurements,
    "placement": placements(),
    "plan": plans(),
    "program": programs(),
    "timeline": timelines(),
    "workload": workloads,
}
