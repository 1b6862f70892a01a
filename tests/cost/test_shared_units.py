"""Units of shared parameters in a walk: what is gathered when, and what becomes of gradients, by hand."""

import numpy as np
import pytest

from meshwright.cost.memory import SharedUnit, SharedUnits
from meshwright.cost.memory.ledger import Ledger
from meshwright.cost.memory.shared_units import UnitMemory
from meshwright.spec.memory import GRADIENTS, PARAMETERS, WORKSPACE

# Two ops each, of 10, 20 and 30 bytes of parameters, with as many of gradients; two replicas.
UNITS = tuple(
    SharedUnit(
        first=2 * place,
        last=2 * place + 1,
        parameters=(place,),
        gathered_bytes=size,
        scattered_bytes=size,
        own_bytes=size // 2,
    )
    for place, size in enumerate((10, 20, 30))
)
ROOT = SharedUnit(first=0, last=5, parameters=(3,), gathered_bytes=4, scattered_bytes=4, own_bytes=2)


def units_of(device, *, stay_gathered=False):
    ledger = Ledger()
    return UnitMemory(SharedUnits(root=ROOT, units=UNITS, stay_gathered=stay_gathered), ledger, device), ledger


def levels(ledger, part):
    events = ledger.events()
    return np.cumsum(np.where(events.part == part, events.num_bytes, 0)).tolist()


@pytest.mark.parametrize(("device", "expected"), [("cpu", [10, 0, 20, 0, 30, 0]), ("cuda", [10, 30, 20, 50, 30, 0])])
def test_a_forward_gathers_a_unit_and_on_gpus_the_next_one(device, expected):
    units, ledger = units_of(device)
    for op in range(6):
        units.before_forward(op)
        units.after_forward(op)
    assert levels(ledger, PARAMETERS) == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_backward_gathers_ahead_and_scatters_behind(device):
    units, ledger = units_of(device)
    for _ in range(2):
        units.begin_backward()
        for op in reversed(range(6)):
            units.before_backward(op)
            if unit := units.unit_done(op):
                units.copy_in(unit)
                units.scatter(unit)
        units.copy_in(units.root)
        units.scatter(units.root)
        units.end_backward()
    assert max(levels(ledger, PARAMETERS)) == 50
    assert levels(ledger, PARAMETERS)[-1] == 0
    # The inputs of scatters one after the other; in the second backward what is added to the own part, besides.
    work = levels(ledger, WORKSPACE)
    assert max(work[: len(work) // 2]) == 30
    assert max(work) == 30 + 15
    assert work[-1] == 0
    assert levels(ledger, GRADIENTS)[-1] == (10 + 20 + 30 + 4) // 2
    units.end_step()
    assert levels(ledger, GRADIENTS)[-1] == 0


def test_what_stays_gathered_is_not_gathered_again():
    units, ledger = units_of("cuda", stay_gathered=True)
    units.before_forward(0)
    units.begin_backward()
    units.before_backward(5)
    assert ledger.num_events == 0
    assert units.unit_done(4) is UNITS[2]
    assert units.unit_done(5) is None
