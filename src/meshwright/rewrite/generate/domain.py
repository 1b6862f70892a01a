"""What is enumerated: given tensors, and operators with their attributes, over a few sizes that can be changed.

Sizes that mean different things have different names, and different numbers, so that few terms are equal by accident.
What is equal for one set of numbers and not for another is no rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.rewrite.expressions import parse_attribute


@dataclass(frozen=True, slots=True)
class Step:
    """An operator with attributes in the language of rules, of ``num_operands`` operands.

    ``commutes``: the order of its operands does not matter.
    """

    operator: str
    num_operands: int
    attributes: tuple[tuple[str, Any], ...] = ()
    commutes: bool = False


@dataclass(frozen=True, slots=True)
class Domain:
    """Given tensors by name and shape, a shape being names of ``sizes`` and numbers, and steps that make terms."""

    sizes: tuple[tuple[str, int], ...]
    tensors: tuple[tuple[str, tuple[str | int, ...]], ...]
    steps: tuple[Step, ...]

    def shape(self, name: str) -> tuple[int, ...]:
        """A given tensor's sizes in numbers."""
        sizes = dict(self.sizes)
        return tuple(sizes[size] if isinstance(size, str) else size for size in dict(self.tensors)[name])


def _step(operator: str, num_operands: int, *, commutes: bool = False, **attributes: str) -> Step:
    parsed = tuple((name, parse_attribute(text)) for name, text in attributes.items())
    return Step(operator, num_operands, parsed, commutes)


def _conv(padding: str) -> Step:
    return _step("conv2d", 2, stride="(1, 1)", padding=padding, dilation="(1, 1)", groups="1")


def usual_domain(**sizes: int) -> Domain:
    """The domain of the shipped rules: 19 operators over matrices, a number, images and kernels.

    ``sizes``: m rows, k inner size, n columns, c channels, h height and width, as far as they are not the usual ones.
    """
    numbers = {"m": 2, "k": 3, "n": 5, "c": 2, "h": 3, **sizes}
    return Domain(
        sizes=tuple(numbers.items()),
        tensors=(
            *((name, ("m", "k")) for name in ("x", "y", "z")),
            *((name, ("k", "n")) for name in ("v", "w")),
            ("u", ("n", "m")),
            ("s", ()),
            *((name, (1, "c", "h", "h")) for name in ("a", "b")),
            *((name, ("c", "c", 3, 3)) for name in ("e", "f")),
            ("g", ("c", "c", 1, 1)),
        ),
        steps=(
            _step("add", 2, commutes=True),
            _step("sub", 2),
            _step("mul", 2, commutes=True),
            _step("maximum", 2, commutes=True),
            _step("neg", 1),
            _step("relu", 1),
            _step("tanh", 1),
            _step("square", 1),
            _step("matmul", 2),
            _step("transpose", 1, order="(1, 0)"),
            _step("concat", 2, axis="0"),
            _step("concat", 2, axis="1"),
            _step("slice", 1, axis="0", start="0", stop="m"),
            _step("slice", 1, axis="0", start="m", stop="m + m"),
            _step("slice", 1, axis="1", start="0", stop="k"),
            _step("slice", 1, axis="1", start="k", stop="k + k"),
            _step("sum", 1, axis="1", keep="False"),
            _step("softmax", 1, axis="1"),
            _step("broadcast", 1, shape="(m, k)"),
            _step("broadcast", 1, shape="(m, n)"),
            _conv("(1, 1)"),
            _conv("(0, 0)"),
            _step("avg_pool2d", 1, kernel="(3, 3)", stride="(1, 1)", padding="(1, 1)"),
            _step("max_pool2d", 1, kernel="(3, 3)", stride="(1, 1)", padding="(1, 1)"),
            _step("pad", 1, low="(0, 0, 1, 1)", high="(0, 0, 1, 1)"),
        ),
    )
