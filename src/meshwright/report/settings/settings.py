"""Settings: a file for another system, what the user has to fill in, and what the file cannot express.

Functions ``refuse_*`` and ``require_*`` raise for plans that an export cannot describe; `find_again` names a plan's
recompute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from meshwright.spec import (
    GradientExchange,
    Graph,
    Offload,
    Optimizer,
    Plan,
    PlanError,
    Recompute,
    Sharding,
    StagePlan,
    Workload,
    recompute_choices,
)
from meshwright.spec.offload import ON_DEVICE
from meshwright.spec.schedules import BASIC_SCHEDULES
from meshwright.spec.sharding import UNSHARDED

if TYPE_CHECKING:
    from meshwright.report.settings.plan_facts import RegularPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsaid:
    """A decision of the plan for which the other system has no setting, with the reason or what the system does."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A plan as settings of another system.

    ``values`` maps names of settings in that system to values. ``text`` is the content of the file (usually named
    ``file_name``), ``start`` the command that uses the file. ``version`` is the release whose names are used.
    ``fill_in``: what the user has to add. ``unsaid``: what the file cannot express. ``has_comments``: the text starts
    with the `notes` as comments.
    """

    system: str
    version: str
    file_name: str
    values: Mapping[str, Any]
    text: str
    start: str
    fill_in: tuple[str, ...]
    unsaid: tuple[Unsaid, ...]
    has_comments: bool = True


def notes(start: str, fill_in: Sequence[str], unsaid: Sequence[Unsaid]) -> list[str]:
    """Return lines on the use of a file: how to start, what to fill in, and what is not expressed."""
    lines = [f"Start: {start}"]
    lines += [f"Fill in: {item}" for item in fill_in]
    lines += [f"Not expressed: {item.what}: {item.reason}" for item in unsaid]
    return lines


def comment(lines: Sequence[str], mark: str = "# ") -> str:
    """Return each line as a comment of one line, even if a name in it contains line ends."""
    return "".join(f"{mark}{' '.join(line.split())}\n" for line in lines)


# Fields of a plan that every export writes, lists as not expressed, or refuses by itself. Fields without a default are
# written by all. A plan in which any other field differs from its default is refused, because settings without it would
# describe another plan.
SAID: dict[type, frozenset[str]] = {
    Plan: frozenset(
        {"workload", "schedule", "schedule_hash", "exchange", "sharding", "recompute", "keeps", "offload"}
        | {"model_sizes", "made_with"}
    ),
    StagePlan: frozenset(),
    Workload: frozenset({"kind", "precision", "optimizer"}),
    Optimizer: frozenset({"kind", "momentum"}),
    GradientExchange: frozenset({"bucket_bytes", "overlap", "zero", "shard_size"}),
    Sharding: frozenset({"tensor", "context", "expert", "sequence_parallel", "regather", "context_method"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeSplit:
    """What a plan recomputes in the backward pass.

    ``kind``: nothing; attention; op: blocks except costly ops (`spec.recompute`); layers: whole layers, with the
    indices ``layers`` (``is_full``: every block); ops: parts of layers.
    """

    kind: Literal["nothing", "attention", "op", "layers", "ops"] = "nothing"
    layers: tuple[int, ...] = ()
    is_full: bool = False

    def describe(self) -> str:
        """Return words for people: ``every block``, ``layers 1, 2, 3``."""
        if self.is_full:
            return "every block"
        words = {
            "nothing": "nothing",
            "attention": "attention",
            "op": "every block but for results of attention and products (create_selective_checkpoint_contexts)",
            "ops": "parts of layers",
        }
        return words.get(self.kind) or f"layers {', '.join(map(str, self.layers))}"


def unknown_choices(plan: Plan) -> tuple[str, ...]:
    """Return the settings of a plan that no export supports, as ``exchange.every_steps = 2``."""
    return tuple(dict.fromkeys(_unknown(plan, "")))


def _unknown(part: Any, place: str) -> Iterator[str]:
    for item in fields(part):
        value = getattr(part, item.name)
        for inner in value if isinstance(value, tuple) else (value,):
            if type(inner) in SAID:
                yield from _unknown(inner, f"{item.name}.")
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        if default is not MISSING and value != default and item.name not in SAID[type(part)]:
            yield f"{place}{item.name}" if is_dataclass(value) else f"{place}{item.name} = {value!r}"


def refuse_unknown(plan: Plan) -> None:
    """Raise PlanError for a plan with settings that no export supports."""
    exchange = replace(plan.exchange, zero=0, shard_size=0)
    plain = replace(plan, sharding=UNSHARDED, recompute=(), keeps=(), offload=ON_DEVICE, exchange=exchange)
    several = " with several stages on a rank" * plain.has_virtual_stages
    follows = several or not (plain.has_own_schedule or plain.schedule in BASIC_SCHEDULES)
    if wrong := plain.only_simulated or (f"follows the schedule {plain.schedule}{several}" if follows else ""):
        raise PlanError(
            f"The plan {wrong}; settings are written for {', '.join(BASIC_SCHEDULES)} and your own schedules, with one "
            "stage on every rank. Plan with such a schedule."
        )
    if unknown := unknown_choices(plan):
        raise PlanError(
            f"The plan has {', '.join(unknown)}, which settings of other systems cannot express, so "
            f"they would describe another plan. Plan without it."
        )


def moves_all(offload: Offload) -> bool:
    """Return whether parameters and optimizer states are both in host memory, as under FSDP2's CPUOffloadPolicy."""
    return offload == Offload(optimizer="host", parameters="host")


def refuse_offload(plan: Plan, system: str, knows: str) -> None:
    """Raise PlanError: ``system`` cannot offload as the plan does; ``knows`` says in words what the system can do."""
    raise PlanError(
        f"The plan keeps {plan.offload.describe()}; {system} {knows}. Plan with another --offload, or without."
    )


def find_again(plan: Plan, graph: Graph | None) -> RecomputeSplit:
    """Return what the plan recomputes, found from the ranges of ops in the plan and from the model's graph.

    Raises PlanError if the plan recomputes and no graph is given.
    """
    if not plan.recompute:
        return RecomputeSplit()
    if graph is None:
        raise PlanError(
            "The plan recomputes ranges of ops, whose meaning depends on the model's graph. Give the graph."
        )
    again = Recompute(tuple(sorted(plan.recompute)), tuple(sorted(plan.keeps)))
    chosen, choices = again.ranges, recompute_choices(graph)
    if again == choices["attention"]:
        return RecomputeSplit(kind="attention")
    if again.keeps:
        return RecomputeSplit(kind="op" if again == choices["op"] else "ops")
    place = {(layer.start, layer.stop): index for index, layer in enumerate(graph.layers)}
    if not set(chosen) <= set(place):
        return RecomputeSplit(kind="ops")
    return RecomputeSplit(kind="layers", layers=tuple(place[item] for item in chosen), is_full=again == choices["full"])


def describe_axes(sharding: Sharding) -> str:
    """Return the axes with their details, for a person who sets them up: ``context 2 (keys and values in a ring)``."""
    details = []
    if sharding.sequence_parallel:
        details.append(f"inputs of products {'gathered again in backward' if sharding.regather else 'kept whole'}")
    if sharding.context > 1:
        details.append(f"keys and values {'in a ring' if sharding.context_method == 'ring' else 'gathered'}")
    return sharding.describe() + (f" ({', '.join(details)})" if details else "")


def leading_blocks(facts: RegularPlan) -> int | None:
    """Return N if the plan recomputes exactly the first N blocks of every stage (all, if it has fewer), else None."""
    if facts.again.kind != "layers" or facts.stages is None:
        return None
    counts = []
    for (start, stop), parts in zip(facts.plan.bounds, facts.stages, strict=True):
        chosen = [layer for layer in facts.again.layers if start <= layer < stop]
        # The layer before the first block is layer 0.
        if chosen != list(range(parts.first_block + 1, parts.first_block + 1 + len(chosen))):
            return None
        if len(chosen) > parts.num_blocks:
            return None
        counts.append((len(chosen), parts.num_blocks))
    most = max(count for count, _ in counts)
    return most if all(count == min(most, blocks) for count, blocks in counts) else None


def require_even_tokens(facts: RegularPlan, system: str) -> None:
    """Raise PlanError if the ranks of sequence and context parallelism cannot divide a known sequence length evenly."""
    sharding = facts.plan.sharding
    parts = (sharding.tensor if sharding.sequence_parallel else 1) * (
        2 * sharding.context if sharding.context > 1 else 1
    )
    length = facts.shape["sequence_length"] if facts.shape is not None else parts
    if length % parts:
        raise PlanError(
            f"{system} splits sequences into {parts} equal parts ({sharding.describe()}; two for each rank of the "
            f"context axis), and {length} tokens are not a multiple of that. Choose another --sequence-length, or "
            "other sizes of the axes."
        )


def refuse_split_experts(facts: RegularPlan, system: str) -> None:
    """Raise PlanError for expert parallelism with another axis, with which other systems divide tokens otherwise."""
    sharding = facts.plan.sharding
    if sharding.expert > 1 and sharding.expert != sharding.width:
        raise PlanError(
            f"The plan combines expert parallelism with other axes ({sharding.describe()}), whose ranks all compute "
            f"the experts for the same tokens; {system} divides the tokens among them. Plan with --expert alone."
        )


def unsaid_experts(facts: RegularPlan, system: str, others: str) -> list[Unsaid]:
    """Return what ``system`` does differently with experts. ``others``: what it does with all other layers."""
    if facts.plan.sharding.expert == 1:
        return []
    return [
        Unsaid(what="everything but experts replicated on every rank of the expert axis", reason=f"{system} {others}"),
        Unsaid(
            what="the module of the experts, with the names of its parameters",
            reason=f"{system} has its own, and its own router",
        ),
    ]


def unsaid_states_of_context(facts: RegularPlan, system: str, zero_from: int = 1) -> list[Unsaid]:
    """Return, as not expressed, that ``system`` shards states over the context axis, too (from ``zero_from`` on)."""
    if facts.plan.sharding.context == 1 or facts.zero < zero_from:
        return []
    return [
        Unsaid(
            what="states whole on every rank of the context axis",
            reason=f"{system} shards them among the ranks of this axis, too, which takes less memory",
        )
    ]


def unsaid_products(facts: RegularPlan) -> list[Unsaid]:
    """Return matrix products in a type other than their factors', which systems leave to the script."""
    numbers = facts.plan.workload.numbers
    if not numbers.products:
        return []
    how = (
        "the script calls torch.set_float32_matmul_precision('high')"
        if numbers.products == "tf32"
        else "the script converts the model, as torchao's convert_to_float8_training does"
    )
    return [Unsaid(what=f"products in {numbers.products}", reason=how)]


def unsaid_early_stop(system: str) -> Unsaid:
    """Return, as not expressed, that ``system`` recomputes whole blocks; plans omit an end that no backward reads."""
    return Unsaid(
        what="the end of a block that no backward reads, omitted from recompute",
        reason=f"{system} recomputes all of it",
    )
