"""Facts of a plan that exports need: a regular grid of pipelines, the blocks of stages, the sizes of the model.

Other systems lay a plan out as ``stages x replicas`` with the same replicas in every stage, each replica computing the
same number of microbatches; a plan without such a grid cannot be expressed in their settings at all. A replica of a
stage is a device, or the team of devices that a rank of a split plan represents.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from meshwright.report.settings.launch_scripts import ranks_per_node, uses_cpus
from meshwright.report.settings.settings import RecomputeSplit, find_again, refuse_unknown
from meshwright.spec import Cluster, Graph, Plan, PlanError, format_count
from meshwright.spec.codec import document_kind
from meshwright.spec.parsing import read_data

RankOrder = Literal["stage-major", "replica-major", "other"]
# Families whose sizes are exported, and all that are built of transformer blocks.
DECODERS = ("gpt", "llama")
TRANSFORMERS = (*DECODERS, "bert", "t5", "mixtral")
_NUMBERED = re.compile(r"(?P<stem>.+)\.(?P<index>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """One stage in blocks. ``has_entry``: with the layer before all blocks; ``has_exit``: with the layer after all."""

    has_entry: bool
    first_block: int
    num_blocks: int
    has_exit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RegularPlan:
    """A plan with the same number of replicas in every stage, and its facts for exports.

    ``stages``: the stages in blocks; None if the model's layers are not one layer, a row of blocks and one layer, or if
    the graph is unknown. ``again``: what is recomputed in the backward pass. ``family``: that of a shipped model or a
    shape file (``gpt``, ``resnet``); None for any other model. ``shape``: the sizes of a decoder, under the names of
    the shape file.
    """

    plan: Plan
    num_nodes: int
    num_stages: int
    num_replicas: int
    rank_order: RankOrder
    layer_names: tuple[str, ...]
    stages: tuple[StageParts, ...] | None
    again: RecomputeSplit
    family: str | None
    shape: dict[str, Any] | None
    is_cpu: bool

    @property
    def microbatches_per_replica(self) -> int:
        """Microbatches that one pipeline computes in a step."""
        return self.plan.num_microbatches // self.num_replicas

    @property
    def zero(self) -> int:
        """The ZeRO stage, 0 to 3 (`GradientExchange.zero`); 0 for a single replica."""
        return self.plan.exchange.zero if self.num_replicas > 1 else 0

    @property
    def shard_size(self) -> int:
        """Number of replicas that shard states among each other; 1 if nothing is sharded."""
        return self.plan.exchange.num_parts(self.num_replicas)

    @property
    def num_groups(self) -> int:
        """Number of groups of replicas that shard states among each other."""
        return self.num_replicas // self.shard_size

    @property
    def is_hybrid(self) -> bool:
        """Whether replicas shard states in several groups."""
        return self.zero > 0 and self.num_groups > 1

    @property
    def num_with_samples(self) -> int:
        """Number of ranks with samples of their own: replicas, times the size of the expert axis."""
        return self.num_replicas * self.plan.sharding.expert

    @property
    def bucket_elements(self) -> int:
        """Number of gradient elements in a bucket."""
        return self.plan.exchange.bucket_bytes // self.plan.workload.numbers.gradient_bytes

    @property
    def is_even(self) -> bool:
        """Whether all stages have the same number of blocks."""
        return self.stages is not None and len({stage.num_blocks for stage in self.stages}) == 1

    @property
    def num_blocks(self) -> int | None:
        """Number of blocks of the whole model; None if not known."""
        if self.stages is not None:
            return sum(stage.num_blocks for stage in self.stages)
        return self.shape["num_layers"] if self.shape else None


def gather_facts(plan: Plan, cluster: Cluster, graph: Graph | None = None) -> RegularPlan:
    """Return the facts of a plan for exports. ``graph`` is needed for several stages, and for recompute.

    Raises PlanError for a plan that is not a regular grid, not for training, or larger than its cluster, and for a
    plan with settings that no export supports.
    """
    replicas = [len(stage.ranks) for stage in plan.stages]
    if plan.workload.kind != "training":
        raise PlanError("The plan is for inference; settings are written for systems that train. Plan for training.")
    refuse_unknown(plan)
    if len(set(replicas)) > 1:
        raise PlanError(
            f"The stages have {', '.join(map(str, replicas))} replicas; other systems know only pipelines with the "
            "same number in every stage, so this plan cannot be expressed. Run it with `meshwright run`, or choose a "
            "plan with equal replicas (in the list of `meshwright plan`, one number under `dp`)."
        )
    if plan.num_microbatches % replicas[0] or any(len(set(stage.shares)) > 1 for stage in plan.stages):
        raise PlanError(
            f"{plan.num_microbatches} microbatches are divided unequally among {replicas[0]} replicas; other "
            "systems give every replica the same number, so this plan cannot be expressed. Choose a number of "
            f"microbatches that {replicas[0]} divides (`meshwright plan -m`)."
        )
    family, sizes = read_shape(plan.model)
    layer_names = () if graph is None else tuple(layer.name for layer in graph.layers)
    return RegularPlan(
        plan=plan,
        num_nodes=len(ranks_per_node(plan, cluster)),
        num_stages=len(plan.stages),
        num_replicas=replicas[0],
        rank_order=_rank_order(plan),
        layer_names=layer_names,
        stages=_stage_parts(plan, layer_names),
        again=find_again(plan, graph),
        family=family,
        shape={**sizes, **dict(plan.model_sizes)} if family in DECODERS else None,
        is_cpu=uses_cpus(plan, cluster),
    )


def read_shape(model: str) -> tuple[str | None, dict[str, Any]]:
    """Return family and sizes of a shipped model, or of a shape file, without loading torch.

    The files belong to `meshwright.zoo`; their keys are its shapes' fields. Returns (None, {}) for any other model.
    """
    if model.endswith(".toml"):
        data = read_data(Path(model).expanduser())
    else:
        file = resources.files("meshwright") / "zoo" / "shapes" / f"{model}.toml"
        if not re.fullmatch(r"[\w.-]+", model) or not file.is_file():
            return None, {}
        with resources.as_file(file) as path:
            data = read_data(path)
    kind = document_kind(data) or ""
    return (kind.removesuffix("shape"), data) if kind.endswith("shape") else (None, {})


def describe_stages(facts: RegularPlan) -> str:
    """Return the range of layers of each stage: ``0:17, 17:34``."""
    return ", ".join(f"{start}:{stop}" for start, stop in facts.plan.bounds)


def require_transformer(facts: RegularPlan, system: str) -> None:
    """Raise PlanError for a shipped model that is not a transformer; any other model may be one."""
    if facts.family is not None and facts.family not in TRANSFORMERS:
        raise PlanError(
            f"{system} trains transformers that it builds itself, and {facts.plan.model!r} is not one of them, so "
            f"this plan cannot be expressed. --as deepspeed can express it, and --as accelerate if it has a single "
            f"stage."
        )


def require_blocks(facts: RegularPlan, system: str) -> tuple[StageParts, ...]:
    """Return the stages in blocks. Raises PlanError if the layers do not form a row of blocks."""
    if facts.stages is None:
        names = ", ".join(facts.layer_names[:4])
        raise PlanError(
            f"{system} cuts pipelines between the equal blocks of a transformer; the {len(facts.layer_names)} layers "
            f"of {facts.plan.model!r} ({names}, ...) are not a row of blocks with one layer before and one after it, "
            f"so this plan of {format_count(facts.num_stages, 'stage')} cannot be expressed. A plan of one stage can "
            "(`meshwright plan --stages 1`)."
        )
    return facts.stages


def _rank_order(plan: Plan) -> RankOrder:
    ranks = [stage.ranks for stage in plan.stages]
    count = len(ranks[0])
    if all(stage == tuple(range(i * count, (i + 1) * count)) for i, stage in enumerate(ranks)):
        return "stage-major"
    if all(stage == tuple(range(i, plan.num_ranks, len(ranks))) for i, stage in enumerate(ranks)):
        return "replica-major"
    return "other"


def _stage_parts(plan: Plan, layer_names: tuple[str, ...]) -> tuple[StageParts, ...] | None:
    """Stages in blocks, for layers ``entry, stem.0, ..., stem.n-1, exit``."""
    found = [_NUMBERED.fullmatch(name) for name in layer_names[1:-1]]
    blocks = [match for match in found if match is not None]
    if not blocks or len(blocks) < len(found) or len(layer_names) != plan.stages[-1].stop:
        return None
    if len({match["stem"] for match in blocks}) > 1 or [int(match["index"]) for match in blocks] != [
        *range(len(blocks))
    ]:
        return None
    last = len(blocks)
    parts = []
    for start, stop in plan.bounds:
        first, end = max(start - 1, 0), min(stop - 1, last)
        parts.append(
            StageParts(
                has_entry=start == 0, first_block=first, num_blocks=max(end - first, 0), has_exit=stop == last + 2
            )
        )
    return tuple(parts)
