"""Precisions: each is one word, which decides the dtypes in memory, cost estimates and runtime.

    word                    parameters   activations  gradients   also, for the optimizer
    float64                 float64      float64      float64     states in float64
    float32                 float32      float32      float32     states in float32
    tf32                    float32      float32      float32     states in float32
    amp                     float32      autocast     float32     states in float32
    amp-float16             float32      autocast     float32     states in float32, the scale of the loss
    mixed                   bfloat16     bfloat16     float32     master weights and states in float32
    mixed-bf16-gradients    bfloat16     bfloat16     bfloat16    master weights and states in float32
    bfloat16                bfloat16     bfloat16     bfloat16    states in bfloat16
    mixed-float16           float16      float16      float32     master weights and states in float32
    float8                  bfloat16     bfloat16     float32     master weights and states in float32

Bytes per parameter under AdamW are 32, 16, 16, 16, 16, 18, 16, 8, 18 and 18. "amp" runs forwards under torch's
autocast to bfloat16. "mixed" is Megatron-LM's ``--bf16``: gradients of microbatches are accumulated, and summed over
replicas, in float32. Losses in float16 are scaled; all ranks agree before an update on whether all gradients are
finite.

"tf32" is float32 whose matrix products tensor cores compute in TF32; convolutions and recurrent layers of cuDNN use
TF32 under "float32", too, which is torch's default. "float8" is "mixed" whose linear layers, if both sizes of the
weight are multiples of 16, multiply in float8_e4m3fn: factors are scaled by the largest value of each tensor, cast
right before each product, and kept in bfloat16 (torchao: float8 training, recipe tensorwise).

Under ZeRO 2 and 3 the master weights are the weights: each rank keeps its shard of them in float32, and gathers them in
the type of the parameters (FSDP2: ``MixedPrecisionPolicy(param_dtype)``). Gradients are reduced in their own type
(``reduce_dtype``) and kept in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from meshwright.spec.errors import PlanError, suggest
from meshwright.spec.units import DTYPE_BYTES

Precision = Literal[
    "float64",
    "float32",
    "tf32",
    "amp",
    "amp-float16",
    "mixed",
    "mixed-bf16-gradients",
    "bfloat16",
    "mixed-float16",
    "float8",
]


@dataclass(frozen=True, slots=True)
class Numbers:
    """The dtypes of a precision, by torch's names.

    ``values`` is the dtype of parameters and, except under autocast, of activations. ``states`` is the dtype of
    optimizer states. ``master`` is the dtype of master weights, ``autocast`` that of torch's autocast; "" without them.
    ``products`` is the type in which tensor cores multiply; "" if it is the dtype of the operands.
    """

    values: str
    gradients: str
    states: str
    master: str = ""
    autocast: str = ""
    products: str = ""

    @property
    def compute(self) -> str:
        """The dtype in which the operands of matrix products are stored."""
        return self.autocast or self.values

    @property
    def arithmetic(self) -> str:
        """The type in which matrix products are computed: ``products``, or the dtype of the operands."""
        return self.products or self.compute

    @property
    def value_bytes(self) -> int:
        """Bytes per element of parameters and, except under autocast, activations."""
        return DTYPE_BYTES[self.values]

    @property
    def gradient_bytes(self) -> int:
        """Bytes per element of parameters' gradients."""
        return DTYPE_BYTES[self.gradients]

    @property
    def state_bytes(self) -> int:
        """Bytes per element of one optimizer state."""
        return DTYPE_BYTES[self.states]

    @property
    def scales_loss(self) -> bool:
        """Whether losses are scaled, because gradients in float16 may leave its range."""
        return "float16" in (self.values, self.autocast)

    @property
    def master_bytes(self) -> int:
        """Bytes per element of the master weights; 0 without master weights."""
        return DTYPE_BYTES[self.master] if self.master else 0


_NUMBERS: dict[str, Numbers] = {
    "float64": Numbers("float64", "float64", "float64"),
    "float32": Numbers("float32", "float32", "float32"),
    "tf32": Numbers("float32", "float32", "float32", products="tf32"),
    "amp": Numbers("float32", "float32", "float32", autocast="bfloat16"),
    "amp-float16": Numbers("float32", "float32", "float32", autocast="float16"),
    "mixed": Numbers("bfloat16", "float32", "float32", "float32"),
    "mixed-bf16-gradients": Numbers("bfloat16", "bfloat16", "float32", "float32"),
    "bfloat16": Numbers("bfloat16", "bfloat16", "bfloat16"),
    "mixed-float16": Numbers("float16", "float32", "float32", "float32"),
    "float8": Numbers("bfloat16", "float32", "float32", "float32", products="float8_e4m3fn"),
}
# Precisions that the runtime does not execute.
SIMULATED_ONLY: tuple[Precision, ...] = ("mixed-float16", "float8")


def upgraded_precision(data: dict[str, Any], version: int) -> dict[str, Any]:
    """Convert the data of a plan or placement of an older ``version``: rename the precision of its workload.

    In version 1 ``bfloat16`` had float32 master weights and states, as ``mixed-bf16-gradients`` has now.
    """
    workload = data.get("workload")
    if version == 1 and isinstance(workload, dict) and workload.get("precision") == "bfloat16":
        return {**data, "workload": {**workload, "precision": "mixed-bf16-gradients"}}
    return data


def numbers_of(precision: str) -> Numbers:
    """Return the dtypes of a precision. Raises PlanError for an unknown word."""
    if precision not in _NUMBERS:
        words = get_args(Precision)
        raise PlanError(
            f"The precision {precision!r} was given{suggest(precision, words)}; known are {', '.join(words)}."
        )
    return _NUMBERS[precision]
