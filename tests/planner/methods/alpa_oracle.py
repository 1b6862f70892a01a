"""An oracle for Alpa's integer programs on chains of products: every combination of strategies, estimated one by one.

Written from the definitions: what y = x Wᵀ needs and leaves when it is split over samples (B), columns (O), summed rows
(I, completed whole or scattered over a dim) or not at all (N), on each of two axes; closed forms of collectives with α
and β; a tensor is converted along one axis and then along the other, whichever is cheaper. Imports `meshwright.spec`
alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

WHOLE, ROWS, COLUMNS, SUM = None, 0, 1, "sum"


@dataclass(frozen=True)
class Axis:
    size: int
    alpha: float
    beta: float

    def seconds(self, kind: str, num_bytes: float) -> float:
        if self.size == 1 or not num_bytes:
            return 0.0
        k = self.size
        factor = {"AR": 2 * (k - 1) / k, "AG": (k - 1) / k, "RS": (k - 1) / k, "A2A": (k - 1) / k**2 * k / 2}[kind]
        return self.alpha + self.beta * factor * num_bytes


# What a conversion exchanges forward, and for the gradient: (have, want, gradient is a sum over the ranks).
def exchanged(have, want, sums):
    if have == SUM:
        return ("AR", None) if want is WHOLE else ("RS", "AG")
    if have is WHOLE and want is WHOLE:
        return (None, "AR") if sums else (None, None)
    if have == want:
        return None, None
    if want is WHOLE:
        return "AG", "RS" if sums else None
    return (None, "AG") if have is WHOLE else ("A2A", "A2A")


def convert(axes, have, want, sums, num_bytes):
    def along(axis, size):
        kinds = exchanged(have[axis], want[axis], sums[axis])
        return sum(axes[axis].seconds(kind, size) for kind in kinds if kind)

    def left(axis, layout):
        return num_bytes / (axes[axis].size if layout[axis] in (ROWS, COLUMNS) else 1)

    if axes[0].size == 1 or axes[1].size == 1:
        return along(0, num_bytes) + along(1, num_bytes)
    return min(along(a, left(b, have)) + along(b, left(a, want)) for a, b in ((0, 1), (1, 0)))


def strategies(axis, batch, inner, outer, is_last):
    """(kind, how the output lies once it is completed)."""
    found = [("N", WHOLE)]
    if axis.size == 1:
        return found
    if batch % axis.size == 0:
        found.append(("B", ROWS))
    if outer % axis.size == 0:
        found.append(("O", COLUMNS))
    if inner % axis.size == 0:
        found.append(("I", WHOLE))
        if not is_last:
            found += [("I", ROWS)] if batch % axis.size == 0 else []
            found += [("I", COLUMNS)] if outer % axis.size == 0 else []
    return found


READS = {"N": WHOLE, "B": ROWS, "O": WHOLE, "I": COLUMNS}


def fits(pair, axes, batch, inner, outer):
    """Whether both axes together divide what both split."""
    (a, lies_a), (b, lies_b) = pair
    both = axes[0].size * axes[1].size
    splits = [(READS[a], READS[b], (batch, inner)), (lies_a, lies_b, (batch, outer))]
    splits.append(({"O": 0, "I": 1}.get(a), {"O": 0, "I": 1}.get(b), (outer, inner)))
    return all(x is None or x != y or sizes[x] % both == 0 for x, y, sizes in splits)


def cheapest(widths, batch, axes, op_seconds, *, num_microbatches=1, parameter_bytes=16.0, limit=float("inf")):
    """Least seconds over all combinations that fit in ``limit`` bytes; inf if none does."""
    layers = list(itertools.pairwise(widths))
    choices = []
    for at, (inner, outer) in enumerate(layers):
        sides = [strategies(axis, batch, inner, outer, at == len(layers) - 1) for axis in axes]
        choices.append([pair for pair in itertools.product(*sides) if fits(pair, axes, batch, inner, outer)])
    best = float("inf")
    for chosen in itertools.product(*choices):
        seconds = memory = once = 0.0
        for at, ((inner, outer), pair) in enumerate(zip(layers, chosen, strict=True)):
            weight, result = 4.0 * inner * outer, 4.0 * batch * outer
            parts = [axis.size if kind != "N" else 1 for axis, (kind, _) in zip(axes, pair, strict=True)]
            held = [axis.size if kind in "OI" else 1 for axis, (kind, _) in zip(axes, pair, strict=True)]
            seconds += op_seconds[at] / (parts[0] * parts[1])
            memory += parameter_bytes * inner * outer / (held[0] * held[1])
            lies = [lies for _, lies in pair]
            sums = [SUM if kind == "I" else way for kind, way in pair]
            seconds += convert(axes, sums, lies, (False, False), result) if SUM in sums else 0.0
            summed = [axis for axis, (kind, _) in zip(axes, pair, strict=True) if kind == "B"]
            share = weight / (held[0] * held[1])
            if len(summed) == 1:
                once += summed[0].seconds("AR", share)
            elif summed:
                a, b = summed
                once += min(
                    a.seconds("AR", share) + b.seconds("AR", share / a.size),
                    b.seconds("AR", share) + a.seconds("AR", share / b.size),
                )
            if at + 1 < len(layers):
                want = [READS[kind] for kind, _ in chosen[at + 1]]
                parts_of = [axis.size if way is not WHOLE else 1 for axis, way in zip(axes, lies, strict=True)]
                memory += result / (parts_of[0] * parts_of[1])
                seconds += convert(axes, lies, want, [kind == "O" for kind, _ in chosen[at + 1]], result)
                if want != lies:
                    read = [axis.size if way is not WHOLE else 1 for axis, way in zip(axes, want, strict=True)]
                    memory += result / (read[0] * read[1])
        if memory <= limit * (1 + 1e-9):
            best = min(best, num_microbatches * seconds + once)
    return best
