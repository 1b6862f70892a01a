"""Run controllers (`meshwright.spec.control`) on real events: the policies that the simulator calls, unchanged.

deciding   the deciding rank: takes ends and timers as events, calls the controller, logs and dispatches its decisions
queues     the messages between ranks, and the clock
streams    every rank: executes the dispatched instructions, stream by stream, and reports their ends
replica    workers and parameter servers that train a module
"""

from meshwright.runtime.controlled.deciding import Decided
from meshwright.runtime.controlled.replica import Replica
from meshwright.runtime.controlled.streams import (
    DECIDING_RANK_FAILED,
    Abandoned,
    Actor,
    DispatchedWork,
    run_controlled,
)

__all__ = ["DECIDING_RANK_FAILED", "Abandoned", "Actor", "Decided", "DispatchedWork", "Replica", "run_controlled"]
