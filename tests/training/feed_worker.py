"""Two ranks train on data sets under several plans; rank 0 writes losses, what was read, and spans of loads."""

import time
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn

from meshwright import Feed, capture_model, prepare
from meshwright.spec import Opcode, Plan, StagePlan, Workload
from tests.rank_results import write_results

BATCH, MICROBATCHES, COUNT, EPOCHS = 8, 4, 28, 2
LOSS = nn.functional.cross_entropy


class Samples:
    """Rows of a table; notes which are read, and takes its time."""

    def __init__(self, seconds=0.0, bad=None):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(COUNT, 4, generator=generator)
        self.y = torch.randint(5, (COUNT,), generator=generator)
        self.read, self.seconds, self.bad = [], seconds, bad

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError("torn")
        time.sleep(self.seconds)
        self.read.append(index)
        return self.x[index], self.y[index]


class Stream(torch.utils.data.IterableDataset):
    """The same, in the order of another feed."""

    def __init__(self, orders):
        self.samples, self.orders = Samples(), orders
        self.read, self.epoch = self.samples.read, -1

    def __iter__(self):
        self.epoch += 1
        return (self.samples[index] for index in self.orders[self.epoch])


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))


def trainer_of(feed, replicas):
    example = (torch.randn(2, 4), torch.tensor([0, 1]))
    graph = capture_model(model(), example[:1], targets=example[1:], loss=LOSS, verify=False).graph
    count = len(graph.layers)
    one, two = (StagePlan(start=0, stop=2, ranks=(0,)), StagePlan(start=2, stop=count, ranks=(1,)))
    plan = Plan(
        model="own",
        graph_hash=graph.content_hash,
        cluster="",
        workload=Workload(global_batch=BATCH),
        stages=(StagePlan(start=0, stop=count, ranks=(0, 1)),) if replicas else (one, two),
        num_microbatches=MICROBATCHES,
        schedule="1f1b",
    )
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    return prepare(made, LOSS, optimizer, example, plan=plan, feed=feed, verify=False)


def gather(value):
    found = [None, None]
    dist.all_gather_object(found, value)
    return found


def train(dataset, *, replicas=False, shuffle=True, drop_last=False, record=False):
    feed = Feed(dataset=dataset, shuffle=shuffle, seed=5, epochs=EPOCHS, drop_last=drop_last, producers=2, depth=2)
    trainer = trainer_of(feed, replicas)
    losses = []
    steps = trainer.train()
    losses += islice(steps, 1)
    if record:
        trainer.record()
    losses += islice(steps, 2)
    timeline = trainer.timeline()
    losses += steps
    found = {"losses": losses, "read": [len(read) for read in gather(dataset.read)]}
    if record and timeline is not None:
        rows = timeline.opcode == Opcode.LOAD
        seconds = (timeline.end_ps - timeline.start_ps)[rows] / 1e12
        found["loads"] = [timeline.start_ps[rows].tolist(), timeline.end_ps[rows].tolist()]
        found["slowest"] = seconds.max()
    trainer.close()
    return found


def train_serially(feed):
    made, samples, losses = model(), Samples(), []
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        order = list(feed.order(epoch))
        for first in range(0, COUNT, BATCH):
            chosen = order[first : first + BATCH]
            loss = LOSS(made(samples.x[chosen]), samples.y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def find(_folder):
    feed = Feed(dataset=Samples(), shuffle=True, seed=5, epochs=EPOCHS)
    return {
        "wanted": train_serially(feed),
        "pipeline": train(Samples(seconds=0.01), record=True),
        "replicas": train(Samples(), replicas=True),
        "stream": train(Stream([list(feed.order(epoch)) for epoch in range(EPOCHS)]), shuffle=False),
    }


if __name__ == "__main__":
    write_results(find)
