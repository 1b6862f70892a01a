"""Every allocation of a training step of a whole graph on one device, op by op, as eager torch makes them.

    forward     an op allocates its outputs and what it keeps for its backward; a value is freed after its last use
                unless an op saved it
    backward    ops in reverse: each allocates the gradients of its inputs (`backward`), then what it saved and the
                gradients of its outputs are freed; a further gradient is added in place if nothing else holds the
                existing one
    step        states are made at the first step. AdamW that loops over the parameters one by one needs two more
                tensors of a parameter's size (torch/optim/adam.py, _single_tensor_adam: the root, its quotient), over
                all at once one more for each (_multi_tensor_adam: the roots); a fused one, and SGD, need none
    recompute   ops of a range keep only what the range reads, and results of those that `Graph.keeps` names; before
                its backward the others are recomputed, up to the last value that was saved (torch/utils/checkpoint.py,
                non-reentrant; create_selective_checkpoint_contexts)

Gradients of parameters are freed after the optimizer's step (set_to_none) and accumulate over microbatches. Sizes are
exact for the dtypes of the workload; memory that libraries allocate internally is not included. Checked against torch's
own account of its allocations in `meshwright.validation.memory`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.cost.memory.sizes import has_own_backward
from meshwright.cost.memory.walk import StageWalk, default_loop
from meshwright.spec import GraphError, slice_graph

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from meshwright.cost.memory.backward import Backend
    from meshwright.cost.memory.ledger import MemoryEvents
    from meshwright.cost.memory.shared_units import SharedUnits
    from meshwright.cost.memory.walk import OptimizerLoop
    from meshwright.spec import Graph, StageSlice, Workload

# The first step makes the optimizer's states, the second is like all later ones.
_NUM_STEPS = 2


def trace_step(
    graph: Graph,
    workload: Workload,
    *,
    num_microbatches: int = 1,
    device: Backend = "cpu",
    loop: OptimizerLoop | None = None,
) -> MemoryEvents:
    """Events from building the model to the end of its second step.

    Args:
        graph: A graph for training, with its loss.
        workload: Optimizer, precision and the samples of a step, divided into microbatches.
        num_microbatches: Their number in a step; gradients accumulate.
        device: The device type, which determines workspaces of libraries.
        loop: The optimizer's loop over the parameters; by default one by one on CPUs, as in torch, else fused.

    Raises GraphError for a graph without loss or with a backward of its own, for a batch that it does not describe,
    and for microbatches of unequal size.
    """
    if workload.global_batch % num_microbatches:
        raise GraphError(
            f"A step of {workload.global_batch} samples was to be made of {num_microbatches} microbatches; expected a "
            "number that divides it. Choose one."
        )
    order = [(is_backward, index) for index in range(num_microbatches) for is_backward in (False, True)]
    stage = slice_graph(graph, [(0, len(graph.layers))])[0]
    size = workload.global_batch // num_microbatches
    return trace_stage(graph, stage, workload, size, order, device=device, loop=loop)


def trace_stage(
    graph: Graph,
    stage: StageSlice,
    workload: Workload,
    batch_size: int,
    order: Sequence[tuple[bool, int]],
    *,
    device: Backend = "cpu",
    loop: OptimizerLoop | None = None,
    bucket_bytes: int = 0,
    bucketed: Set[int] = frozenset(),
    num_inputs: int | None = None,
    activations_away: bool = False,
    shared: SharedUnits | None = None,
    state_parts: int = 1,
) -> MemoryEvents:
    """Events of one rank's stage over two steps, for microbatches of ``batch_size`` samples.

    Args:
        graph: A graph for training, with its loss.
        stage: The part of it that the rank computes.
        workload: Optimizer and precision.
        batch_size: Samples of a microbatch.
        order: The computations of a step: (whether it is a backward, the microbatch).
        device: As for `trace_step`.
        loop: As for `trace_step`.
        bucket_bytes: Bytes of the buffers in which gradients are reduced.
        bucketed: Parameters whose gradients are in buckets.
        num_inputs: Microbatches of a step, whose inputs exist all the time (default: those of the order).
        activations_away: Whether activations are in host memory until the backward (`away`).
        shared: Units of sharded parameters; static memory is counted as if they were whole.
        state_parts: Replicas over which the optimizer step and its states are sharded.

    Raises GraphError as `trace_step` does.
    """
    if not graph.has_loss or graph.mode != "training" or has_own_backward(graph):
        raise GraphError(
            f"Graph {graph.name!r} has no loss, is for inference, or holds its own backward; expected a forward that "
            "ends in a loss. Capture the model with its loss, for training."
        )
    loop = loop or default_loop(device)
    walk = StageWalk(graph, stage, workload, batch_size, device, loop, bucketed, shared, activations_away, state_parts)
    walk.build(bucket_bytes, num_inputs or len({microbatch for _, microbatch in order}))
    for index in range(_NUM_STEPS):
        walk.compute(order)
        walk.optimize(first=index == 0)
    return walk.ledger.events()
