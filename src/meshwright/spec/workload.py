"""Workload: training or inference, batch, precision, optimizer and input pipeline, independent of the plan."""

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
    """The optimizer, as far as it determines time and memory: SGD (with or without ``momentum``) or AdamW."""

    kind: Literal["sgd", "adamw"] = "adamw"
    momentum: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("sgd", "adamw"):
            raise PlanError(
                f"The optimizer kind {self.kind!r} was given; expected 'sgd' or 'adamw'. `Optimizer.named` accepts the "
                "names of the command line: adamw, sgd, sgd-momentum."
            )

    @classmethod
    def named(cls, text: OptimizerName) -> Optimizer:
        """Return the optimizer for a name of the command line: ``adamw``, ``sgd`` or ``sgd-momentum``."""
        return cls(kind="adamw" if text == "adamw" else "sgd", momentum=text == "sgd-momentum")

    @property
    def option(self) -> OptimizerName:
        """The name of this optimizer on the command line: ``adamw``, ``sgd`` or ``sgd-momentum``."""
        if self.kind == "adamw":
            return "adamw"
        return "sgd-momentum" if self.momentum else "sgd"

    @property
    def name(self) -> str:
        """The name of this optimizer in measurement tables: ``adamw``, ``sgd`` or ``sgd+momentum``."""
        return f"{self.kind}+momentum" if self.kind == "sgd" and self.momentum else self.kind

    @property
    def num_states(self) -> int:
        """Number of state tensors per parameter: 2 for AdamW, 1 for SGD with momentum, 0 for SGD."""
        return 2 if self.kind == "adamw" else int(self.momentum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """The input pipeline of each rank: it takes ``seconds_per_sample``, and prefetches at most ``depth`` microbatches.

    A microbatch counts as prefetched until its forward has ended.
    """

    seconds_per_sample: float
    depth: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.seconds_per_sample < float("inf") or self.depth < 1:
            raise PlanError(
                f"A loader with {self.seconds_per_sample} s per sample and a depth of {self.depth} microbatches was "
                "given; expected at least 0 s per sample and a depth of at least 1."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step of training or inference over ``global_batch`` samples.

    ``precision`` is a word of `spec.precision`. Inference has neither gradients nor an optimizer. ``loader`` describes
    the input pipeline; without it, inputs are always ready.
    """

    kind: Literal["training", "inference"] = "training"
    global_batch: int
    precision: Precision = "float32"
    optimizer: Optimizer = Optimizer()
    loader: Loader | None = None

    SCHEMA_VERSION: ClassVar[int] = 1

    @property
    def numbers(self) -> Numbers:
        """The dtypes of the precision."""
        return numbers_of(self.precision)

    @property
    def float_bytes(self) -> int | None:
        """Bytes per floating element of activations and parameters; None under autocast: the graph has their dtypes."""
        return None if self.numbers.autocast else self.numbers.value_bytes

    def gradient_bytes(self, parameter: Tensor) -> int:
        """Return the bytes of a parameter's gradient."""
        return parameter.num_elements(0) * self.numbers.gradient_bytes

    def __post_init__(self) -> None:
        if not 1 <= self.global_batch <= MAX_GLOBAL_BATCH:
            raise PlanError(
                f"A global batch of {self.global_batch} samples was given; expected at least 1, at most 2^40. "
                "Give the samples of one step over all ranks."
            )
