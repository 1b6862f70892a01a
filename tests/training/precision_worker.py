"""Ranks of `test_precisions`: training in one precision under several layouts, beside plain PyTorch in one process.

The plain loop knows nothing of the runtime: it casts the weights, makes the gradient of every microbatch by itself,
adds these up in the order of the layout, and steps torch's AdamW on the weights or on float32 copies of them.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager, nullcontext
from functools import reduce
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright.capture import capture_model
from meshwright.runtime.fully_sharded import own_part
from meshwright.spec import GradientExchange, Offload, Plan, Sharding, StagePlan, Workload
from meshwright.training import prepare
from tests.processes import fork_ranks
from tests.runtime.models import GPT

COUNT, SIZE, NUM_STEPS, VOCABULARY, LENGTH = 4, 2, 3, 24, 10
RATE = 0.01
# Stages as layers of the whole that they begin and end with, and their ranks.
LAYOUTS = {
    "1f1b": ([(0, 0.5, (0,)), (0.5, 1, (1,))], {}),
    "gpipe": ([(0, 0.5, (0,)), (0.5, 1, (1,))], {"schedule": "gpipe"}),
    "zb-h1": ([(0, 0.5, (0,)), (0.5, 1, (1,))], {"schedule": "zb-h1"}),
    "ddp": ([(0, 1, (0, 1))], {}),
    "zero 1": ([(0, 1, (0, 1))], {"exchange": GradientExchange(zero=1)}),
    "zero 2": ([(0, 1, (0, 1))], {"exchange": GradientExchange(zero=2)}),
    "zero 3": ([(0, 1, (0, 1))], {"exchange": GradientExchange(zero=3)}),
    "tensor": ([(0, 1, (0,))], {"sharding": Sharding(tensor=2)}),
    "host": ([(0, 1, (0, 1))], {"offload": Offload(optimizer="host")}),
    "zero 2 host": ([(0, 1, (0, 1))], {"exchange": GradientExchange(zero=2), "offload": Offload(optimizer="host")}),
    "zero 3 away": (
        [(0, 1, (0, 1))],
        {"exchange": GradientExchange(zero=3), "offload": Offload(optimizer="nvme", parameters="host")},
    ),
}
# Parameters and activations, gradients, master weights; under autocast products compute in another type.
TYPES = {
    "float32": (torch.float32, torch.float32, None, None),
    "amp": (torch.float32, torch.float32, None, torch.bfloat16),
    "amp-float16": (torch.float32, torch.float32, None, torch.float16),
    "mixed": (torch.bfloat16, torch.float32, torch.float32, None),
    "mixed-bf16-gradients": (torch.bfloat16, torch.bfloat16, torch.float32, None),
    "bfloat16": (torch.bfloat16, torch.bfloat16, None, None),
}


def loss_of(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Turned(GPT):
    """Its outputs are scaled by a table in their type; the angles, which the model computed, are exact in float32."""

    def __init__(self):
        super().__init__(depth=2, vocabulary=VOCABULARY, length=LENGTH, tied=False)
        self.register_buffer("angles", 1000 + torch.arange(LENGTH)[:, None] / 3, persistent=False)

    def forward(self, ids):
        outputs = super().forward(ids)
        return outputs * self.angles.cos().to(outputs.dtype)


def make_model():
    torch.manual_seed(3)
    return Turned()


def make_batches():
    torch.manual_seed(4)
    return [torch.randint(0, VOCABULARY, (COUNT * SIZE, LENGTH + 1)) for _ in range(NUM_STEPS)]


def make_plan(precision, layout):
    inputs = make_batches()[0]
    graph = capture_model(make_model(), (inputs[:, :-1],), targets=(inputs[:, 1:],), loss=loss_of, verify=False).graph
    count = len(graph.layers)
    bounds, options = LAYOUTS[layout]
    stages = [StagePlan(start=round(a * count), stop=round(b * count), ranks=ranks) for a, b, ranks in bounds]
    return Plan(
        model="test",
        graph_hash=graph.content_hash,
        cluster="2xcpu",
        workload=Workload(global_batch=COUNT * SIZE, precision=precision),
        stages=tuple(stages),
        num_microbatches=COUNT,
        **options,
    )


def orders_of(plan, layout):
    """Which microbatches are added up one after the other, and that then: (groups of those that meet first)."""
    turns = [[m for m in range(COUNT) if plan.stages[0].rank_of(m) == rank] for rank in plan.stages[0].ranks]
    # FSDP2 sums over replicas behind every backward.
    return [list(item) for item in zip(*turns, strict=True)] if layout.startswith(("zero 2", "zero 3")) else turns


class Halves(torch.nn.Linear):
    """A product as two of half the size, of inputs or of outputs: another order of the same sums."""

    by_input = False

    def forward(self, x):
        if self.by_input:
            parts = zip(x.chunk(2, -1), self.weight.chunk(2, -1), strict=True)
            return reduce(torch.add, (F.linear(part, weight) for part, weight in parts)) + self.bias
        return torch.cat([F.linear(x, weight) for weight in self.weight.chunk(2)], -1) + (
            self.bias if self.bias is not None else 0.0
        )


def in_halves(model):
    """The model with products in halves, as two processes of a team would have them."""
    for name, item in model.named_modules():
        if isinstance(item, torch.nn.Linear):
            item.__class__ = Halves
            item.by_input = name.endswith(("proj", "down"))
    return model


def train_plainly(precision, groups, broken_step=None, *, halves=False, kept=None):
    """Losses, weights and steps left out; ``broken_step`` has a gradient that is not finite.

    ``kept``: the type in which sums of groups are added up.
    """
    values, gradients, master, autocast = TYPES[precision]
    model = make_model()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(values)
    model = in_halves(model) if halves else model
    parameters = list(model.parameters())
    updated = [torch.nn.Parameter(p.detach().to(master)) for p in parameters] if master else parameters
    optimizer = torch.optim.AdamW(updated, lr=RATE)
    losses, skipped, scale = [], 0, 2.0**16 if precision == "amp-float16" else 1.0
    for step, batch in enumerate(make_batches()):
        made = []
        total = 0.0
        for m in range(COUNT):
            rows = batch[m * SIZE : (m + 1) * SIZE]
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = loss_of(model(rows[:, :-1]), rows[:, 1:])
            seed = torch.full_like(loss, scale / COUNT)
            made.append([g.to(gradients) for g in torch.autograd.grad(loss, parameters, seed)])
            total += loss.item() / COUNT
        losses.append(total)
        sums = [[item.to(kept or gradients) for item in reduce(add_up, (made[m] for m in group))] for group in groups]
        found = [item / scale for item in reduce(add_up, sums)]
        if step == broken_step or not all(item.isfinite().all() for item in found):
            skipped, scale = skipped + 1, scale / 2
            continue
        for parameter, gradient in zip(updated, found, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
        with torch.no_grad():
            for parameter, source in zip(parameters, updated, strict=True):
                parameter.copy_(source)
    return losses, {name: item.detach() for name, item in model.named_parameters()}, skipped


def add_up(one, other):
    return [a + b for a, b in zip(one, other, strict=True)]


class Watched(torch.optim.AdamW):
    """Notes what gradients take when it steps."""

    gradient_bytes = num_steps = 0
    parameters = ()

    def step(self, closure=None):
        found = [own_part(p.grad) for p in self.parameters if p.grad is not None]
        self.gradient_bytes = max(self.gradient_bytes, sum(item.nbytes for item in found))
        self.num_steps += 1
        return super().step(closure)


@contextmanager
def broken(session):
    """Within, one of this rank's gradients is infinite."""
    scale = session.steps._executor._scale
    begin = scale.begin

    def begin_broken(ranks):
        next(own_part(item.grad) for item in scale._parameters if item.grad is not None).view(-1)[0] = torch.inf
        return begin(ranks)

    scale.begin = begin_broken
    yield
    del scale.begin


def train_here(plan, broken_step=None):
    """This rank's losses, the whole state, bytes, steps left out, and what it did in them."""
    model, batches = make_model(), make_batches()
    batch = ((batches[0][:, :-1],), (batches[0][:, 1:],))
    optimizer = Watched(list(model.parameters()), lr=RATE)
    trainer = prepare(model, loss_of, optimizer, batch, plan=plan, verify=False)
    session = trainer._session
    optimizer.parameters = [*session.parameters.values()]
    same = []
    for step, rows in enumerate(batches):
        before = [own_part(item).detach().clone() for item in session.parameters.values()]
        with broken(session) if step == broken_step and dist.get_rank() == 1 else nullcontext():
            trainer.step((rows[:, :-1],), (rows[:, 1:],))
        # What is gathered beside the next step is there behind it alone.
        session.finish()
        now = [own_part(item).detach() for item in session.parameters.values()]
        same.append(all(map(torch.equal, before, now)))
    states = [own_part(v) for held in optimizer.state.values() for v in held.values() if v.ndim]
    held = {
        "parameters": sum(own_part(item).nbytes for item in session.parameters.values()),
        "elements": sum(item.numel() for item in session.parameters.values()),
        "gradients": optimizer.gradient_bytes,
        "states": sum(item.nbytes for item in [*states, *session.updates.masters]),
    }
    if session.hosting is not None:
        # On drives they are not at hand.
        kept = session.updates.state()
        states = [v for state in kept["optimizer"]["state"].values() for v in state.values() if v.ndim]
        held["states"] = sum(item.nbytes for item in [*states, *kept["masters"].values()])
    if session.exchange is not None and (buffers := sum(item.nbytes for item in session.exchange.buffers)):
        held["gradients"] = buffers
    steps = optimizer.num_steps
    return list(trainer.losses), trainer.state_dict(), held, {"same": same, "num_steps": steps}


def difference(found, wanted):
    """The norm of what differs, of that by which training changed the weights."""
    start = dict(make_model().named_parameters())
    off = sum(float((found[name].double() - item.double()).square().sum()) for name, item in wanted.items())
    changed = sum(float((item.double() - start[name].double()).square().sum()) for name, item in wanted.items())
    return (off / changed) ** 0.5


def compare(precision, layout, broken_step=None):
    plan = make_plan(precision, layout)
    losses, state, held, notes = train_here(plan, broken_step)
    everyone = [None, None]
    dist.all_gather_object(everyone, (held, notes))
    if state is None:
        return None
    groups = orders_of(plan, layout)
    # Shards that are master weights have gradients of their type.
    kept = TYPES[precision][2] if layout in ("zero 2", "zero 3") else None
    wanted_losses, wanted, skipped = train_plainly(precision, groups, broken_step, kept=kept)
    others = [[m] for m in reversed(range(COUNT))]
    other_losses, other, _ = train_plainly(precision, others, broken_step, halves=layout == "tensor")
    return {
        "losses": losses,
        "wanted_losses": wanted_losses,
        "other_losses": other_losses,
        "types": sorted({str(item.dtype) for item in state.values() if item.is_floating_point()}),
        "off": difference(state, wanted),
        "spread": difference(other, wanted),
        "held": [item for item, _ in everyone],
        "notes": [item for _, item in everyone],
        "skipped": skipped,
    }


def main():
    world_size, out, precision, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    broken_step = int(rest[0]) if rest else None

    def run() -> None:
        dist.init_process_group("gloo")
        found = {layout: compare(precision, layout, broken_step) for layout in LAYOUTS}
        if dist.get_rank() == 0:
            Path(out).write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()

    fork_ranks(int(world_size), run)


if __name__ == "__main__":
    main()
