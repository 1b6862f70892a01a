"""Workload: what is to be done with the model, apart from how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from meshwright.spec.errors import PlanError
from meshwright.spec.precision import Numbers, Precision, numbers_of

if TYPE_CHECKING:
    from meshwright.spec.graph import Tensor

# Far beyond any published training; more is a slip, and finding its divisors would take minutes.
MAX_GLOBAL_BATCH = 2**40

# What a user can ask for by a word.
OptimizerName = Literal["adamw", "sgd", "sgd-momentum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The optimizer, as far as time and memory depend on it."""

    kind: Literal["sgd", "adamw"] = "adamw"
    momentum: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("sgd", "adamw"):
            raise PlanError(
                f"{self.kind!r} is no kind of optimizer; expected 'sgd' or 'adamw'. `Optimizer.named` takes the words "
                "of the command line."
            )

    @classmethod
    def named(cls, text: OptimizerName) -> Optimizer:
        """The optimizer that an option asks for."""
        return cls(kind="adamw" if text == "adamw" else "sgd", momentum=text == "sgd-momentum")

    @property
    def option(self) -> OptimizerName:
        """The word that asks for it."""
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
    """The input pipeline of each rank: seconds for a sample, and how many microbatches it may be ahead.

    A microbatch counts as ahead until its forward is over.
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

    ``precision`` is a word of `spec.precision`. Inference has neither gradients nor optimizer. ``loader``: what inputs
    come from; they are always there if none is given.
    """

    kind: Literal["training", "inference"] = "training"
    global_batch: int
    precision: Precision = "float32"
    optimizer: Optimizer = Optimizer()
    loader: Loader | None = None

    SCHEMA_VERSION: ClassVar[int] = 1

    @property
    def numbers(self) -> Numbers:
        """The types that the precision stands for."""
        return numbers_of(self.precision)

    @property
    def float_bytes(self) -> int | None:
        """Bytes of one floating element of an activation or parameter; None where a graph says it (`autocast`)."""
        return None if self.numbers.autocast else self.numbers.value_bytes

    def gradient_bytes(self, parameter: Tensor) -> int:
        """Bytes of a parameter's gradient."""
        return parameter.num_elements(0) * self.numbers.gradient_bytes

    def __post_init__(self) -> None:
        if not 1 <= self.global_batch <= MAX_GLOBAL_BATCH:
            raise PlanError(
                f"A global batch of {self.global_batch} samples was given; expected at least 1, at most 2^40. "
                "Give the samples of one step over all ranks."
            )
