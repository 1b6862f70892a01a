"""The loss that asynchrony costs, per update and per second, and what two repairs give back.

Four stages of a small Llama on bytes train under every schedule, from the same weights on the same samples in the same
order; every arm makes one update per 16 samples, so that arms differ in their delays alone:

    flush                 1F1B, 4 microbatches of 4: no delay. The reference
    stashing              pipedream, minibatches of 16: 3, 2, 1 and 0 updates of delay
    vertical sync         pipedream-vertical: 3 everywhere
    2bw                   4 microbatches of 4, 1 everywhere
    naive                 stashing without stashes: backwards meet other weights than their forwards. Negative control
    stashing, predict     weights extrapolated by as many updates as are missing
    stashing, discount    learning rates over the delay, which fades in a quarter of the run

Rates are chosen among `RATES` by the held-out loss, on a seed that is not scored: once for flush, which all arms get,
and once for each arm. Scored is the loss on 256 held-out samples after `UPDATES` updates; its gap to flush is paired by
seed. Per second: every arm trains, with its own rate, as many updates as take it the time of flush's; an update takes
what the simulator says for four devices, with ops that were measured here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from harness import make_row

from meshwright.capture import capture_model, flatten_batch
from meshwright.cost import CostModel
from meshwright.measurement import run_ranks
from meshwright.runtime import Repair, open_session
from meshwright.runtime.versions import VersionedPart
from meshwright.simulator import simulate_plan
from meshwright.spec import Optimizer, Plan, StagePlan, Workload, load_cluster
from meshwright.training import measure_here, text_batches
from meshwright.training.checkpoint import gather_state
from meshwright.zoo import load_model

MODEL, SIZES = str(Path(__file__).with_name("llama.toml")), {"sequence_length": 32}
STAGES = 4
SAMPLES = 16
PARTS = 4
UPDATES, QUICK_UPDATES = 160, 32
SEEDS, QUICK_SEEDS = (1, 2, 3, 4, 5), (1, 2)
TUNING_SEED, HELD_OUT_SEED = 100, 999
RATES = {"sgd": (0.003, 0.006, 0.012, 0.024, 0.048), "adamw": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)}
# Schedule, repair, and whether stashes are left out.
ARMS = {
    "flush": ("1f1b", None, False),
    "stashing": ("pipedream", None, False),
    "vertical sync": ("pipedream-vertical", None, False),
    "2bw": ("pipedream-2bw", None, False),
    "naive": ("pipedream", None, True),
    "stashing, predict": ("pipedream", "predict", False),
    "stashing, discount": ("pipedream", "discount", False),
}
NOTES = (
    "Held-out loss: value = mean over the seeds, baseline = that of flush, spread = half the middle 80 % of the seeds. "
    "Gap: mean of the paired differences to flush, spread = their standard error. Share closed: 1 - gap of the repair "
    "over gap of stashing. Equal time: as many updates as take an arm the time of flush's."
)


def per_update(schedule):
    """Whether minibatches are whole updates; else a step of the plan is one update of several microbatches."""
    return schedule in ("pipedream", "pipedream-vertical")


def make_plan(graph, schedule, optimizer):
    edges = [len(graph.layers) * index // STAGES for index in range(STAGES + 1)]
    return Plan(
        model=MODEL,
        model_sizes=tuple(SIZES.items()),
        graph_hash=graph.content_hash,
        cluster=f"{STAGES}xcpu",
        workload=Workload(
            global_batch=SAMPLES * (PARTS if per_update(schedule) else 1),
            optimizer=Optimizer(kind=optimizer, momentum=optimizer == "sgd"),
        ),
        stages=tuple(StagePlan(start=edges[i], stop=edges[i + 1], ranks=(i,)) for i in range(STAGES)),
        num_microbatches=PARTS,
        schedule=schedule,
    )


def make_optimizer(kind, rate):
    if kind == "sgd":
        return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9)
    return lambda parameters: torch.optim.AdamW(parameters, lr=rate)


class Overwritten(VersionedPart):
    """Keeps nothing: a backward meets what the optimizer has made of the weights meanwhile."""

    def stash(self, version):
        self._kept[version] = [item.data for item in self._trained.values()]
        self._open = 0

    def drop(self, version):
        self._kept.pop(version)


class Trainee:
    """The model, captured once; trained again and again on this rank."""

    def __init__(self):
        self.source = load_model(MODEL, batch_size=SAMPLES, **SIZES)
        source = self.source
        self.captured = capture_model(
            source.model, source.inputs, targets=source.targets, loss=source.loss, verify=False
        )
        self.held_out = next(text_batches(256, SIZES["sequence_length"], HELD_OUT_SEED))

    def weights(self, seed):
        torch.manual_seed(seed)
        return {
            name: torch.randn_like(value) * 0.02 if value.ndim > 1 else torch.ones_like(value)
            for name, value in sorted(self.source.model.state_dict().items())
            if value.dtype.is_floating_point
        }

    def train(self, arm, optimizer, rate, seed, updates):
        """Training loss per update, and on rank 0 the loss on the held-out samples."""
        schedule, kind, overwrites = ARMS[arm]
        model, graph = self.source.model, self.captured.graph
        model.load_state_dict(self.weights(seed), strict=False)
        plan = make_plan(graph, schedule, optimizer)
        repair = None
        if kind is not None:
            repair = Repair(kind=kind, fade_updates=updates // 4 if kind == "discount" else 0)
        session = open_session(self.captured, plan, make_optimizer(optimizer, rate), repair=repair)
        if overwrites:
            for part in session.parts:
                if isinstance(part, VersionedPart):
                    part.__class__ = Overwritten
        stream = text_batches(plan.workload.global_batch, SIZES["sequence_length"], seed)
        steps = updates * SAMPLES // plan.workload.global_batch
        losses = torch.zeros(steps, dtype=torch.float64)
        for step in range(steps):
            inputs, targets = next(stream)
            add(losses, session.run_step(step, flatten_batch(self.captured, (inputs,), (targets,))), graph)
        add(losses, session.finish(), graph)
        dist.all_reduce(losses)
        state = gather_state(model, session)
        session.close()
        for parameter in model.parameters():
            parameter.grad = None
        return losses.numpy() / plan.num_microbatches, self.score(state)

    def score(self, state):
        if state is None:
            return float("nan")
        kept = {name: value.clone() for name, value in self.source.model.state_dict().items()}
        self.source.model.load_state_dict(state)
        with torch.no_grad():
            inputs, targets = self.held_out
            found = float(self.source.loss(self.source.model(inputs), targets))
        self.source.model.load_state_dict(kept)
        return found


def add(losses, outputs, graph):
    for step, value in outputs.get(graph.outputs[0], []):
        losses[step] += value.double()


def tune(_context, optimizer, updates):
    """The held-out loss of each arm with each rate, on rank 0."""
    trainee = Trainee()
    return {
        arm: {rate: trainee.train(arm, optimizer, rate, TUNING_SEED, updates)[1] for rate in RATES[optimizer]}
        for arm in ARMS
    }


def study(_context, optimizer, arms, seeds):
    """By arm, of which rate and updates are given: the held-out loss with each seed, on rank 0."""
    trainee = Trainee()
    return {
        arm: np.array([trainee.train(arm, optimizer, rate, seed, updates)[1] for seed in seeds])
        for arm, (rate, updates) in arms.items()
    }


def update_seconds(graph, optimizer):
    """Seconds per update of each schedule on four devices, as simulated from ops that are measured here."""
    cluster = load_cluster(f"{STAGES}xcpu")
    table = measure_here(MODEL, [SAMPLES // PARTS, SAMPLES], sizes=tuple(SIZES.items()), num_ranks=2)
    cost = CostModel(cluster=cluster, measurements=table)
    found = {}
    for schedule in {schedule for schedule, _, _ in ARMS.values()}:
        plan = make_plan(graph, schedule, optimizer)
        step_s = simulate_plan(plan, graph, cluster, cost=cost, num_steps=4).step_time_s
        found[schedule] = step_s / (PARTS if per_update(schedule) else 1)
    return found


def rows(quick: bool):
    """Held-out losses, gaps and shares closed of both optimizers: per update at two choices of rates, per second."""
    updates, seeds = (QUICK_UPDATES, QUICK_SEEDS) if quick else (UPDATES, SEEDS)
    graph = Trainee().captured.graph
    seconds = {optimizer: update_seconds(graph, optimizer) for optimizer in RATES}
    print("seconds per update", seconds, file=sys.stderr)
    table = []
    for optimizer in RATES:
        scores = run_ranks(tune, optimizer, updates, num_ranks=STAGES, timeout_s=3600)[0]
        print(f"{optimizer}: held-out losses {scores}", file=sys.stderr)
        best = {arm: min(found, key=lambda rate, found=found: lowest(found[rate])) for arm, found in scores.items()}
        usual = best["flush"]
        flush = run_ranks(study, optimizer, {"flush": (usual, updates)}, seeds, num_ranks=STAGES, timeout_s=3600)[0]
        others = [arm for arm in ARMS if arm != "flush"]
        for label, arms in (
            ("rate of flush", dict.fromkeys(others, (usual, updates))),
            ("own rates", {arm: (best[arm], updates) for arm in others}),
            ("own rates, equal time", {arm: (best[arm], in_time(arm, updates, seconds[optimizer])) for arm in others}),
        ):
            found = run_ranks(study, optimizer, arms, seeds, num_ranks=STAGES, timeout_s=3600)[0]
            table += arm_rows(f"{optimizer}, {label}", {"flush": (usual, updates), **arms}, {**flush, **found})
    return table


def in_time(arm, updates, update_s):
    """The updates that an arm makes while flush makes some: whole steps of its plan."""
    count = updates * update_s["1f1b"] / update_s[ARMS[arm][0]]
    return round(count / PARTS) * PARTS


def lowest(loss):
    """A loss to compare by; one that is none is the worst."""
    return float("inf") if np.isnan(loss) else loss


def arm_rows(label, arms, held):
    """The rows of all arms with their rates and updates."""
    usual = float(held["flush"].mean())
    table, gaps = [], {}
    for arm in ARMS:
        rate, updates = arms[arm]
        name = f"{label}: {arm} (rate {rate:g}, {updates} updates)"
        low, high = np.quantile(held[arm], [0.1, 0.9])
        table.append(make_row(f"{name}, held-out loss", held[arm].mean(), "", baseline=usual, spread=(high - low) / 2))
        if arm != "flush":
            differences = held[arm] - held["flush"]
            gaps[arm] = float(differences.mean())
            error = float(differences.std(ddof=1) / len(differences) ** 0.5)
            table.append(make_row(f"{name}, gap", gaps[arm], "", spread=error))
    for arm in ("stashing, predict", "stashing, discount"):
        share = 1 - gaps[arm] / gaps["stashing"]
        table += [make_row(f"{label}: {arm}, share of the gap closed", share, "")]
    return table
