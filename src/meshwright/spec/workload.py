"""Workload: what is to be done with the model, independent of the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from meshwright.spec.errors import PlanError
from meshwright.spec.precision import Numbers, Precision, numbers_of

if TYPE_CHECKING:
    from meshwright.spec.graph import Tensor

# Far beyond any published training; more is a typing error, and finding its divisors would take minutes.
MAX_GLOBAL_BATCH = 2**40

# The words by which a user chooses an optimizer.
OptimizerName = Literal["adamw", "sgd", "sgd-momentum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The optimizer, as far as it determines time and memory."""

    kind: Literal["sgd", "adamw"] = "adamw"
    momentum: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("sgd", "adamw"):
            raise PlanError(
                f"The optimizer kind {self.kind!r} was given; expected 'sgd' or 'adamw'. `Optimizer.named` takes the "
                "words of the command line."
            )

    @classmethod
    def named(cls, text: OptimizerName) -> Optimizer:
        """Return the optimizer for a word of the command line."""
        return cls(kind="adamw" if text == "adamw" else "sgd", momentum=text == "sgd-momentum")

    @property
    def option(self) -> OptimizerName:
        """The command line's word for this optimizer."""
        if self.kind == "adamw":
            return "adamw"
        return "sgd-momentum" if self.momentum else "sgd"

    @property
    def name(self) -> str:
        """The name in the measurement table: ``sgd``, ``sgd+momentum``, ``adamw``."""
        return f"{self.kind}+momentum" if self.kind == "sgd" and self.momentum else self.kind

    @property
    def num_states(self) -> int:
        """State tensors per parameter."""
        return 2 if self.kind == "adamw" else int(self.momentum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """The input pipeline of each rank: seconds per sample, and how many microbatches it may prefetch.

    A microbatch counts as prefetched until its forward has ended.
    """

    seconds_per_sample: float
    depth: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.seconds_per_sample < float("inf") or self.depth < 1:
            raise PlanError(
                f"A loader with {self.seconds_per_sample} s per sample and a queue of {self.depth} microbatches was "
                "given; expected 0 s or more, and 1 or more."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step over ``global_batch`` samples.

    ``precision`` is a word of `spec.precision`. Inference has neither gradients nor optimizer. ``loader`` makes the
    inputs; without it they are always ready.
    """

    kind: Literal["training", "inference"] = "training"
    global_batch: int
    precision: Precision = "float32"
    optimizer: Optimizer = Optimizer()
    loader: Loader | None = None

    SCHEMA_VERSION: ClassVar[int] = 1

    @property
    def numbers(self) -> Numbers:
        """The number types of the precision."""
        return numbers_of(self.precision)

    @property
    def float_bytes(self) -> int | None:
        """Bytes of one floating element of an activation or parameter; None if the graph decides it (`autocast`)."""
        return None if self.numbers.autocast else self.numbers.value_bytes

    def gradient_bytes(self, parameter: Tensor) -> int:
        """Return bytes of a parameter's gradient."""
        return parameter.num_elements(0) * self.numbers.gradient_bytes

    def __post_init__(self) -> None:
        if not 1 <= self.global_batch <= MAX_GLOBAL_BATCH:
            raise PlanError(
                f"A global batch of {self.global_batch} samples was given; expected at least 1, at most 2^40. "
                "Give the samples of one step over all ranks."
            )
