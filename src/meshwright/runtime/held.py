"""Replace the tensors that modules hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def replace_held(modules: Iterable[torch.nn.Module], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace parameters and buffers, each once, by the results of ``change``.

    A tensor that several modules hold stays one tensor. A parameter's substitute becomes a parameter with the same
    ``requires_grad``.
    """
    # Keeps the originals alive, so that no id is given to another tensor meanwhile.
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in [item for whole in modules for item in whole.modules()]:
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is None:
                    continue
                if id(value) not in made:
                    found = change(value)
                    if isinstance(value, torch.nn.Parameter) and not isinstance(found, torch.nn.Parameter):
                        found = torch.nn.Parameter(found, requires_grad=value.requires_grad)
                    made[id(value)] = value, found
                    # A module may occur in several places, where its substitutes are met again.
                    made[id(found)] = found, found
                table[name] = made[id(value)][1]  # type: ignore[assignment]
