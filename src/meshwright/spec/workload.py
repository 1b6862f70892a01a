"""Workload: what is to be done with the model, apart from how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from meshwright.spec.errors import PlanError

# Far beyond any published training; more is a slip, and finding its divisors would take minutes.
MAX_GLOBAL_BATCH = 2**40

Precision = Literal["float64", "float32", "bfloat16"]
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

    ``precision`` "bfloat16" is mixed precision: two-byte parameters, gradients and activations, four-byte master
    weights and optimizer states. Inference has neither gradients nor optimizer. ``loader``: what inputs come from; they
    are always there if none is given.
    """

    kind: Literal["training", "inference"] = "training"
    global_batch: int
    precision: Precision = "float32"
    optimizer: Optimizer = Optimizer()
    loader: Loader | None = None

    SCHEMA_VERSION: ClassVar[int] = 1

    @property
    def float_bytes(self) -> int:
        """Bytes of one floating element of an activation, parameter or gradient."""
        return {"float64": 8, "float32": 4, "bfloat16": 2}[self.precision]

    def __post_init__(self) -> None:
        if not 1 <= self.global_batch <= MAX_GLOBAL_BATCH:
            raise PlanError(
                f"A global batch of {self.global_batch} samples was given; expected at least 1, at most 2^40. "
                "Give the samples of one step over all ranks."
            )
