"""Check that the ranks of the expert axis divide the experts, of a graph's modules or of a model configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.spec.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Keys of the number of experts per layer in configurations of transformers 5, which depend on the type of model.
_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts")


def check_experts(size: int, module: str, num_experts: int) -> None:
    """Raise PlanError if ``size`` ranks of the expert axis do not divide the experts of a module."""
    if num_experts % size:
        few = f"fewer experts than ranks: {num_experts}" if num_experts < size else f"{num_experts} experts"
        raise PlanError(
            f"expert = {size} lays experts out over ranks, but {module!r} has {few}; expected a number that it "
            f"divides. Choose a divisor of {num_experts}."
        )


def check_configured_experts(config: Mapping[str, Any], where: str, sizes: Sequence[int]) -> None:
    """Raise PlanError if no size of the expert axis divides the experts of a Hugging Face configuration.

    A configuration without numbers of experts raises nothing; its graph is checked later.
    """
    counts = dict(_expert_counts(config))
    errors = []
    for size in sizes:
        try:
            for key, count in counts.items():
                check_experts(size, f"{where}: {key}", count)
        except PlanError as error:
            errors.append(error)
    if errors and len(errors) == len(sizes):
        raise errors[0]


def _expert_counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield keys and numbers of experts, including those of a multimodal model's text part."""
    for key in _KEYS:
        count = config.get(key)
        if type(count) is int and count > 1:
            yield key, count
    text = config.get("text_config")
    if isinstance(text, dict):
        yield from ((f"text_config.{key}", count) for key, count in _expert_counts(text))
