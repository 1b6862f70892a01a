"""Tiny sources of every family, as tests want them: small batches, float64, no parameter at zero."""

from dataclasses import replace

import torch

from meshwright.zoo import load_model, zoo_names

TINY = tuple(name for name in zoo_names() if name.endswith("-tiny"))


def small(name, batch_size=3, stirred=True):
    """A tiny source in float64; ``stirred``: noise on what starts at zero, so that gradients reach everything."""
    source = load_model(name, batch_size=batch_size)
    model = source.model.double()
    if stirred:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.02 * noise)
    return replace(source, model=model, inputs=as_double(source.inputs), targets=as_double(source.targets))


def as_double(batch):
    """The batch with floating tensors in float64."""
    return tuple(item.double() if item.is_floating_point() else item for item in batch)


def losses_of_steps(source, num_steps, learning_rate):
    """Losses before each of some steps of AdamW on the source's one batch."""
    optimizer = torch.optim.AdamW([p for p in source.model.parameters() if p.requires_grad], lr=learning_rate)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = source.compute_loss()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def rows(batch, start, stop):
    """Some samples of a batch."""
    return tuple(item[start:stop] for item in batch)
