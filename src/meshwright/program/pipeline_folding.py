"""Fold a plan (`Fold`): of several replicas that do the same at the same time, simulate only one.

A plan whose stages have R replicas each, with microbatch m on replica m mod R, consists of R pipelines: pipeline r has
replica r of every stage. The pipelines interact only in gradient sums. If some are identical, they form a class, and a
smaller plan with one pipeline per class represents all of them (`Fold.plan`, K < R pipelines). Pipeline k of the
smaller plan has the stages, the order and the number of microbatches of pipeline ``replicas[k]`` of the whole plan;
its microbatch k + j K is microbatch ``replicas[k]`` + j R of the whole plan. Gradient sums have the ranks and bytes of
the whole plan, but only the remaining pipelines issue them. `simulator.pipeline_alike` decides which pipelines are
identical.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.program.buckets import Bucket, gradient_buckets
from meshwright.spec import Graph, Plan

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """A plan ``whole`` with identical pipelines, and the smaller ``plan`` that has one pipeline of each class.

    ``classes`` has the class of each pipeline of ``whole``, numbered from 0 in order of first appearance; all pipelines
    of a class have the same number of microbatches. ``ranks[i]`` is the rank in ``whole`` of rank i of ``plan``.
    """

    whole: Plan
    classes: tuple[int, ...]
    plan: Plan = field(init=False, repr=False, compare=False)
    ranks: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        whole, chosen = self.whole, self.replicas
        kept = sorted({stage.ranks[replica] for stage in whole.stages for replica in chosen})
        number = {rank: index for index, rank in enumerate(kept)}
        stages = tuple(
            replace(stage, ranks=tuple(number[stage.ranks[replica]] for replica in chosen)) for stage in whole.stages
        )
        count, rest = divmod(whole.num_microbatches, len(self.classes))
        num_microbatches = count * len(chosen) + sum(replica < rest for replica in chosen)
        workload = replace(whole.workload, global_batch=whole.microbatch_size * num_microbatches)
        plan = replace(whole, stages=stages, num_microbatches=num_microbatches, workload=workload)
        object.__setattr__(self, "plan", plan)
        object.__setattr__(self, "ranks", tuple(kept))

    @property
    def replicas(self) -> tuple[int, ...]:
        """The pipelines of ``whole`` that ``plan`` keeps: the first of each class, ascending."""
        return tuple(self.classes.index(kind) for kind in range(max(self.classes) + 1))

    def representatives(self) -> Ids:
        """Return the rank of ``plan`` that represents each rank of ``whole``, shape (ranks of whole,)."""
        ranks = np.array([stage.ranks for stage in self.whole.stages])
        stands = np.array([stage.ranks for stage in self.plan.stages])[:, list(self.classes)]
        found = np.empty(self.whole.num_ranks, np.int64)
        found[ranks] = stands
        return found

    def members(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of ``whole`` that each rank of ``plan`` represents, ascending."""
        stands = self.representatives()
        order = np.argsort(stands, kind="stable")
        parts = np.split(order, np.cumsum(np.bincount(stands))[:-1])
        return tuple(tuple(part.tolist()) for part in parts)


@lru_cache(maxsize=64)
def folded_buckets(fold: Fold, graph: Graph) -> tuple[Bucket, ...]:
    """Return the buckets of the whole plan, each with those ranks of the smaller plan that hold it."""
    number = {rank: index for index, rank in enumerate(fold.ranks)}
    of_groups: dict[tuple[int, ...], tuple[int, ...]] = {}
    buckets = gradient_buckets(graph, fold.whole)
    for ranks in {bucket.ranks for bucket in buckets}:
        of_groups[ranks] = tuple(number[rank] for rank in ranks if rank in number)
    return tuple(replace(bucket, ranks=of_groups[bucket.ranks]) for bucket in buckets)
