"""Ranks that run a model forward under several plans; which rank made what, beside the model's own answers."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from meshwright import capture_model, prepare
from meshwright.spec import Plan, PlanError, RunError, Sharding, StagePlan, Workload
from tests.rank_results import write_results

BATCH, MICROBATCHES = 8, 4


class Forked(nn.Module):
    """Two outputs, a skip, statistics that stay as they are, and no dropout, for it is evaluated."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm, self.drop, self.head = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x):
        first = torch.tanh(self.first(x))
        second = self.drop(self.norm(self.second(first))) + first
        return {"hidden": second, "classes": self.head(second)}


TEAM = ((0,),)
PLANS = {
    "pipeline": ((0,), (1,)),
    "replicas": ((0, 1),),
    "both": ((0, 1), (0, 1)),
}


def plan_of(name, graph):
    count, stages = len(graph.layers), PLANS.get(name, TEAM)
    bounds = [count * place // len(stages) for place in range(len(stages) + 1)]
    return Plan(
        model="forked",
        graph_hash=graph.content_hash,
        cluster="2xcpu",
        workload=Workload(kind="inference", global_batch=BATCH),
        stages=tuple(StagePlan(start=bounds[i], stop=bounds[i + 1], ranks=ranks) for i, ranks in enumerate(stages)),
        num_microbatches=MICROBATCHES,
        schedule="interleaved" if name == "both" else "gpipe",
    )


def find(_folder):
    found = {}
    for name in PLANS:
        torch.manual_seed(0)
        model = Forked().eval()
        batches = [torch.randn(BATCH, 6) for _ in range(3)]
        graph = capture_model(model, (batches[0][:2],), mode="inference", verify=False).graph
        trainer = prepare(model, None, None, ((batches[0],), ()), plan=plan_of(name, graph), verify=False)
        torch.manual_seed(0)
        plain = Forked().eval()
        made = [trainer.infer((batch,)) for batch in batches]
        mine = [m for m in range(MICROBATCHES) if trainer.plan.stages[-1].rank_of(m) == trainer._session.grid.rank]
        worst, shapes = 0.0, []
        for batch, values in zip(batches, made, strict=True):
            with torch.no_grad():
                wanted = plain(batch)
            rows = [item for m in mine for item in range(m * 2, m * 2 + 2)]
            for value, key in zip(values.values(), ("hidden", "classes"), strict=True) if values else ():
                worst = max(worst, float((value - wanted[key][rows]).abs().max()))
            shapes.append([list(value.shape) for value in values.values()])
        told = ""
        try:
            trainer.step((batches[0],))
        except RunError as error:
            told = str(error)
        own = {"worst": worst, "shapes": shapes[-1], "losses": list(trainer.losses), "told": told}
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        found[name] = every
        trainer.close()
    found["team"] = refused(replace(plan_of("team", graph), sharding=Sharding(tensor=2)), batches[0])
    return found


def refused(plan, batch):
    """What is said of a plan whose teams would return parts."""
    try:
        prepare(Forked().eval(), None, None, ((batch,), ()), plan=plan, verify=False)
    except PlanError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    write_results(find)
