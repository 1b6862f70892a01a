"""Rewrite a model for the planner (``plan --rewrite``).

A plan whose ``rewritten`` names a kind of device is for a graph that was rewritten before planning, at the plan's
microbatch size, with costs from the datasheet of that kind of device. The result does not depend on the machine that
rewrites, or on its speed. So every program that uses the plan derives the same graph from the model; the graph's hash
in the plan confirms that.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch._subclasses.fake_tensor import FakeTensor

from meshwright.capture import capture_model, flatten_batch
from meshwright.cost import CostModel
from meshwright.rewrite.fx.captured import Rewritten, read_captured
from meshwright.rewrite.matching import SaturationLimits
from meshwright.rewrite.search.call_costs import CallCosts
from meshwright.rewrite.search.graph_search import GraphSpace
from meshwright.rewrite.search.ruleset import shipped_rules
from meshwright.rewrite.written import check_found, write_found
from meshwright.spec import Cluster, DeviceKind, Plan, PlanError, load_cluster

if TYPE_CHECKING:
    from meshwright.zoo import ModelSource

# Limited by rounds and operators only: a time limit would give every machine another graph.
_LIMITS = SaturationLimits(rounds=4, nodes=4_000, seconds=math.inf)
_CHOICE_S = 120.0


class RewriteTarget(NamedTuple):
    """The kind of device for which a model is rewritten, and the cluster that has it."""

    cluster: Cluster
    kind: DeviceKind


def target_of(plan: Plan) -> RewriteTarget | None:
    """Return the target for which a plan's graph was rewritten; None if it was not rewritten.

    Raises PlanError if the plan's cluster lacks that kind of device.
    """
    if not plan.rewritten:
        return None
    cluster = load_cluster(plan.cluster)
    for kind in cluster.device_kinds:
        if kind.name == plan.rewritten:
            return RewriteTarget(cluster, kind)
    raise PlanError(
        f"The plan's graph was rewritten for {plan.rewritten!r}, but the cluster {plan.cluster!r} has devices of the "
        f"kinds {[kind.name for kind in cluster.device_kinds]}. Plan again for this cluster."
    )


def rewrite_source(source: ModelSource, target: RewriteTarget, mode: Literal["training", "inference"]) -> ModelSource:
    """Return the model as the equivalent graph with the lowest predicted time; ``source`` itself if none is cheaper.

    With real weights and inputs, the graphs are checked to be equal in float64, including gradients in training; with
    fake tensors, nothing is computed. Raises CaptureError for a model that cannot be captured, RewriteError for a model
    that cannot be rewritten or whose rewritten graph is not equal.
    """
    training = mode == "training"
    captured = capture_model(source.model, source.inputs, mode=mode, verify=False, needs_loss=False)
    read = read_captured(captured, source.inputs)
    space = GraphSpace(read.terms, read.effects, frozen=not training)
    grown = space.grow(shipped_rules(), _LIMITS)
    costs = CallCosts(CostModel(cluster=target.cluster), target.kind, training=training)
    costs.estimate(space.calls())
    found = space.choose(costs, grown, limit_s=_CHOICE_S)
    if found.after_s >= found.before_s:
        return source
    graph = write_found(found, read, training=training)
    tensors = flatten_batch(captured, source.inputs)
    if not any(isinstance(tensor, FakeTensor) for tensor in (*tensors, *source.model.parameters())):
        check_found(found, graph, read, captured, tensors, training=training)
    return replace(source, model=Rewritten(graph, captured, [x.shape for x in tensors], training=training))
