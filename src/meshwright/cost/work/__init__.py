"""Work of ops: FLOPs, bytes, kernels, and gradients of their backward; counted once, for all costs."""

from meshwright.cost.work.amounts import Amount
from meshwright.cost.work.calls import key_in, relatives
from meshwright.cost.work.count import OpWork, read_work
from meshwright.cost.work.operators import Family, WorkRow, find_operator, name_in, operators
from meshwright.cost.work.products import ATTENTION_BACKWARD

__all__ = [
    "ATTENTION_BACKWARD",
    "Amount",
    "Family",
    "OpWork",
    "WorkRow",
    "find_operator",
    "key_in",
    "name_in",
    "operators",
    "read_work",
    "relatives",
]
