"""What ``meshwright plan`` lets plans choose among: the whole space, less what options restrict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.spec.offload import ON_DEVICE, read_offload
from meshwright.spec.plan import BASIC_SCHEDULES
from meshwright.spec.sharding import read_placement

if TYPE_CHECKING:
    from meshwright.cli.plan.request import PlanRequest
    from meshwright.planner import Choices
    from meshwright.spec import Graph, Workload


def read_choices(request: PlanRequest, graph: Graph, workload: Workload, counts: tuple[int, ...]) -> Choices:
    """What plans may choose among: the whole space if the method covers it, less what options exclude."""
    from meshwright.planner import whole_space
    from meshwright.planner.adoption import DEFAULT_CHUNKS
    from meshwright.planner.methods import OPEN_METHODS

    is_open = request.method in OPEN_METHODS and not closes_space(request)
    # Given values, and the defaults of methods that do not cover the whole space.
    choices: dict[str, tuple[Any, Any]] = {
        "tensor": (request.tensor, (1,)),
        "sequence_parallel": (request.sequence_parallel, False),
        "context": (request.context, (1,)),
        "expert": (request.expert, (1,)),
        "zero": (request.zero, (0,)),
        "shard_sizes": (request.shard, (0,)),
        "recompute": (request.recompute, ("none",)),
        "offload": (None if request.offload is None else (read_offload(request.offload),), (ON_DEVICE,)),
        "schedules": (request.schedule, BASIC_SCHEDULES),
        "num_chunks": (None if request.virtual_stages is None else (request.virtual_stages,), (DEFAULT_CHUNKS,)),
    }
    # A user's order of gradients applies only to plain sums among replicas.
    closed = () if request.exchange is None else ("tensor", "context", "expert", "zero")
    chosen: dict[str, Any] = {}
    for name, (given, usual) in choices.items():
        # An empty list means "not given"; the False of --no-sequence-parallel is given.
        is_given = given not in (None, [], ())
        chosen[name] = given if is_given else None if is_open and name not in closed else usual
    return whole_space(
        graph,
        request.machine,
        workload,
        compiled=request.compiled,
        placements=tuple(map(read_placement, request.placement or ())),
        num_devices=counts,
        num_stages=() if request.stages is None else (request.stages,),
        microbatch_sizes=request.microbatch_size or (),
        **chosen,
    )


def closes_space(request: PlanRequest) -> bool:
    """Whether a named schedule lacks bounds in the grid, so that only what options name is searched."""
    from meshwright.planner.methods import OPEN_METHODS
    from meshwright.planner.methods.grid.cover import FLIGHTS

    return request.method in OPEN_METHODS and not set(request.schedule or ()) <= {*FLIGHTS}


def remark_on_schedules() -> str:
    """The explanation of `closes_space` for people."""
    from meshwright.planner.methods.grid.cover import FLIGHTS

    return (
        f"With other schedules than {', '.join(FLIGHTS)} only what options name is searched: --tensor, --zero, "
        "--recompute and the like."
    )
