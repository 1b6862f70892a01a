"""Two ranks train, stop at a checkpoint and go on from it with other weights at first; rank 0 writes what came out."""

import torch
import torch.distributed as dist
from torch import nn

from meshwright import Feed, capture_model, prepare
from meshwright.spec import GradientExchange, Offload, Plan, RunError, Sharding, StagePlan, Workload
from tests.rank_results import write_results

BATCH, STEPS, STOP = 8, 6, 4
LOSS = nn.functional.cross_entropy
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
CASES = {
    "pipeline": {"cut": 2},
    "replicas": {"optimizer": "momentum"},
    "zero 1": {"exchange": GradientExchange(zero=1)},
    "zero 3": {"exchange": GradientExchange(zero=3)},
    "tensor": {"sharding": Sharding(tensor=2), "ranks": (0,)},
    "pipedream": {"cut": 2, "schedule": "pipedream"},
    "host": {"exchange": GradientExchange(zero=1), "offload": Offload(optimizer="host")},
    "drives": {"cut": 2, "offload": Offload(optimizer="nvme"), "optimizer": "momentum"},
    "parameters": {
        "exchange": GradientExchange(zero=3),
        "offload": Offload(optimizer="nvme", parameters="host"),
    },
}


class Net(nn.Module):
    """Linear layers with dropout and running statistics."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(4), nn.Linear(8, 6)

    def forward(self, x):
        return self.down(nn.functional.dropout(torch.relu(self.up(self.norm(x))), 0.2, self.training))


def plan_of(graph, *, cut=1, schedule="1f1b", ranks=(0, 1), exchange=None, sharding=None, offload=None, **_):
    count = len(graph.layers)
    bounds = [count * place // cut for place in range(cut + 1)]
    return Plan(
        model="own",
        graph_hash=graph.content_hash,
        cluster="",
        workload=Workload(global_batch=BATCH),
        stages=tuple(
            StagePlan(start=bounds[place], stop=bounds[place + 1], ranks=(place,) if cut > 1 else ranks)
            for place in range(cut)
        ),
        num_microbatches=4,
        schedule=schedule,
        exchange=exchange or GradientExchange(),
        sharding=sharding or Sharding(),
        offload=offload or Offload(),
    )


def data():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(BATCH * STEPS, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(6, (len(x),), generator=generator))


def trainer_of(case, seed, run_seed=0, **changes):
    torch.manual_seed(seed)
    model = Net().train()
    example = torch.randn(2, 4), torch.tensor([0, 1])
    graph = capture_model(model, example[:1], targets=example[1:], loss=LOSS, verify=False).graph
    settings = CASES[case] | changes
    feed = Feed(dataset=data(), shuffle=True, seed=1)
    optimizer = OPTIMIZERS[settings.get("optimizer", "adamw")]
    plan = plan_of(graph, **settings)
    return prepare(model, LOSS, optimizer, example, plan=plan, feed=feed, run_seed=run_seed, verify=False)


def whole(case, stop, folder):
    """Train without a break; where one would be, what is under way comes to its end, too."""
    trainer = trainer_of(case, 3)
    for step, _ in enumerate(trainer.train(), 1):
        if step == stop:
            trainer.save_checkpoint(folder)
    state = trainer.state_dict()
    losses = trainer.losses
    trainer.close()
    return state, losses


def resumed(case, folder):
    trainer = trainer_of(case, 99)
    done = trainer.resume(folder)
    for _ in trainer.train():
        pass
    state = trainer.state_dict()
    losses = trainer.losses
    trainer.close()
    return state, losses, done


def compare(case, folder):
    wanted, all_losses = whole(case, STOP, folder)
    found, losses, done = resumed(case, folder)
    if wanted is None:
        return None
    differing = [key for key, value in wanted.items() if not torch.equal(found[key], value)]
    torch.manual_seed(3)
    start = Net().state_dict()
    moved = max((wanted[key] - value).abs().max().item() for key, value in start.items() if value.is_floating_point())
    same = list(losses) == list(all_losses)[-len(losses) :]
    return {"differing": differing, "done": done, "moved": moved, "losses": len(losses), "same": same}


def refusals(folder):
    """What is said to those who go on with something else."""
    said = {}
    trainer = trainer_of("pipeline", 3, run_seed=5)
    try:
        trainer.resume(folder)
    except RunError as error:
        said["seed"] = str(error)
    trainer.close()
    trainer = trainer_of("pipeline", 3)
    try:
        trainer.resume(folder.parent / "nothing")
    except RunError as error:
        said["nothing"] = str(error)
    try:
        trainer.save_checkpoint(folder)
    except RunError as error:
        said["other run"] = str(error)
    # Those that were interrupted are passed over.
    if dist.get_rank() == 0:
        (folder / ".step-00000009.0123abcd").mkdir()
        (folder / "step-00000009").mkdir()
    dist.barrier()
    said["interrupted"] = trainer.resume(folder)
    try:
        trainer.resume(folder)
    except RunError as error:
        said["late"] = str(error)
    trainer.close()
    return said


def find(folder):
    results = {case: compare(case, folder / case) for case in CASES}
    results["said"] = refusals(folder / "pipeline")
    return results


if __name__ == "__main__":
    write_results(find)
