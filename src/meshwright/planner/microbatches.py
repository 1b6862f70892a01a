"""Microbatch sizes to try, and divisors for the choice of sizes, replicas and stages."""

from __future__ import annotations

from meshwright.spec import PlanError, Workload

# Sizes tried by default: each needs the costs of the whole graph (0.1 to 0.3 s at 6,000 ops).
MAX_MICROBATCH_SIZES = 12


def microbatch_sizes(workload: Workload, given: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return sizes to try, ascending: the given ones, or divisors of the batch. Raises PlanError for a non-divisor."""
    batch = workload.global_batch
    if given:
        wrong = [size for size in given if size < 1 or batch % size]
        if wrong:
            size = max(wrong[0], 1)
            near = " or ".join(str(count * size) for count in (batch // size, batch // size + 1) if count)
            raise PlanError(
                f"A global batch of {batch} samples does not divide into microbatches of "
                f"{', '.join(map(str, wrong))}. Choose sizes that divide {batch} "
                f"({', '.join(map(str, divisors(batch)[:12]))}), or the nearest batch for {size}: {near}."
            )
        return tuple(sorted(set(given)))
    found = divisors(batch)
    if len(found) <= MAX_MICROBATCH_SIZES:
        return tuple(found)
    # Evenly spread on a logarithmic scale: the divisor nearest to each step of a geometric ladder.
    steps = [batch ** (k / (MAX_MICROBATCH_SIZES - 1)) for k in range(MAX_MICROBATCH_SIZES)]
    return tuple(sorted({min(found, key=lambda size: (abs(size / step - 1), size)) for step in steps}))


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})
