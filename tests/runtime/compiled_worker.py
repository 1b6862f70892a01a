"""Two ranks that train with their layers compiled, and with the same layers as they are, on the same batches.

In float32, in which compiled kernels add up in another order.
"""

import copy
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from meshwright.capture import capture_model, flatten_batch
from meshwright.runtime import arrange_rank, issue_order, open_session
from meshwright.spec import GradientExchange, Opcode, Plan, Sharding, StagePlan, Workload, read_recompute
from meshwright.spec.instructions import COLLECTIVES
from meshwright.training.trainer import Losses
from meshwright.zoo import load_model
from tests.rank_results import write_results

MICROBATCHES, SIZE, NUM_STEPS = 4, 2, 4
CONFIGS = Path(__file__).resolve().parents[1] / "zoo" / "configs"


MODELS = {
    "gpt": lambda: load_model("gpt-tiny"),
    "resnet": lambda: load_model("resnet-tiny"),
    "vgg": lambda: load_model("vgg-tiny"),
    "llama": lambda: load_model(str(CONFIGS / "llama.json"), batch_size=SIZE, sequence_length=8),
    "dropout": lambda: load_model(str(CONFIGS / "gpt2.json"), batch_size=SIZE, sequence_length=8),
}
# Of a plan: stages, and what else it says.
LAYOUTS = {
    "stages": (2, {}),
    "zero 3": (1, {"exchange": GradientExchange(zero=3)}),
    "buckets": (1, {"exchange": GradientExchange(bucket_bytes=2**18)}),
    "zero 1": (1, {"exchange": GradientExchange(zero=1)}),
    "again": (1, {"recompute": "full"}),
    "some again": (1, {"recompute": "op"}),
    "endless": (2, {"schedule": "pipedream"}),
    "tensor": (1, {"sharding": Sharding(tensor=2)}),
}
CASES = [
    *((model, layout) for model in ("gpt", "resnet", "llama") for layout in ("stages", "zero 3")),
    *(("gpt", layout) for layout in ("buckets", "zero 1", "again", "tensor")),
    ("llama", "endless"),
    ("resnet", "again"),
    *((model, "some again") for model in ("gpt", "resnet", "llama", "dropout")),
    ("dropout", "again"),
    ("dropout", "stages"),
    *(("vgg", layout) for layout in ("stages", "zero 3")),
]


def plan_of(graph, layout, *, compiled):
    count, settings = LAYOUTS[layout]
    settings = dict(settings)
    whole = "sharding" in settings
    if "recompute" in settings:
        again = read_recompute(graph, settings["recompute"])
        settings |= {"recompute": again.ranges, "keeps": again.keeps}
    bounds = [len(graph.layers) * place // count for place in range(count + 1)]
    ranks = [(0,)] if whole else [(0, 1)] if count == 1 else [(0,), (1,)]
    return Plan(
        model="own",
        graph_hash=graph.content_hash,
        cluster="",
        workload=Workload(global_batch=MICROBATCHES * SIZE),
        stages=tuple(
            StagePlan(start=bounds[place], stop=bounds[place + 1], ranks=ranks[place]) for place in range(count)
        ),
        num_microbatches=MICROBATCHES,
        compiled=compiled,
        **settings,
    )


def train(case, layout, *, compiled):
    """Losses, what became of the layers, the sums of gradients in the order of their issue, and how early they went."""
    torch.manual_seed(3)
    source = MODELS[case]()
    model = copy.deepcopy(source.model)
    captured = capture_model(model, source.inputs, targets=source.targets, loss=source.loss, verify=False)
    if captured.graph.batch_size is not None:
        assert captured.graph.batch_size == SIZE
    plan = plan_of(captured.graph, layout, compiled=compiled)
    session = open_session(captured, plan, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    losses, heard = Losses(session), session.model.compilation
    generator = torch.Generator().manual_seed(5)
    for step in range(NUM_STEPS):
        if step == NUM_STEPS - 1:
            session.recorder.start(session.steps.next_repetition)
        tensors = flatten_batch(captured, source.inputs, source.targets)
        rows = torch.randint(len(tensors[0]), (MICROBATCHES * SIZE,), generator=generator)
        losses.add(step, session.run_step(step, [item[rows] for item in tensors]))
    made = session.finish()
    if session.steps.num_filling:
        losses.add(NUM_STEPS - 1, made)
        losses.finish()
    rows = session.recorder.rows()
    rows = rows[np.argsort(rows[:, 2], kind="stable")]
    program = session.program
    sums = np.flatnonzero(np.isin(program.body.opcode, COLLECTIVES))
    wanted = [int(i) for i in issue_order(arrange_rank(program, program.body, session.grid.rank)) if i in sums]
    found = {
        "losses": list(losses.known),
        "units": [heard.num_units, heard.num_codes, heard.done],
        "left out": dict(heard.left_out),
        "sums": [int(i) for i in rows[:, 0] if i in sums],
        "wanted": wanted,
        "leads": leads(program, rows),
    }
    session.close()
    return found


def leads(program, rows):
    """Of each bucket's sum, the share of the last backward that was still to come when it was issued."""
    opcode = program.body.opcode[rows[:, 0]]
    backward = np.flatnonzero(opcode == Opcode.BACKWARD)
    sums = np.flatnonzero(np.isin(opcode, COLLECTIVES))
    if not len(sums) or not len(backward):
        return []
    start, end = rows[backward[-1], 2:4]
    return [float(max(end - rows[row, 2], 0) / (end - start)) for row in sums]


def find(_folder):
    torch.set_default_dtype(torch.float32)
    found = {}
    for case, layout in CASES:
        found[f"{case}, {layout}"] = [train(case, layout, compiled=compiled) for compiled in (False, True)]
        if dist.get_rank() == 0:
            print(case, layout, found[f"{case}, {layout}"], flush=True)
    return found


if __name__ == "__main__":
    write_results(find)
