"""The ranks of the tests of placements: every case, in training and in inference, compared with one process.

The references know nothing of placements: eager loops over the same microbatches, seeded per microbatch.
"""

import copy
import json
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from meshwright.capture import capture_model, flatten_batch
from meshwright.planner import Constraints, place
from meshwright.planner.placing.op_tasks import find_choices, find_tasks
from meshwright.planner.placing.placement_search import cut_stages, order_tasks
from meshwright.program import build_placed_program
from meshwright.runtime import microbatch_seed, open_session
from meshwright.spec import Opcode, Placement, Workload, decode_document, encode_document
from tests.processes import fork_prepared
from tests.runtime.cases import MICROBATCH_SIZE, RUN_SEED
from tests.runtime.equality_worker import call, errors, make_optimizer, serial_reference, train_session
from tests.runtime.placed_models import PLACED_MODELS
from tests.simulator.plans import FixedCost, small_cluster

NUM_MICROBATCHES = 6
GLOBAL_BATCH = MICROBATCH_SIZE * NUM_MICROBATCHES
# Computing is dear and sending cheap: whatever can run side by side does.
COST = FixedCost(cluster=small_cluster(devices=2), forward=1e-3, backward=2e-3, send=1e-6)


def placements(graph):
    """One that is searched for, two that throw every op on some device, and one that parts shared parameters."""
    workload = Workload(kind=graph.mode, global_batch=GLOBAL_BATCH)

    def made(**options):
        found = place(
            graph, COST.cluster, workload, cost=COST, num_microbatches=NUM_MICROBATCHES, max_simulated=20, **options
        )
        # As it comes out of a file.
        return decode_document(Placement, encode_document(found), "test")

    yield "searched", made()
    for seed in (1, 2):
        yield f"thrown-{seed}", made(constraints=thrown(graph, seed))
    yield "apart", apart(graph, workload)


def thrown(graph, seed):
    """Every op on a random device, those that have to share one on the same."""
    dice, tasks = random.Random(seed), find_tasks(graph)
    groups = find_choices(graph, tasks, (0, 1), Constraints()).groups
    return Constraints(fixed={graph.ops[tasks.ops[group][0]].name: dice.choice((0, 1)) for group in sorted({*groups})})


def apart(graph, workload):
    """Every task on a random device, also those that share a parameter."""
    dice, tasks = random.Random(3), find_tasks(graph)
    ranks = [dice.choice((0, 1)) for _ in tasks.ops]
    return Placement(
        model="test",
        graph_hash=graph.content_hash,
        cluster=COST.cluster.name,
        workload=workload,
        stages=cut_stages(tasks, ranks, order_tasks(tasks, [float(ops[0]) for ops in tasks.ops])),
        num_microbatches=NUM_MICROBATCHES,
    )


def facts(placement, graph):
    section = build_placed_program(placement, graph).body
    sends, sums = (int((section.opcode == opcode).sum()) for opcode in (Opcode.SEND_ACTIVATION, Opcode.ALL_REDUCE))
    return {"ranks": placement.num_ranks, "sends": sends, "sums": sums}


def train(case, captured, state, batches, placement, optimizer_name):
    """Train under a placement; on rank 0 the errors against a serial loop."""
    case.model.load_state_dict(state)
    session = open_session(
        captured, placement, lambda parameters: make_optimizer(optimizer_name, parameters, None), run_seed=RUN_SEED
    )
    found, losses = train_session(case, captured, session, batches)
    if found is None:
        return None
    wanted, wanted_losses = serial_reference(case, state, batches, {}, optimizer_name, NUM_MICROBATCHES)
    return facts(placement, captured.graph) | errors(found, wanted, state, losses, wanted_losses)


def infer(case, captured, batches, placement):
    """Outputs under a placement; on rank 0 whether each is, bit for bit, that of the model itself."""
    session = open_session(captured, placement, lambda _: None, run_seed=RUN_SEED)
    found = []
    for step, (inputs, _) in enumerate(batches):
        made = session.run_step(step, flatten_batch(captured, inputs))
        gathered = [None] * dist.get_world_size()
        values = {tensor: [item.value for item in items] for tensor, items in made.items()}
        dist.all_gather_object(gathered, values)
        found.append({tensor: values for part in gathered for tensor, values in part.items()})
    session.close()
    same, count = True, 0
    with torch.no_grad():
        for step, (inputs, _) in enumerate(batches):
            for m in range(NUM_MICROBATCHES):
                rows = slice(m * MICROBATCH_SIZE, (m + 1) * MICROBATCH_SIZE)
                torch.manual_seed(microbatch_seed(RUN_SEED, step, m))
                wanted = pytree.tree_leaves(call(case.model, inputs, rows))
                for tensor, value in zip(captured.graph.outputs, wanted, strict=True):
                    same &= torch.equal(found[step][tensor][m], value)
                    count += 1
    return {**facts(placement, captured.graph), "same": same, "outputs": count}


def prepare_case(make):
    """The case, captured for training and for inference, with its placements."""
    torch.manual_seed(5)
    case = make()
    torch.manual_seed(7)
    inputs, targets = case.make_batch(MICROBATCH_SIZE + 1)
    case.model.train()
    training = capture_model(case.model, inputs, targets=targets, loss=case.loss, verify=False)
    state = copy.deepcopy(case.model.state_dict())
    asleep = copy.deepcopy(case)
    asleep.model.eval()
    inference = capture_model(asleep.model, inputs, mode="inference", verify=False)
    torch.manual_seed(99)
    batches = [case.make_batch(GLOBAL_BATCH) for _ in range(2)]
    return {
        "training": (case, training, state, batches, list(placements(training.graph))),
        "inference": (asleep, inference, state, batches, list(placements(inference.graph))),
    }


def run_all(cases, out):
    dist.init_process_group("gloo")
    results = {}
    for name, modes in cases.items():
        case, captured, state, batches, found = modes["training"]
        for index, (how, placement) in enumerate(found):
            optimizer = ("adamw", "sgd")[index % 2]
            results[f"{name}/{how}/training"] = train(case, captured, state, batches, placement, optimizer)
        case, captured, _, batches, found = modes["inference"]
        for how, placement in found:
            results[f"{name}/{how}/inference"] = infer(case, captured, batches, placement)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    fork_prepared(
        int(sys.argv[1]),
        lambda: {name: prepare_case(make) for name, make in PLACED_MODELS.items()},
        lambda prepared: run_all(prepared, Path(sys.argv[2])),
    )
