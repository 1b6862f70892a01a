"""What torch's optimizers really run, counted while they run."""

import pytest

from meshwright.cost.optimizers import _ACCESSES, _FUSED_ACCESSES
from meshwright.spec import Optimizer

torch = pytest.importorskip("torch")
dispatch = pytest.importorskip("torch.utils._python_dispatch")
pytree = pytest.importorskip("torch.utils._pytree")

ELEMENTS = 1000


class Counter(dispatch.TorchDispatchMode):
    """Arrays of a parameter's size that each operator reads and writes."""

    def __init__(self):
        super().__init__()
        self.operators, self.accesses, self.arrays = [], [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        read = [item for item in pytree.tree_leaves((args, kwargs)) if self.counts(item)]
        written = [item for item in pytree.tree_leaves(out) if self.counts(item)]
        if read or written:
            self.operators.append(func.__name__)
            self.accesses.append(len({item.data_ptr() for item in read}) + len({item.data_ptr() for item in written}))
            self.arrays |= {item.data_ptr() for item in (*read, *written)}
        return out

    def counts(self, item):
        return isinstance(item, torch.Tensor) and item.numel() == ELEMENTS


def step(optimizer, **settings):
    """What the second step over one parameter runs."""
    parameter = torch.rand(ELEMENTS, requires_grad=True)
    if optimizer.kind == "adamw":
        stepper = torch.optim.AdamW([parameter], **settings)
    else:
        stepper = torch.optim.SGD([parameter], lr=0.1, momentum=0.9 if optimizer.momentum else 0.0, **settings)
    for _ in range(2):
        parameter.grad = torch.rand(ELEMENTS)
        with Counter() as counter:
            stepper.step()
    return counter


OPTIMIZERS = [Optimizer(kind="adamw"), Optimizer(kind="sgd"), Optimizer(kind="sgd", momentum=True)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_one_after_the_other_every_operation_is_a_kernel(optimizer):
    assert tuple(step(optimizer, foreach=False).accesses) == _ACCESSES[optimizer.name]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_on_cpus_that_is_the_default(optimizer):
    assert step(optimizer).operators == step(optimizer, foreach=False).operators


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_all_at_once_it_is_the_same_operations(optimizer):
    operators = step(optimizer, foreach=True).operators
    assert all(name.startswith("_foreach_") for name in operators)
    assert len(operators) == len(_ACCESSES[optimizer.name])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_fused_it_is_one_kernel_over_parameters_gradients_and_states(optimizer):
    counter = step(optimizer, fused=True)
    assert len(counter.operators) == 1
    arrays = 2 + optimizer.num_states
    assert len(counter.arrays) == arrays
    assert _FUSED_ACCESSES[optimizer.name] == arrays + (arrays - 1)  # all are read, all but the gradient written
