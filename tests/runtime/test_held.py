"""Tensors that take the place of what modules hold: each once, parameters as parameters."""

import torch
from torch import nn

from meshwright.runtime.local_models import replace_held


def test_what_several_modules_hold_stays_one_and_parameters_stay_parameters():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    second.register_buffer("count", torch.zeros(3))
    calls = []

    def halve(value):
        calls.append(value)
        return value.detach().to(torch.bfloat16)

    # One of them stands in two places.
    replace_held([nn.Sequential(first, second), second], halve)
    assert first.weight is second.weight
    assert len(calls) == 4
    assert {item.dtype for item in (*first.parameters(), *second.parameters(), second.count)} == {torch.bfloat16}
    assert [item.requires_grad for item in (first.weight, first.bias, second.bias)] == [True, True, False]
    assert all(isinstance(item, nn.Parameter) for item in (first.weight, second.bias))
    assert not isinstance(second.count, nn.Parameter)


def test_what_is_left_stays_the_same_object():
    module = nn.Linear(2, 2)
    before = list(module.parameters())
    replace_held([module], lambda value: value)
    assert all(one is other for one, other in zip(before, module.parameters(), strict=True))
