"""Work of ops: FLOPs, bytes, kernels, and gradients of their backward; counted once, for all costs."""

from meshwright.cost.work.op_calls import Amount, Family, WorkRow, find_operator, key_in, name_in, operators, relatives
from meshwright.cost.work.work_count import ATTENTION_BACKWARD, OpWork, read_work

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
