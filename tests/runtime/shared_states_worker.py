"""Two replicas of a network with statistics and in-place ops, which share out more and more of their states."""

import copy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from meshwright.capture import capture_model, flatten_batch
from meshwright.runtime import open_session
from meshwright.spec import GradientExchange, Plan, StagePlan, Workload
from meshwright.training.checkpoint import gather_state
from meshwright.training.trainer import Losses
from tests.rank_results import write_results

BATCH = 8


class Blocks(nn.Module):
    """Repeated convolutions with batch statistics and frozen biases, between what occurs once."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(_Block(6) for _ in range(4))
        self.last, self.unheard = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = x.mean((2, 3))
        return self.last(x) + self.unheard(x).detach()


class _Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv.bias.requires_grad_(False)

    def forward(self, x):
        return self.norm(self.conv(x)).relu_() + x


def capture(model):
    example = torch.randn(3, 3, 6, 6)
    loss = nn.functional.cross_entropy
    return capture_model(model.train(), (example,), targets=(torch.tensor([0, 1, 2]),), loss=loss, verify=False)


def plan_of(graph, **exchange):
    return Plan(
        model="own",
        graph_hash=graph.content_hash,
        cluster="",
        workload=Workload(global_batch=BATCH),
        stages=(StagePlan(start=0, stop=len(graph.layers), ranks=(0, 1)),),
        num_microbatches=4,
        exchange=GradientExchange(bucket_bytes=2**11, **exchange),
    )


def train(zero):
    """The state after some steps, and the elements of parameters and of optimizer states that rank 0 holds."""
    torch.manual_seed(3)
    model = Blocks()
    if zero and dist.get_rank() == 1:
        for item in (*model.parameters(), *model.buffers()):
            item.data.add_(1)
    captured = capture(model)
    before = model.unheard.weight.tolist()
    made = []

    def make_optimizer(parameters):
        """Products decay, vectors do not: told apart by their dims."""
        groups = [[item for item in parameters if (item.ndim > 1) == wanted] for wanted in (True, False)]
        decays = zip(groups, (0.1, 0.0), strict=True)
        made.append(torch.optim.AdamW([{"params": own, "weight_decay": decay} for own, decay in decays], lr=1e-2))
        return made[0]

    session = open_session(captured, plan_of(captured.graph, zero=zero), make_optimizer)
    optimizer = made[0]
    for step in range(4):
        if step == 1:
            session.recorder.start(session.steps.next_repetition)
        if step == 3:
            session.recorder.stop(session.steps.next_repetition)
        images, targets = torch.randn(BATCH, 3, 6, 6), torch.randint(5, (BATCH,))
        session.run_step(step, flatten_batch(captured, (images,), (targets,)))
    session.finish()
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    held = [
        sum(getattr(item, "_local_tensor", item).numel() for item in items)
        for items in (session.parameters.values(), moments)
    ]
    state = gather_state(model, session)
    session.close()
    spans = torch.bincount(torch.from_numpy(session.recorder.rows()[:, 1])).tolist()
    found = {"held": held, "before": before, "spans": spans, "buffers": [gather_buffers(session)]}
    session.sync_buffers()
    found["buffers"].append(gather_buffers(session))
    return None if state is None else found | {"state": {key: value.tolist() for key, value in state.items()}}


def gather_buffers(session):
    """Those of both ranks."""
    own = torch.cat([item.flatten() for module in session.modules for item in module.buffers()])
    both = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(both, own)
    return [item.tolist() for item in both]


def train_on_less(stages, zero):
    """Losses and weights where the last batch has half of the samples, and those of a serial loop."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    serial = copy.deepcopy(model)
    loss = nn.functional.cross_entropy
    captured = capture_model(model, (torch.randn(2, 4),), targets=(torch.tensor([0, 1]),), loss=loss, verify=False)
    count = len(captured.graph.layers)
    cut = (
        (StagePlan(start=0, stop=2, ranks=(0,)), StagePlan(start=2, stop=count, ranks=(1,)))
        if stages == 2
        else (StagePlan(start=0, stop=count, ranks=(0, 1)),)
    )
    plan = replace(plan_of(captured.graph, zero=zero), stages=cut)
    session = open_session(captured, plan, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    optimizer, losses, wanted = torch.optim.AdamW(serial.parameters(), lr=1e-2), Losses(session), []
    for step, size in enumerate((BATCH, BATCH, BATCH // 2, BATCH)):
        inputs, targets = torch.randn(size, 4), torch.randint(5, (size,))
        made = session.run_step(step, (inputs, targets))
        losses.add(step, made, session.count_microbatches((inputs, targets)))
        optimizer.zero_grad()
        value = loss(serial(inputs), targets)
        value.backward()
        optimizer.step()
        wanted.append(value.item())
    session.finish()
    state = gather_state(model, session)
    session.close()
    if state is None:
        return None
    far = max((state[key] - value).abs().max().item() for key, value in serial.state_dict().items())
    return {"far": far, "losses": losses.known, "wanted": wanted}


def find(_folder):
    results = {zero: train(zero) for zero in range(4)}
    for stages, zero in ((2, 0), (1, 0), (1, 1), (1, 3)):
        results[f"less {stages} {zero}"] = train_on_less(stages, zero)
    return results


if __name__ == "__main__":
    write_results(find)
