"""Weights of several versions: what a forward read stays for its backward, and memory is moved, not copied."""

import pytest
import torch
from torch import nn

from meshwright.runtime.versions import VersionedPart
from meshwright.spec import ProgramError


class Shared(nn.Module):
    """A trained, a frozen, and a buffer that counts calls."""

    def __init__(self):
        super().__init__()
        self.trained = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.frozen = nn.Parameter(torch.tensor([5.0, 7.0]), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return (x * self.trained * self.trained * self.frozen,)


@pytest.fixture
def part():
    return VersionedPart(Shared())


@pytest.fixture
def module(part):
    return part._part


def update(part, module):
    with torch.no_grad():
        module.trained -= 0.1 * module.trained.grad
    module.trained.grad = None
    part.updated()


def backward(part, version, outputs):
    outputs[0].sum().backward()
    part.went_back(version)


def test_a_backward_uses_the_version_of_its_forward(part, module):
    x = torch.ones(2)
    first, second = part(0, x), part(0, x)
    backward(part, 0, first)
    part.stash(0)
    update(part, module)
    assert not torch.equal(module.trained, torch.tensor([2.0, 3.0]))
    backward(part, 0, second)
    assert torch.equal(module.trained.grad, 2 * torch.tensor([2.0, 3.0]) * module.frozen)


def test_older_and_newest_versions_are_read_beside_each_other(part, module):
    x = torch.ones(2)
    backward(part, 0, part(0, x))
    part.stash(0)
    update(part, module)
    old, new = part(0, x)[0], part(1, x)[0]
    assert torch.equal(old, torch.tensor([4.0, 9.0]) * module.frozen)
    assert torch.equal(new, module.trained**2 * module.frozen)
    assert module.calls == 3


def test_only_trained_weights_are_kept_and_their_memory_comes_back(part, module):
    x, seen = torch.ones(2), set()
    for version in range(6):
        backward(part, version, part(version, x))
        seen.add(module.trained.data_ptr())
        part.stash(version)
        update(part, module)
        part.drop(version)
        assert part.num_sets == 2
    assert len(seen) == 2, "the optimizer goes back and forth between two pieces of memory"
    assert not part._kept


def test_an_update_under_a_microbatch_is_refused(part, module):
    part(0, torch.ones(2))
    module.trained.grad = torch.ones(2)
    with pytest.raises(ProgramError, match="updated while 1 microbatches were between"):
        update(part, module)


def test_versions_that_are_not_there_are_refused(part):
    with pytest.raises(ProgramError, match=r"Version 1 of the weights is needed; available are \[0\]"):
        part(1, torch.ones(2))
    with pytest.raises(ProgramError, match="Version 3 of the weights cannot be kept; expected the newest"):
        part.stash(3)
