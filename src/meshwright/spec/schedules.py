"""The named schedules: a table of the properties that the planner, the simulator and the playground use.

A new schedule needs a row here and a function in `program.schedules` that writes its orders (`writes_orders`) or, if it
is asynchronous, its rules in `program.schedules.asynchronous`. The planner's bounds and the simulator's shortcuts for
equal pipelines follow from the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Stages on a rank: one; several, dealt in turn; two, counted from both ends, alone or with a mirrored pipeline.
StageLayout = Literal["single", "in turn", "v", "bidirectional"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFacts:
    """The properties of a named schedule.

    ``layout``: which stages a rank holds. ``in_flight``: how many microbatches of a stage are between their forward and
    the gradient of the stage's input: ``all``; the number of 1F1B (``1f1b``; with several stages on a rank, of
    interleaved 1F1B); or a number of its ``own``, which only the schedule's orders show. ``splits_backward``: gradients
    of weights are computed separately from gradients of inputs. ``is_asynchronous``: each microbatch is a minibatch
    with its own update, so weights change while other microbatches are in flight.
    """

    layout: StageLayout
    in_flight: Literal["all", "1f1b", "own"]
    splits_backward: bool = False
    is_asynchronous: bool = False


NAMED_SCHEDULES = {
    "gpipe": ScheduleFacts(layout="single", in_flight="all"),
    "1f1b": ScheduleFacts(layout="single", in_flight="1f1b"),
    "zb-h1": ScheduleFacts(layout="single", in_flight="1f1b", splits_backward=True),
    "zb-h2": ScheduleFacts(layout="single", in_flight="own", splits_backward=True),
    "interleaved": ScheduleFacts(layout="in turn", in_flight="1f1b"),
    "looped-bfs": ScheduleFacts(layout="in turn", in_flight="all"),
    "zb-v": ScheduleFacts(layout="v", in_flight="own", splits_backward=True),
    "dualpipe": ScheduleFacts(layout="bidirectional", in_flight="own", splits_backward=True),
    "dualpipe-v": ScheduleFacts(layout="v", in_flight="own", splits_backward=True),
    "pipedream": ScheduleFacts(layout="single", in_flight="own", is_asynchronous=True),
    "pipedream-vertical": ScheduleFacts(layout="single", in_flight="own", is_asynchronous=True),
    "pipedream-2bw": ScheduleFacts(layout="single", in_flight="own", is_asynchronous=True),
    "hetpipe": ScheduleFacts(layout="single", in_flight="own", is_asynchronous=True),
}


def layout_of(schedule: str) -> StageLayout:
    """Return which stages a rank holds under a schedule; a user's own schedule is planned with one stage per rank."""
    return NAMED_SCHEDULES[schedule].layout if schedule in NAMED_SCHEDULES else "single"


SCHEDULE_NAMES = tuple(NAMED_SCHEDULES)
ASYNCHRONOUS_SCHEDULES = tuple(name for name, facts in NAMED_SCHEDULES.items() if facts.is_asynchronous)
# Schedules that assign a number of stages to every rank in turn.
DEALT_IN_TURN = tuple(name for name, facts in NAMED_SCHEDULES.items() if facts.layout == "in turn")
# Synchronous schedules whose backwards are whole: a stage's last weight gradient is there when its backward ends.
WHOLE_BACKWARDS = tuple(
    name for name, facts in NAMED_SCHEDULES.items() if not facts.splits_backward and not facts.is_asynchronous
)
# One stage on every rank and whole backwards: the schedules for which slicings are searched.
BASIC_SCHEDULES = tuple(name for name in WHOLE_BACKWARDS if NAMED_SCHEDULES[name].layout == "single")
