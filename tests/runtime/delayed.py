"""Training with delayed gradients, in one process: what schedules that never flush must equal.

Written from the papers, not from `program`: minibatches one after the other, each through weights whose versions the
formulas below give, then the updates that are due. Stage s has R_s replicas, and k_s minibatches of each under way:
PipeDream's number, ceil(ranks from stage s to the end / R_s). Minibatch m of a stage is the j-th, j = m // R_s, of
replica m % R_s.

    pipedream            version max(0, j - k_s + 1); an update takes the mean over the replicas
    pipedream-vertical   the same of the stage that lags most, in its own updates, at all stages
    pipedream-2bw        version max(0, m // M - 1), an update per M minibatches
    hetpipe              R models of their own, each with its updates; at the end of a wave of n = M / R minibatches
                         each gets what the others changed in the wave D before
"""

import copy
from collections import defaultdict

import torch
from torch.func import functional_call

from meshwright.spec import slice_graph


def ways(plan):
    """Ranks from each stage to the end, along the longest way."""
    found = {}
    for stage in reversed(range(len(plan.stages))):
        later = max((found[target] for target in plan.feeds(stage)), default=0)
        found[stage] = len(plan.stages[stage].ranks) + later
    return found


def stage_of_parameters(plan, graph):
    """Name of each trained parameter → its stage."""
    return {
        graph.tensors[i].name: stage.index
        for stage in slice_graph(graph, plan.bounds)
        for i in stage.parameters
        if graph.tensors[i].requires_grad
    }


class Delayed:
    """Weights of one copy of the model, version after version, stage by stage."""

    def __init__(self, model, stage_of, make_optimizer):
        self.model, self.stage_of = model, stage_of
        self.parameters = {name: item for name, item in model.named_parameters() if name in stage_of}
        self.optimizers = {
            stage: make_optimizer([item for name, item in self.parameters.items() if stage_of[name] == stage])
            for stage in set(stage_of.values())
        }
        self.history = {stage: [self.of_stage(stage)] for stage in self.optimizers}
        self.gradients = {stage: [] for stage in self.optimizers}

    def of_stage(self, stage):
        return {name: item.detach().clone() for name, item in self.parameters.items() if self.stage_of[name] == stage}

    def run(self, versions, compute_loss, ahead=None):
        """One minibatch with a version per stage; its loss. Gradients are kept for the next updates.

        ``ahead``: so many updates of each stage are predicted, each like the last one.
        """
        weights = {}
        for stage, version in versions.items():
            now, before = (self.history[stage][max(0, version - back)] for back in (0, 1))
            further = (ahead or {}).get(stage, 0)
            weights |= {name: (now[name] + further * (now[name] - before[name])).requires_grad_() for name in now}
        loss = compute_loss(lambda *args, **kwargs: functional_call(self.model, weights, args, kwargs))
        found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        for stage in versions:
            mine = {n: g for n, g in zip(weights, found, strict=True) if self.stage_of[n] == stage and g is not None}
            self.gradients[stage].append(mine)
        return loss.item()

    def update(self, stage, rate=1.0):
        """The mean of the gradients since the last update; ``rate`` multiplies the learning rate."""
        count = len(self.gradients[stage])
        for name, parameter in self.parameters.items():
            given = [item[name] for item in self.gradients[stage] if name in item]
            if self.stage_of[name] == stage and given:
                parameter.grad = sum(given) / count
        (group,) = self.optimizers[stage].param_groups
        usual = group["lr"]
        group["lr"] = usual * rate
        self.optimizers[stage].step()
        group["lr"] = usual
        self.optimizers[stage].zero_grad()
        self.gradients[stage].clear()
        self.history[stage].append(self.of_stage(stage))


def call(model, inputs, rows):
    """The model's outputs for some rows of a batch of positional or keyword arguments."""
    if isinstance(inputs, dict):
        return model(**{name: x[rows] for name, x in inputs.items()})
    return model(*(x[rows] for x in inputs))


class Stream:
    """Minibatches of all batches, one behind the other, with their seeds; batch-norm statistics of replica 0."""

    def __init__(self, case, batches, plan, graph, size, seed_of):
        self.loss, self.batches, self.size, self.seed_of = case.loss, batches, size, seed_of
        self.count = plan.num_microbatches
        self.turns = {
            graph.tensors[buffer].name: len(plan.stages[stage.index].ranks)
            for stage in slice_graph(graph, plan.bounds)
            for buffer in stage.buffers
        }

    def __len__(self):
        return len(self.batches) * self.count

    def run(self, model, m, run):
        """``run(compute_loss)`` with the m-th minibatch."""
        step, place = divmod(m, self.count)
        inputs, targets = self.batches[step]
        rows = slice(place * self.size, (place + 1) * self.size)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        torch.manual_seed(self.seed_of(step, place))
        value = run(lambda compute: self.loss(call(compute, inputs, rows), *(y[rows] for y in targets)))
        for name, buffer in model.named_buffers():
            if m % self.turns.get(name, 1):
                buffer.copy_(before[name])
        return value


def train_delayed(model, plan, graph, stream, make_optimizer, repair=None, fade=0):
    """State and losses of the batches after training a copy of ``model``.

    ``repair`` predict: the weights d updates on, d being those that come between a gradient and its weights; discount:
    the learning rate over d to the power 1 - updates / fade.
    """
    if plan.schedule == "hetpipe":
        return train_workers(model, plan, graph, stream, make_optimizer)
    replicas = [len(stage.ranks) for stage in plan.stages]
    active = {s: -(-ahead // replicas[s]) for s, ahead in ways(plan).items()}
    lagging = max(active, key=lambda s: (active[s] - 1) * replicas[s])
    count = plan.num_microbatches

    def version(stage, m):
        if plan.schedule == "pipedream-2bw":
            return max(0, m // count - 1)
        if plan.schedule == "pipedream":
            return max(0, m // replicas[stage] - active[stage] + 1)
        entered = max(0, m // replicas[lagging] - active[lagging] + 1) * replicas[lagging]
        return entered // replicas[stage]

    worker = Delayed(copy.deepcopy(model), stage_of_parameters(plan, graph), make_optimizer)
    stale = staleness(plan, active, replicas, lagging) if repair else {}
    ahead = stale if repair == "predict" else {}
    losses = defaultdict(float)
    for m in range(len(stream)):
        versions = {stage: version(stage, m) for stage in worker.optimizers}
        losses[m // count] += stream.run(worker.model, m, lambda fn, v=versions: worker.run(v, fn, ahead)) / count
        for stage in worker.optimizers:
            if (m + 1) % (count if plan.schedule == "pipedream-2bw" else replicas[stage]) == 0:
                done = len(worker.history[stage]) - 1
                power = 1 - min(1, done / fade) if fade else 1
                discounted = repair == "discount" and stale[stage] > 1
                worker.update(stage, stale[stage] ** -power if discounted else 1.0)
    return worker.model.state_dict(), list(losses.values())


def staleness(plan, active, replicas, lagging):
    """Updates of each stage between the weights of a gradient and the update that it is part of, once all is full."""
    if plan.schedule == "pipedream-2bw":
        return dict.fromkeys(active, 1)
    if plan.schedule == "pipedream":
        return {stage: count - 1 for stage, count in active.items()}
    assert len(set(replicas)) == 1, "one number for a stage"
    return dict.fromkeys(active, active[lagging] - 1)


def train_workers(model, plan, graph, stream, make_optimizer):
    """HetPipe's virtual workers; the state is that of the first."""
    number, behind = len(plan.stages[0].ranks), plan.exchange.staleness
    under_way, wave = len(plan.stages), plan.num_microbatches // len(plan.stages[0].ranks)
    stage_of = stage_of_parameters(plan, graph)
    workers = [Delayed(copy.deepcopy(model), stage_of, make_optimizer) for _ in range(number)]
    begun = [{name: item.detach().clone() for name, item in w.parameters.items()} for w in workers]
    changed, losses = [], defaultdict(float)
    for j in range(len(stream) // number):
        for r, worker in enumerate(workers):
            m = j * number + r
            versions = dict.fromkeys(worker.optimizers, max(0, j - under_way + 1))
            losses[m // plan.num_microbatches] += (
                stream.run(worker.model, m, lambda fn, w=worker, v=versions: w.run(v, fn)) / plan.num_microbatches
            )
            for stage in worker.optimizers:
                worker.update(stage)
        if (j + 1) % wave == 0 and number > 1:
            pairs = zip(workers, begun, strict=True)
            changed.append([{n: p.detach() - b[n] for n, p in w.parameters.items()} for w, b in pairs])
            due = len(changed) - 1 - behind
            if due >= 0:
                for r, worker in enumerate(workers):
                    for name, parameter in worker.parameters.items():
                        others = sum(changed[due][o][name] for o in range(number) if o != r)
                        parameter.data = parameter.data + others
                    # What was made a moment ago is not used: the merged weights are, by all that begin from now on.
                    for stage in worker.optimizers:
                        worker.history[stage][-1] = worker.of_stage(stage)
            begun = [{name: item.detach().clone() for name, item in w.parameters.items()} for w in workers]
    return workers[0].model.state_dict(), list(losses.values())
