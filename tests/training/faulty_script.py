"""A user's script whose rank 1 does something odd after a number of steps. Started with torchrun."""

import itertools
import os
import signal
import sys
import time

import torch
from torch import nn
from torch.utils.data import IterableDataset

import meshwright
from meshwright.training import Feed, Trainer, watch

ODD_STEP = 2


# Seconds that a forward takes longer.
delay = {"s": 0.0}


@torch.library.custom_op("faulty::delayed", mutates_args=())
def delayed(x: torch.Tensor) -> torch.Tensor:
    time.sleep(delay["s"])
    return x.clone()


@delayed.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


torch.library.register_autograd("faulty::delayed", lambda _, gradient: gradient)


class Delayed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return delayed(x)


def build(batch_size: int = 8):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Delayed())
    return model, (torch.ones(batch_size, 4), torch.zeros(batch_size, 4)), nn.functional.mse_loss


class Samples(IterableDataset):
    """Samples of which rank 1 has ``count``, and other ranks have 60."""

    def __init__(self, count: int) -> None:
        self.count = count if os.environ["RANK"] == "1" else 60

    def __iter__(self):
        for _ in range(self.count):
            yield torch.ones(4), torch.zeros(4)


class Slow:
    """A data set whose sample 30 never arrives on rank 1."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int):
        if os.environ["RANK"] == "1" and index == 30:
            time.sleep(600)
        return torch.ones(4), torch.zeros(4)


def again():
    """The arguments of `prepare` for a second trainer."""
    torch.manual_seed(3)
    model, batch, loss = build()
    return model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch


def lag(trainer: Trainer, batch: tuple[torch.Tensor, torch.Tensor], _plan: str) -> None:
    delay["s"] = 0.01
    for step in range(250):
        if step == 100 and trainer.rank == 1:
            delay["s"] = 0.03
        trainer.step(*batch)


def two(trainer: Trainer, batch: tuple[torch.Tensor, torch.Tensor], plan: str) -> None:
    other = meshwright.prepare(*again(), plan=plan, hang_after_s=2.0)
    for _ in range(100):
        trainer.step(*batch)
        time.sleep(0.05)
    other.step(*batch)
    print("both", flush=True)


def background(trainer: Trainer, batch: tuple[torch.Tensor, torch.Tensor], plan: str) -> None:
    trainer.step(*batch)
    trainer.save_checkpoint(f"{plan}.kept", in_background=True)


ALONE = {"lag": lag, "two": two, "background": background}


def main(plan: str, fault: str, hang_after: str) -> None:
    watch.PACE_S = 1.0
    model, loss, optimizer, batch = again()
    feeds = {"iterable": Feed(dataset=Samples(40)), "dataset": Feed(dataset=Slow(), epochs=4)}
    trainer = meshwright.prepare(
        model,
        loss,
        optimizer,
        batch,
        plan=plan,
        feed=feeds.get(fault),
        hang_after_s=float(hang_after) if hang_after else None,
    )
    is_odd = trainer.rank == 1
    if fault in feeds:
        print("steps:", sum(1 for _ in trainer.train()), flush=True)
        return
    if fault in ALONE:
        ALONE[fault](trainer, batch, plan)
        return
    for step in itertools.count():
        inputs = torch.full((8, 4), float(step))
        if step == ODD_STEP and is_odd:
            if fault == "loop":
                time.sleep(600)
            if fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "raise":
                raise ValueError("this sample is broken")
            if fault in ("save", "exit"):
                break
            if fault == "data":
                inputs[7, 3] += 1.0
        trainer.step(inputs, torch.zeros(8, 4))
        if step == 5:
            break
    if fault != "exit":
        trainer.save(f"{plan}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
