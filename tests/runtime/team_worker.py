"""The processes of tests of plans that split ops: every case of a world size, compared with a serial loop."""

import copy
import sys
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from meshwright.capture import flatten_batch
from meshwright.program import fsdp_collectives, gradient_buckets, lower_plan, padded_bytes, parameter_groups
from meshwright.program.buckets import cut_parts
from meshwright.program.collective_expansion import Expansion
from meshwright.runtime import microbatch_seed, open_session
from meshwright.spec import (
    Backward,
    Forward,
    GradientExchange,
    Offload,
    Optimizer,
    Plan,
    StagePlan,
    Workload,
    read_recompute,
    slice_graph,
)
from meshwright.torch_names import ALL_GATHER, REDUCE_SCATTER
from meshwright.training.checkpoint import gather_state
from meshwright.training.trainer import Losses
from tests.runtime.cases import MICROBATCH_SIZE, NUM_STEPS, RUN_SEED, on
from tests.runtime.delayed import Stream, train_delayed
from tests.runtime.equality_worker import errors, make_optimizer, run_models
from tests.runtime.matrix import cases_of_run
from tests.runtime.team_cases import (
    AGAIN,
    AWAY,
    CLIP,
    FEW,
    HOST,
    MAX_NORM,
    NVME,
    PAIRS,
    PARTS,
    SAVED,
    SPLITS,
    ZERO,
    all_cases,
    main_cases,
)
from tests.runtime.team_models import MODELS

NUM_MICROBATCHES = 4
PLACES = {HOST: "host", NVME: "nvme"}


def make_plan(graph, layout):
    sharding = SPLITS[layout.split.split("+")[0]]
    zero = layout.split.partition(ZERO)[2]
    count, stages, rank = len(graph.layers), [], 0
    # Each of four replicas has several.
    num_microbatches = NUM_MICROBATCHES * (2 if PAIRS in layout.split else 1)
    for index, item in enumerate(layout.stages):
        start, stop = (count * place // len(layout.stages) for place in (index, index + 1))
        ranks = item.ranks if isinstance(item, on) else tuple(range(rank, rank + item))
        rank += 0 if isinstance(item, on) else item
        stages.append(StagePlan(start=start, stop=stop, ranks=ranks))
    again = read_recompute(graph, word_of(layout), [(stage.start, stage.stop) for stage in stages])
    plan = Plan(
        model="test",
        graph_hash=graph.content_hash,
        cluster="test",
        workload=Workload(
            global_batch=MICROBATCH_SIZE * num_microbatches * sharding.expert,
            optimizer=Optimizer(kind="sgd", momentum=True) if layout.optimizer == "sgd" else Optimizer(),
        ),
        stages=tuple(stages),
        num_microbatches=num_microbatches,
        schedule=layout.schedule,
        sharding=sharding,
        recompute=again.ranges,
        keeps=again.keeps,
        exchange=GradientExchange(
            bucket_bytes=2**14, zero=int(zero[0]) if zero else 0, shard_size=2 if PAIRS in layout.split else 0
        ),
        offload=Offload(
            optimizer=next((place for word, place in PLACES.items() if word in layout.split), "device"),
            parameters="host" if AWAY in layout.split else "device",
            activations="host" if SAVED in layout.split else "device",
        ),
    )
    return in_parts(plan, graph) if PARTS in layout.split else plan


def word_of(layout):
    """What a layout computes again."""
    _, is_again, rest = layout.split.partition(AGAIN)
    word = rest.split("+")[0].removeprefix("=") or "full"
    return word if is_again else "none"


def in_parts(plan, graph):
    """The plan whose gradients leave in parts of buckets, every other one first."""
    exchange = replace(plan.exchange, partition_bytes=3000)
    local, lowered = lower_plan(replace(plan, exchange=exchange), graph)
    count = len(cut_parts(gradient_buckets(lowered, local), exchange).bucket)
    order = (*range(1, count, 2), *range(0, count, 2))
    return replace(plan, exchange=replace(exchange, sequence=order))


def train(captured, loops, layout):
    """On rank 0 how far the trained model is from that of a serial loop."""
    case, graph = loops.case, captured.graph
    plan = make_plan(graph, layout)
    size = MICROBATCH_SIZE * plan.sharding.expert
    num_steps = 4 if plan.is_asynchronous else NUM_STEPS
    torch.manual_seed(99)
    batches = [case.make_batch(size * plan.num_microbatches) for _ in range(num_steps)]

    def optimizer(parameters):
        return make_optimizer(layout.optimizer, parameters, None)

    case.model.load_state_dict(loops.state)
    max_norm = MAX_NORM if CLIP in layout.split else None
    session = open_session(captured, plan, optimizer, run_seed=RUN_SEED, clip_norm=max_norm)
    losses, exchanged = Losses(session), []
    for step, (inputs, targets) in enumerate(batches):
        tensors = flatten_batch(captured, inputs, targets)
        with recorded(exchanged if step == 0 else []):
            made = session.run_step(step, tensors)
        losses.add(step, made)
    losses.add(num_steps - 1, session.finish())
    losses.finish()
    done = session.hosting.moved if session.hosting is not None else []
    hosted = {"done_by_host": of_streams(done), "asked_of_host": asked_of_host(session)}
    found = gather_state(case.model, session)
    everywhere = put_together(exchanged, session)
    session.close()
    case.model.load_state_dict(loops.state)
    if found is None:
        return None
    for parameter in case.model.parameters():
        parameter.grad = None
    model = copy.deepcopy(case.model)
    expected = expected_collectives(session) if len(plan.stages) == 1 else []
    stream = Stream(case, batches, plan, graph, size, lambda step, m: microbatch_seed(RUN_SEED, step, m))
    if plan.is_asynchronous:
        wanted, wanted_losses = train_delayed(model, plan, graph, stream, optimizer)
    else:
        wanted, wanted_losses = train_serially(model, stream, optimizer, max_norm)
    found = errors(found, wanted, loops.state, losses.known, wanted_losses)
    return found | {"exchanged": everywhere, "expected": expected} | hosted


def of_streams(moved):
    """By kind of instruction, all of one stream: pieces, or layers and microbatches, and bytes in order."""
    found = {}
    for item, num_bytes in moved:
        which = [item.piece] if hasattr(item, "piece") else [item.stage, item.layer, item.microbatch]
        found.setdefault(type(item).__name__, []).append([*which, num_bytes])
    return found


def asked_of_host(session):
    """The same as the program of this process says, whose plan counts four bytes for what has eight here."""
    program, rank = session.program, session.grid.rank
    rows = [
        program.body.instruction(index)
        for stream in program.streams_of(rank)
        if program.streams[stream].name in ("down", "host", "up", "drives")
        for index in program.body.stream_range(stream)
    ]
    return of_streams([(item, 2 * item.num_bytes) for item in rows])


KINDS = {
    "all_reduce": "all_reduce",
    ALL_GATHER: "all_gather",
    REDUCE_SCATTER: "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


@contextmanager
def recorded(into):
    """Note what collectives are called, with the bytes of the full tensor."""
    kept = {name: getattr(dist, name) for name in KINDS}

    def noting(name):
        def call(*given, **options):
            tensors = [item for item in (*given, *options.values()) if isinstance(item, torch.Tensor)]
            # Of an all-to-all what this process hands in: what comes out depends on routers.
            full = tensors[1] if name == "all_to_all_single" else max(tensors, key=torch.numel)
            # How many targets count is a number that the local graph does not list.
            if full.numel() > 1:
                group = dist.get_process_group_ranks(options.get("group"))
                into.append([KINDS[name], full.numel() * full.element_size(), group])
            return kept[name](*given, **options)

        return call

    for name in KINDS:
        setattr(dist, name, noting(name))
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def put_together(exchanged, session):
    """What this process calls, with what all processes of a group hand to their all-to-alls together."""
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, exchanged)
    kinds = [[kind for kind, *_ in each] for each in lists]
    found = []
    for place, (kind, num_bytes, group) in enumerate(exchanged):
        if kind == "all_to_all":
            assert {kinds[process][place] for process in group} == {kind}
            handed_in = [lists[process][place][1] for process in group]
            found.append([kind, sum(handed_in), group])
        else:
            found.append([kind, num_bytes, group])
    return found


def expected_collectives(session):
    """What the local graph lists for a step of one stage that runs each microbatch forward and at once backward."""
    graph, plan = session.graph, session.model.plan

    def listed(phase):
        items = [item for item in graph.collectives if item.phase == phase]
        groups = {axis: list(found.ranks) for axis, found in session.grid.axes.items()}
        return [[item.kind, item.num_bytes(graph, plan.microbatch_size, 8), groups[item.axis]] for item in items]

    inside = (listed("forward") + listed("backward")) * plan.num_microbatches + listed("step")
    if graph.recompute and inside:
        return expanded(session) * plan.num_microbatches + listed("step")
    return inside or expected_of_replicas(session)


def expanded(session):
    """What the simulator says of a forward and a backward in which parts run again."""
    graph, plan = session.graph, session.model.plan
    expansion = Expansion(plan, graph, slice_graph(graph, plan.bounds), 0)
    given = {"microbatch": 0, "stage": 0}
    found = [item for made in (Forward, Backward) for item in expansion.expand(made(**given))]
    return [[item.kind, item.num_bytes, list(session.grid.axes[item.axis].ranks)] for item in found]


def expected_of_replicas(session):
    """What replicas that share out states exchange in a step: inside of passes, or by buckets."""
    graph, plan = session.graph, session.model.plan
    ranks, exchange = plan.stages[0].ranks, plan.exchange
    group, across, everybody = (
        [session.grid.process_of(rank) for rank in each[0]]
        for each in (exchange.shard_groups(ranks), exchange.replicating_groups(ranks), (ranks,))
    )
    count, num_groups = len(group), len(across)
    if exchange.zero >= 2:
        groups = parameter_groups(graph)
        passes = fsdp_collectives(groups, reshard=exchange.zero == 3)
        ids = [groups[c.group].parameters if c.kind == "all_gather" else groups[c.group].trained for c in passes]
        found = [[c.kind, padded_bytes(graph, own, count, 8), group] for c, own in zip(passes, ids, strict=True)]
        last = []
        for kind, size, _ in found:
            last.append([kind, size, group])
            if kind == "reduce_scatter" and num_groups > 1:
                last.append(["all_reduce", size // count, across])
        return found * (plan.num_microbatches // len(ranks) - 1) + last
    buckets = gradient_buckets(graph, plan)
    sizes = [-(-bucket.num_elements // count) * count * 8 for bucket in buckets]
    if exchange.zero == 1:
        summed = [["all_reduce", size // count, across] for size in sizes] if num_groups > 1 else []
        scattered = [["reduce_scatter", size, group] for size in sizes]
        return scattered + summed + [["all_gather", size, group] for size in reversed(sizes)]
    parts = cut_parts(buckets, exchange)
    order = np.argsort(parts.place)
    return [["all_reduce", int(parts.stop[part] - parts.start[part]) * 8, everybody] for part in order]


def train_serially(model, stream, make_optimizer, max_norm):
    """State and losses of the batches; the model is trained itself."""
    optimizer, losses = make_optimizer(list(model.parameters())), []
    for step in range(len(stream.batches)):
        total = 0.0
        for m in range(stream.count):

            def backward(compute_loss):
                loss = compute_loss(model)
                (loss / stream.count).backward()
                return loss.item()

            total += stream.run(model, step * stream.count + m, backward) / stream.count
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            assert norm > 1.5 * max_norm, "clipping must show, or equality says nothing"
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {name: value.clone() for name, value in model.state_dict().items()}, losses


if __name__ == "__main__":
    world, which, *others = sys.argv[1:]
    run_models(MODELS, cases_of_run(which, main_cases, all_cases, FEW), world, *others, run=train)
    assert not dist.is_initialized()
