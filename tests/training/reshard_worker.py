"""Two ranks go on from each plan's checkpoint under every other plan; rank 0 writes how far they are from the first."""

import itertools
import json
import resource
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from meshwright import Feed, capture_model, prepare
from meshwright.spec import GradientExchange, Offload, RunError, Sharding
from tests.rank_results import write_results
from tests.training.checkpoint_worker import BATCH, LOSS, STEPS, STOP, data, plan_of

CASES = {
    "pipeline": {"cut": 2},
    "replicas": {},
    "zero 1": {"exchange": GradientExchange(zero=1)},
    "zero 3": {"exchange": GradientExchange(zero=3)},
    "tensor": {"sharding": Sharding(tensor=2), "ranks": (0,)},
    "host": {"exchange": GradientExchange(zero=1), "offload": Offload(optimizer="host")},
    "drives": {"cut": 2, "offload": Offload(optimizer="nvme")},
}
PAIRS = list(itertools.permutations(CASES, 2))


class Net(nn.Module):
    """Linear layers, dropout, and running statistics, which training does not read."""

    def __init__(self, width=6):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(4), nn.Linear(8, width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale * self.down(nn.functional.dropout(torch.relu(self.up(self.norm(x))), 0.2, self.training))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def trainer_of(
    case, seed, *, width=6, run_seed=0, dtype=torch.float64, precision="float32", optimizer=adamw, **changes
):
    torch.manual_seed(seed)
    model = Net(width).train().to(dtype)
    example = torch.randn(2, 4, dtype=dtype), torch.tensor([0, 1])
    graph = capture_model(model, example[:1], targets=example[1:], loss=LOSS, verify=False).graph
    feed = Feed(dataset=Cast(data(), dtype), shuffle=True, seed=1)
    plan = plan_of(graph, **(CASES[case] | changes))
    plan = replace(plan, workload=replace(plan.workload, precision=precision))
    options = {"plan": plan, "feed": feed, "run_seed": run_seed, "verify": False}
    return prepare(model, LOSS, optimizer, example, **options)


class Cast(torch.utils.data.Dataset):
    def __init__(self, inner, dtype):
        self.inner, self.dtype = inner, dtype

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        x, y = self.inner[index]
        return x.to(self.dtype), y


def undisturbed(case, folder):
    trainer = trainer_of(case, 3)
    for step, _ in enumerate(trainer.train(), 1):
        if step == STOP:
            trainer.save_checkpoint(folder, in_background=True)
    trainer.wait_for_checkpoint()
    state, losses = trainer.state_dict(), trainer.losses
    trainer.close()
    return state, losses


def went_on(case, folder):
    trainer = trainer_of(case, 99)
    done = trainer.resume(folder)
    for _ in trainer.train():
        pass
    state, losses = trainer.state_dict(), trainer.losses
    trainer.close()
    return state, losses, done


def distance(wanted, found):
    (state, losses), (other, last, done) = wanted, found
    if state is None:
        return None
    off = max(
        float((other[key] - value).abs().max() / value.abs().max().clamp(min=1e-3))
        for key, value in state.items()
        if value.is_floating_point() and "running" not in key
    )
    of_losses = max(abs(a - b) for a, b in zip(losses[-len(last) :], last, strict=True))
    return {"weights": off, "losses": of_losses, "done": done, "steps": len(last)}


def refusals(folder):
    said = {}
    for name, options in (
        ("model", {"width": 5}),
        ("seed", {"run_seed": 5}),
        ("optimizer", {"optimizer": momentum}),
    ):
        trainer = trainer_of("zero 1", 3, **options)
        try:
            trainer.resume(folder)
        except RunError as error:
            said[name] = str(error)
        trainer.close()
    return said


def read(folder):
    """What torch's own reader finds in the newest checkpoint."""
    *_, path = sorted(folder.glob("step-*"))
    reader = HuggingFaceStorageReader(str(path))
    found = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(path)))
    return found


def precisions(folder):
    """Go on in another precision and save at once: by case, the tensors that are not the cast of the first."""
    wrong = {}
    for first, then in itertools.permutations(("pipeline", "zero 1", "tensor"), 2):
        for precisions in (("float32", "mixed"), ("mixed", "float32")):
            name = f"{first} in {precisions[0]} to {then} in {precisions[1]}"
            trainer = trainer_of(first, 3, dtype=torch.float32, precision=precisions[0])
            for _ in zip(range(2), trainer.train(), strict=False):
                pass
            trainer.save_checkpoint(folder / name / "first")
            trainer.close()
            trainer = trainer_of(then, 99, dtype=torch.float32, precision=precisions[1])
            trainer.resume(folder / name / "first")
            trainer.save_checkpoint(folder / name / "then")
            trainer.close()
            before, after = read(folder / name / "first"), read(folder / name / "then")
            wrong[name] = [key for key, value in after.items() if not torch.equal(value, cast_of(before, key, value))]
            wrong[name] += [key for key in before if key.startswith("optimizer.") and key not in after]
    return wrong


def cast_of(before, key, value):
    kind, _, name = key.partition(".")
    source = f"master.{name}" if kind in ("model", "master") and f"master.{name}" in before else key
    source = f"model.{name}" if kind == "master" and source not in before else source
    return before[source].to(value.dtype)


def full(folder):
    """The folder takes 1 KiB per file; afterwards what is there goes on."""
    trainer = trainer_of("zero 1", 3)
    steps = trainer.train()
    next(steps)
    trainer.save_checkpoint(folder)
    next(steps)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limit[1]))
    said = ""
    try:
        trainer.save_checkpoint(folder, in_background=True)
        next(steps)
        trainer.wait_for_checkpoint()
    except RunError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    left = sorted(path.name for path in folder.iterdir())
    steps.close()
    trainer.close()
    trainer = trainer_of("pipeline", 99)
    done = trainer.resume(folder)
    trainer.close()
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, said)
    return {"said": every, "left": left, "done": done}


def files_of(folder):
    (path,) = Path(folder).glob("step-*")
    sums = json.loads((path / "manifest.json").read_text())["sums"]
    return {"names": sorted(name for name, _ in sums), "bytes": sum((path / name).stat().st_size for name, _ in sums)}


def find(folder):
    first = {case: undisturbed(case, folder / case) for case in CASES}
    found = {f"{a} to {b}": distance(first[a], went_on(b, folder / a)) for a, b in PAIRS}
    found["said"] = refusals(folder / "pipeline")
    found["precisions"] = precisions(folder / "precisions")
    found["full"] = full(folder / "full")
    dist.barrier()
    found["files"] = {case: files_of(folder / case) for case in CASES}
    return found


if __name__ == "__main__":
    assert len(data()) == BATCH * STEPS
    write_results(find)
