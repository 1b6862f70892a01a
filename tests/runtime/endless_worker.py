"""The ranks of the tests of schedules that never flush: every case of a world size, compared with `delayed`."""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from meshwright.capture import flatten_batch
from meshwright.runtime import Repair, microbatch_seed, open_session
from meshwright.runtime.versions import VersionedPart
from meshwright.spec import Opcode
from meshwright.training.checkpoint import gather_state
from tests.runtime.cases import MICROBATCH_SIZE, RUN_SEED
from tests.runtime.delayed import Stream, train_delayed
from tests.runtime.endless_cases import LATE, MODELS, NUM_STEPS, REPAIRS, all_cases, main_cases
from tests.runtime.equality_worker import errors, make_optimizer, make_plan, run_models
from tests.runtime.matrix import cases_of_run
from tests.runtime.models import MODELS as EVERY_MODEL


def plan_case(graph, layout):
    if layout.schedule == LATE:
        plan = make_plan(graph, layout._replace(schedule="hetpipe"))
        return replace(plan, exchange=replace(plan.exchange, staleness=1))
    return make_plan(graph, layout._replace(schedule=layout.schedule.split("+")[0]))


def train(captured, loops, layout):
    """On rank 0 how far the trained model is from that of the reference, and the runtime's copies of weights."""
    case, graph = loops.case, captured.graph
    plan = plan_case(graph, layout)
    batches = loops.batches(plan.num_microbatches, NUM_STEPS)

    def optimizer(parameters):
        return make_optimizer(layout.optimizer, parameters, None)

    kind, fade = REPAIRS.get(layout.schedule, (None, 0))
    repair = Repair(kind=kind, fade_updates=fade) if kind is not None else None
    case.model.load_state_dict(loops.state)
    session = open_session(captured, plan, optimizer, run_seed=RUN_SEED, repair=repair)
    losses = torch.zeros(NUM_STEPS, dtype=torch.float64)
    made = [session.run_step(step, flatten_batch(captured, *batch)) for step, batch in enumerate(batches)]
    for outputs in (*made, session.finish()):
        for step, value in outputs.get(graph.outputs[0], []):
            losses[step] += value.double() / plan.num_microbatches
    dist.all_reduce(losses)
    found = gather_state(case.model, session)
    sets = gather_sets(session)
    session.close()
    for parameter in case.model.parameters():
        parameter.grad = None
    if found is None:
        return None
    case.model.load_state_dict(loops.state)
    stream = Stream(case, batches, plan, graph, MICROBATCH_SIZE, lambda step, m: microbatch_seed(RUN_SEED, step, m))
    wanted, wanted_losses = train_delayed(case.model, plan, graph, stream, optimizer, kind, fade)
    kept = {"sets": sets, "versions": most_versions(session.program)}
    return errors(found, wanted, loops.state, losses.tolist(), wanted_losses) | kept


def gather_sets(session):
    """Sets of weights that each rank held in the end."""
    own = sum(part.num_sets if isinstance(part, VersionedPart) else 1 for part in session.parts)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def most_versions(program):
    """The most versions of its weights that each rank has at once, the newest among them."""
    found = []
    for rank in range(program.num_ranks):
        kept = most = 0
        for _, section in program.sections():
            for stream in program.streams_of(rank):
                for index in section.stream_range(stream):
                    opcode = section.opcode[index]
                    kept += int(opcode == Opcode.STASH) - int(opcode == Opcode.DROP)
                    most = max(most, kept)
        found.append(1 + most)
    return found


if __name__ == "__main__":
    size, which, *others = sys.argv[1:]
    chosen = {name: EVERY_MODEL[name] for name in MODELS}
    run_models(chosen, cases_of_run(which, main_cases, all_cases, ()), size, *others, run=train)
