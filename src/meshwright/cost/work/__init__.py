"""The work of ops in forward, backward and gradient accumulation: FLOPs, bytes and kernels."""

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
