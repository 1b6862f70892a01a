"""A user's own script: own model, loss, optimizer, DataLoader; four lines of Meshwright. Started with torchrun."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright


def main(plan: str, out: str, data_seed: int, **options: int) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    generator = torch.Generator().manual_seed(data_seed)
    x = torch.randn(64, 8, generator=generator)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=16, shuffle=True, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    # Under a policy, the rank of the parameters has to follow the schedule step by step.
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8 if options else 1.0)
    batch = next(iter(loader))
    trainer = meshwright.prepare(model, nn.functional.cross_entropy, optimizer, batch, plan=plan, **options)
    for _ in range(5):
        for inputs, targets in loader:
            value = trainer.step(inputs, targets)
            scheduler.step()
    trainer.save(out)
    if trainer.rank == 0:
        print(f"last loss {value:.6f}")


if __name__ == "__main__":
    # A plan with an exchange policy also needs the number of steps: five epochs of four batches.
    options = {"num_steps": 20} if "--policy" in sys.argv else {}
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), **options)
