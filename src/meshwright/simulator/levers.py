"""What would make a step shorter: classes of work, their time on the critical path, and the step with less of each.

A class c is a set of instructions: a kind of work, one stage's forwards or backwards, all computations of one kind of
device, all transfers over one link. Let T be the step time, d_i the duration of instruction i, and P_c the part of the
critical path that belongs to c. If every instruction of c takes (1 - x) d_i, then for a small x, as long as the path
stays the longest one and its steps repeat,

    T(x) = T - x P_c

so P_c is the derivative of the step time by the relative speed of c. Another path soon becomes the longest, so the
step is simulated again, exactly, for x = `SHORTER` and for x = 1. The latter is a bound: no improvement of c alone
gives a shorter step, unless transfers that queue for a link then come in another order. Marks move with the instruction
that raises them, and a link is held for at least 1 ps. Issue by hosts on the path is a class of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.simulator.critical_path import CriticalPath
from meshwright.simulator.host_issue import with_faster_hosts
from meshwright.simulator.network import Network, route_of, routes, with_durations
from meshwright.simulator.program_costs import ProgramCosts
from meshwright.simulator.unroll import Unrolled
from meshwright.spec import Opcode, to_seconds
from meshwright.spec.instructions import COMPUTATIONS, INSTRUCTIONS, STASHING, UPDATES

# The share of a class's time that is removed.
SHORTER = 0.1
# Most classes of each kind that are simulated again, largest first; a pipeline has two per stage.
MOST_SIMULATED = 8

LeverKind = Literal["work", "stage", "device", "link"]
Mask = NDArray[np.bool_]
Times = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """A class of work on the critical path.

    ``path_s`` is its time on the path; ``step_if_shorter_s`` the step time with this class 10 % shorter, and
    ``step_if_free_s`` with it taking no time; None if not simulated.
    """

    kind: LeverKind
    name: str
    path_s: float
    step_if_shorter_s: float | None
    step_if_free_s: float | None


class _Class(NamedTuple):
    """The instructions whose entry in ``column``, shape (n,), is one of ``values``."""

    kind: LeverKind
    name: str
    column: NDArray[Any]
    values: list[int]

    def covers(self, ids: NDArray[np.int64] | slice) -> Mask:
        """Return which of the given instructions belong to the class."""
        column = self.column[ids]
        return column == self.values[0] if len(self.values) == 1 else np.isin(column, self.values)


def find_levers(
    path: CriticalPath,
    unrolled: Unrolled,
    costs: ProgramCosts,
    columns: dict[str, NDArray[Any]],
    devices: Sequence[str],
    simulate: Callable[[Unrolled], int],
) -> tuple[Lever, ...]:
    """Return every class with time on the path, by kind, the largest first.

    ``columns`` are the `instruction_columns`, ``devices`` names the kind of each stream's device, and ``simulate``
    returns the step time in ps.
    """
    length = path.end_ps - path.start_ps
    on_host = int(length[path.on_host].sum())
    length = np.where(path.on_host, 0, length)
    sized = [
        (item, int(length[item.covers(path.instruction)].sum()))
        for item in _classes(path, unrolled, costs, columns, devices)
    ]
    levers: list[Lever] = []
    if on_host:
        steps = [
            to_seconds(simulate(replace(unrolled, network=with_faster_hosts(unrolled.network, share))))
            for share in (1 - SHORTER, 0.0)
        ]
        levers.append(
            Lever(
                kind="work",
                name="issuing by the host",
                path_s=to_seconds(on_host),
                step_if_shorter_s=steps[0],
                step_if_free_s=steps[1],
            )
        )
    for kind, group in groupby(sized, key=lambda pair: pair[0].kind):
        largest = sorted((pair for pair in group if pair[1]), key=lambda pair: -pair[1])
        for place, (item, path_ps) in enumerate(largest):
            shorter_s = free_s = None
            if place < MOST_SIMULATED:
                chosen = item.covers(slice(None))
                shorter_s = to_seconds(simulate(shorten(unrolled, chosen, 1 - SHORTER)))
                free_s = to_seconds(simulate(shorten(unrolled, chosen, 0.0)))
            path_s = to_seconds(path_ps)
            levers.append(
                Lever(kind=kind, name=item.name, path_s=path_s, step_if_shorter_s=shorter_s, step_if_free_s=free_s)
            )
    kinds = get_args(LeverKind)
    return tuple(sorted(levers, key=lambda item: (kinds.index(item.kind), -item.path_s)))


def shorten(unrolled: Unrolled, chosen: Mask, share: float) -> Unrolled:
    """Return the same program with the time of the chosen instructions, shape (n,), multiplied by ``share``."""
    return replace(unrolled, network=with_durations(unrolled.network, *_shorten(unrolled.network, chosen, share)))


@compiled
def _shorten(network: Network, chosen: Mask, share: float) -> tuple[Times, Times]:
    """Compute durations and shifts of marks; an instruction that holds links takes at least 1 ps, as do its marks."""
    duration_ps, shift_ps = np.empty(len(chosen), np.int64), network.mark_shift_ps.copy()
    for i in range(len(duration_ps)):
        duration_ps[i] = network.class_ps[network.cost_class[i]]
        if chosen[i]:
            duration_ps[i] = max(int(np.rint(share * duration_ps[i])), int(route_of(network, i) >= 0))
    for m in range(len(shift_ps)):
        i = network.mark_instruction[m]
        if chosen[i]:
            moment = np.rint(share * (network.class_ps[network.cost_class[i]] + shift_ps[m]))
            shift_ps[m] = max(int(moment), int(route_of(network, i) >= 0)) - duration_ps[i]
    return duration_ps, shift_ps


def _classes(
    path: CriticalPath,
    unrolled: Unrolled,
    costs: ProgramCosts,
    columns: dict[str, NDArray[Any]],
    devices: Sequence[str],
) -> Iterator[_Class]:
    """Yield every class that the path touches."""
    here, network = path.instruction, unrolled.network
    route = routes(network)
    opcode, stage = columns["opcode"], columns["stage"]
    for code in np.unique(opcode[here]).tolist():
        yield _Class("work", INSTRUCTIONS[Opcode(code)].label, opcode, [code])
    for code in COMPUTATIONS:
        name = INSTRUCTIONS[code].label.replace("wards", "ward")
        stages = np.where(opcode == code, stage, -1)
        for place in _distinct(stages[here]):
            yield _Class("stage", f"{name} of stage {place}", stages, [place])
    computes = np.isin(opcode, (*COMPUTATIONS, *UPDATES, *STASHING))
    names, kinds = np.unique(np.array(devices), return_inverse=True)
    machines = np.where(computes, kinds[unrolled.stream], -1)
    for number in _distinct(machines[here]):
        yield _Class("device", f"{names[number]} computing", machines, [number])
    route_of_link = np.repeat(np.arange(len(network.route_offsets) - 1), np.diff(network.route_offsets))
    for link in _distinct(network.route_links[np.isin(route_of_link, route[here])]):
        name = costs.link_names[link] if costs.link_names else f"link number {link}"
        yield _Class("link", name, route, route_of_link[network.route_links == link].tolist())


def _distinct(numbers: NDArray[Any]) -> list[int]:
    """Return the distinct numbers, ascending, without -1."""
    return [int(number) for number in np.unique(numbers) if number >= 0]
