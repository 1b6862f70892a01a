"""Rules for the order of one rank's computations (`RankRules`).

Each microbatch of each of the rank's stages runs once forward and once backward, the backward after its forward. A
backward is either whole, or has two parts: first the part for inputs, later the part for weights. `RankRules` checks
the computations one after the other, in the order in which the rank runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.spec import Opcode
from meshwright.spec.instructions import COMPUTATIONS

# The two parts of a backward that is not one instruction.
_PARTS = frozenset({Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT})
# The instructions that release what a forward kept.
RELEASING = (Opcode.BACKWARD, Opcode.BACKWARD_WEIGHT)


class RankRules:
    """Checks the computations of one rank in order; ``microbatches`` lists, by stage, the rank's microbatches."""

    def __init__(self, microbatches: Mapping[int, Sequence[int]]) -> None:
        self.microbatches = microbatches
        self._run: set[tuple[int, int, int]] = set()

    def knows(self, stage: int, microbatch: int) -> bool:
        """Return whether the rank computes this microbatch of this stage."""
        return microbatch in self.microbatches.get(stage, range(0))

    def expected(self) -> str:
        """Return the rank's stages and microbatches as text: ``stage 0 and a microbatch of 0 to 7; or stage 3 ...``."""
        return "; or ".join(
            f"stage {stage} and a microbatch of {name_range(own)}" for stage, own in self.microbatches.items()
        )

    def take(self, opcode: Opcode, stage: int, microbatch: int) -> str:
        """Record the rank's next computation; return "" if it is valid, else the broken rule ("twice; ...").

        The returned text continues a message such as "... was yielded".
        """
        done = {kind for kind in COMPUTATIONS if (kind, stage, microbatch) in self._run}
        if (
            opcode in done
            or (opcode is Opcode.BACKWARD and done & _PARTS)
            or (opcode in _PARTS and Opcode.BACKWARD in done)
        ):
            return "twice; each microbatch runs once forward and once backward"
        if opcode is not Opcode.FORWARD and Opcode.FORWARD not in done:
            return "before its forward, whose values it needs"
        if opcode is Opcode.BACKWARD_WEIGHT and Opcode.BACKWARD_INPUT not in done:
            return "before its BackwardInput, which must run first"
        self._run.add((opcode, stage, microbatch))
        return ""

    def missing(self) -> str:
        """Return a text about missing computations: ``Forward(stage=0, microbatch=3) (2 of 8 instructions ...)``.

        Returns "" if all computations of the rank have been recorded.
        """
        pairs = [(stage, microbatch) for stage, own in self.microbatches.items() for microbatch in own]
        missing = [("Forward", *pair) for pair in pairs if (Opcode.FORWARD, *pair) not in self._run]
        missing += [("Backward", *pair) for pair in pairs if not any((kind, *pair) in self._run for kind in RELEASING)]
        if not missing:
            return ""
        kind, stage, microbatch = missing[0]
        return (
            f"{kind}(stage={stage}, microbatch={microbatch}) ({len(missing)} of {2 * len(pairs)} instructions are "
            f"missing). Expected one forward and one backward for each microbatch of "
            f"{name_range(self.microbatches[stage])}."
        )


def name_range(microbatches: Sequence[int]) -> str:
    """Return microbatch numbers as text: ``0, 1, 2``, or ``0 to 30 in steps of 2``, or ``0, 1, 3, ..., 30``."""
    if len(microbatches) <= 4:
        return ", ".join(map(str, microbatches))
    if not isinstance(microbatches, range):
        return f"{', '.join(map(str, microbatches[:3]))}, ..., {microbatches[-1]}"
    step = f" in steps of {microbatches.step}" if microbatches.step > 1 else ""
    return f"{microbatches[0]} to {microbatches[-1]}{step}"
