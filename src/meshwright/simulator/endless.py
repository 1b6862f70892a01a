"""Programs whose steps reach into each other, for the engine: all repetitions become one section.

A message may be sent in one repetition of the body and arrive in another; its number, counted on from repetition to
repetition, tells which receive is meant. A late wait is for an instruction of an earlier repetition. So the sections
are not matched one by one, as those of programs whose repetitions meet in nothing but the order of streams.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.program import Repeated, repeat_body
from meshwright.simulator.prices import Prices, SectionPrices
from meshwright.spec import Program, empty_section


def join_repetitions(program: Program, prices: Prices, num_steps: int) -> tuple[Program, Prices, Repeated]:
    """The program and its prices with all repetitions in one body, and where they come from."""
    joined = repeat_body(program, num_steps)
    costs = [getattr(prices, name) for name, _ in program.sections()]
    earliest = [part.mark_earliest_ps for part in costs if part.mark_earliest_ps is not None]
    body = SectionPrices(
        cost_class=np.concatenate([part.cost_class for part in costs])[joined.source],
        route=np.concatenate([part.route for part in costs])[joined.source],
        mark_offset_ps=np.concatenate([part.mark_offset_ps for part in costs])[joined.mark_source],
        mark_earliest_ps=np.concatenate(earliest)[joined.mark_source] if earliest else None,
    )
    none, nothing = empty_section(len(program.streams)), np.zeros(0, np.int32)
    unpriced = SectionPrices(
        cost_class=nothing,
        route=nothing,
        mark_offset_ps=nothing.astype(np.int64),
        mark_earliest_ps=nothing.astype(np.int64) if earliest else None,
    )
    flat = replace(program, prologue=none, body=joined.section, epilogue=none, advance=0)
    return flat, replace(prices, prologue=unpriced, body=body, epilogue=unpriced), joined
