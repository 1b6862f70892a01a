"""One rank of `test_precision_memory`: what torch allocates in a step, and what was predicted, by precision."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from meshwright.capture import capture_model
from meshwright.simulator import simulate_plan
from meshwright.spec import Plan, StagePlan, Workload, load_cluster
from meshwright.training import prepare
from meshwright.zoo import load_model
from tests.processes import fork_ranks

COUNT, SIZE = 2, 2


def without_accumulators(changes):
    """Allocations (> 0) and frees (< 0) without scratch memory of bfloat16 products, which depends on the processor.

    With AVX-512 but without its bfloat16 instructions, oneDNN sums a product in float32: beside the output it takes
    twice that and 128 bytes, and frees them at once. Other processors take none, and the model counts none.
    """
    kept = []
    for at, change in enumerate(changes):
        is_one = 0 < at < len(changes) - 1 and change == 2 * changes[at - 1] + 128 == -changes[at + 1]
        is_its_end = at > 1 and -change == changes[at - 1] == 2 * changes[at - 2] + 128
        kept += [] if is_one or is_its_end else [change]
    return kept


def measure(name, precision):
    """Predicted and allocated bytes of the fullest moment of a third step."""
    source = load_model(name, batch_size=COUNT * SIZE)
    graph = capture_model(source.model, source.inputs, targets=source.targets, loss=source.loss, verify=False).graph
    plan = Plan(
        model=name,
        graph_hash=graph.content_hash,
        cluster="1xcpu",
        workload=Workload(global_batch=COUNT * SIZE, precision=precision),
        stages=(StagePlan(start=0, stop=len(graph.layers), ranks=(0,)),),
        num_microbatches=COUNT,
    )
    (predicted,) = simulate_plan(plan, graph, load_cluster("1xcpu")).peak_memory_bytes
    optimizer = torch.optim.AdamW(source.model.parameters(), lr=1e-3)
    batch = source.inputs, source.targets
    trainer = prepare(source.model, source.loss, optimizer, batch, plan=plan, verify=False)
    for _ in range(2):
        trainer.step(*batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        trainer.step(*batch)
    now = most = 0
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    for num_bytes in without_accumulators(
        [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    ):
        now += num_bytes
        most = max(most, now)
    states = [value for held in optimizer.state.values() for value in held.values()]
    inputs = [item for item in pytree.tree_leaves(batch) if isinstance(item, torch.Tensor)]
    held = {id(item): item.nbytes for item in (*trainer._session.own_state, *states, *inputs)}
    return predicted, sum(held.values()) + most


def main():
    world_size, out, name, *precisions = sys.argv[1:]
    torch.set_num_threads(1)

    def run() -> None:
        dist.init_process_group("gloo")
        Path(out).write_text(json.dumps({precision: measure(name, precision) for precision in precisions}))
        dist.destroy_process_group()

    fork_ranks(int(world_size), run)


if __name__ == "__main__":
    main()
