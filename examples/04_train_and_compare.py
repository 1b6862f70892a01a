"""04  Your own training loop on two processes, and the prediction compared with the measurement.

    python examples/04_train_and_compare.py

Own model, loss, optimizer, DataLoader and loop: Meshwright is four lines of `train`. It can be started by itself:

    meshwright plan examples/my_model.py:build --cluster 2xcpu --batch 32 --out plan.json
    torchrun --standalone --nproc-per-node 2 examples/04_train_and_compare.py plan.json
"""

import subprocess
import sys
from pathlib import Path

import torch
from my_model import Classifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright  # 1
from meshwright.spec import write_document

HERE = Path(__file__).resolve().parent


def train(plan: str) -> None:
    """What each process does."""
    torch.manual_seed(0)  # the same weights and the same batches on every rank
    model = Classifier()
    x = torch.randn(1024, 16)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    trainer = meshwright.prepare(model, nn.functional.cross_entropy, optimizer, next(iter(loader)), plan=plan)  # 2
    for epoch in range(3):
        if epoch == 2:
            trainer.record()  # every span of the last epoch
        for inputs, targets in loader:
            loss = trainer.step(inputs, targets)  # 3
        if trainer.rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}")
    trainer.save("model.pt")  # 4
    timeline = trainer.timeline()
    if timeline is not None:  # on rank 0
        write_document(timeline, "measured.json")


def main() -> None:
    """Plan, predict, train with that plan, compare. After `meshwright measure` the prediction would be closer."""
    model = f"{HERE / 'my_model.py'}:build"
    meshwright_("plan", model, "--cluster", "2xcpu", "--batch", "32", "--stages", "2", "-m", "8", "--out", "plan.json")
    meshwright_("simulate", "plan.json", "--out", "predicted.json")
    run("torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, "plan.json")
    meshwright_("compare", "predicted.json", "measured.json", "--trace", "both.trace.json")


def meshwright_(*arguments: str) -> None:
    run("meshwright", *arguments)


def run(module: str, *arguments: str) -> None:
    print("\n--", module, *arguments, flush=True)
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1])
    else:
        main()
