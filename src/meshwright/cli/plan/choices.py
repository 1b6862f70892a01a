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
    """What plans may choose among: the whole space where the method covers it, less what options restrict."""
    from meshwright.planner import whole_space
    from meshwright.planner.adoption import DEFAULT_CHUNKS
    from meshwright.planner.methods import OPEN_METHODS
    from meshwright.planner.methods.grid.cover import FLIGHTS

    schedules = request.schedule
    is_open = request.method in OPEN_METHODS and set(schedules or FLIGHTS) <= {*FLIGHTS}
    # Other methods have spaces of their own.
    closed: dict[str, Any] = {
        "tensor": (1,),
        "sequence_parallel": False,
        "context": (1,),
        "expert": (1,),
        "zero": (0,),
        "shard_sizes": (0,),
        "recompute": ("none",),
        "offload": (ON_DEVICE,),
        "schedules": BASIC_SCHEDULES,
        "num_chunks": (DEFAULT_CHUNKS,),
    }
    given: dict[str, Any] = {
        "tensor": request.tensor,
        "sequence_parallel": request.sequence_parallel,
        "context": request.context,
        "expert": request.expert,
        "zero": request.zero,
        "shard_sizes": request.shard,
        "recompute": request.recompute,
        "offload": None if request.offload is None else (read_offload(request.offload),),
        "schedules": schedules,
        "num_chunks": None if request.virtual_stages is None else (request.virtual_stages,),
    }
    if request.exchange is not None:
        # An own order is one of plain sums of gradients among replicas.
        given |= {name: given[name] or closed[name] for name in ("tensor", "context", "expert", "zero")}
    # An empty list is not given; --no-sequence-parallel is.
    chosen: dict[str, Any] = {
        name: value if value or value is False else None if is_open else closed[name] for name, value in given.items()
    }
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
