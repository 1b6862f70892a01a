"""What would make a step shorter? Classes of work: what the critical path has of each, and the step with less of it.

A class c is a set of instructions: a kind of work, one stage's forwards or backwards, what one kind of device computes,
what moves over one link. Let T be the step time, d_i the duration of instruction i, and P_c the part of the critical
path that belongs to c. If every instruction of c takes (1 - x) d_i, then for a small x, as long as the path stays the
longest one and its steps repeat,

    T(x) = T - x P_c

so P_c is the derivative of the step time by the relative speed of c. Another path soon becomes the longest, so the
step is simulated again, exactly, for x = `SHORTER` and for x = 1: what no improvement of c alone can beat, except where
transfers that queue for a link then come in another order. Marks move with the instruction that raises them, and a
link is held for at least 1 ps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.critical_path import CriticalPath
from meshwright.simulator.prices import Prices
from meshwright.simulator.unroll import Unrolled
from meshwright.spec import Opcode, to_seconds

# The share of a class's time that is taken away.
SHORTER = 0.1
# Classes of a kind that are simulated again, those with most on the path; a pipeline has two per stage.
MOST_SIMULATED = 8

LeverKind = Literal["work", "stage", "device", "link"]
Mask = NDArray[np.bool_]
Classes = Iterator[tuple[LeverKind, str, Mask]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """A class of work on the critical path.

    ``path_s`` is what the path has of it; then the step time with this class 10 % shorter, and with it taking no time;
    None where that was not simulated.
    """

    kind: LeverKind
    name: str
    path_s: float
    step_if_shorter_s: float | None
    step_if_free_s: float | None


def find_levers(
    path: CriticalPath,
    unrolled: Unrolled,
    prices: Prices,
    columns: dict[str, NDArray[Any]],
    devices: Sequence[str],
    simulate: Callable[[Unrolled], int],
) -> tuple[Lever, ...]:
    """Every class with time on the path, by kind, the largest first.

    ``columns`` are the `instruction_columns`, ``devices`` name the kind of each stream's device, and ``simulate`` gives
    the step time in ps.
    """
    length = path.end_ps - path.start_ps
    found = [
        (kind, name, chosen, int(length[chosen[path.instruction]].sum()))
        for kind, name, chosen in _classes(path, unrolled, prices, columns, devices)
    ]
    levers: list[Lever] = []
    for kind, group in groupby(found, key=lambda item: item[0]):
        largest = sorted((item for item in group if item[3]), key=lambda item: -item[3])
        for place, (_, name, chosen, path_ps) in enumerate(largest):
            shorter_s = free_s = None
            if place < MOST_SIMULATED:
                shorter_s = to_seconds(simulate(shorten(unrolled, chosen, 1 - SHORTER)))
                free_s = to_seconds(simulate(shorten(unrolled, chosen, 0.0)))
            path_s = to_seconds(path_ps)
            levers.append(
                Lever(kind=kind, name=name, path_s=path_s, step_if_shorter_s=shorter_s, step_if_free_s=free_s)
            )
    return tuple(levers)


def shorten(unrolled: Unrolled, chosen: Mask, share: float) -> Unrolled:
    """The same program with the chosen instructions, shape (n,), taking only a share of their time."""
    network = unrolled.network
    scale, least = np.where(chosen, share, 1.0), (network.route >= 0).astype(np.int64)
    duration_ps = np.maximum(np.rint(scale * network.duration_ps).astype(np.int64), least)
    awaited = network.waits
    moment_ps = scale[awaited] * (network.duration_ps[awaited] + network.wait_shift_ps)
    shift_ps = np.maximum(np.rint(moment_ps).astype(np.int64), least[awaited]) - duration_ps[awaited]
    return replace(unrolled, network=network._replace(duration_ps=duration_ps, wait_shift_ps=shift_ps))


def _classes(
    path: CriticalPath, unrolled: Unrolled, prices: Prices, columns: dict[str, NDArray[Any]], devices: Sequence[str]
) -> Classes:
    """Kind, name and instructions of every class that the path touches."""
    opcode, stage = columns["opcode"], columns["stage"]
    here = path.instruction
    for code in np.unique(opcode[here]).tolist():
        yield "work", _work(Opcode(code)), opcode == code
    directed = here[np.isin(opcode[here], (Opcode.FORWARD, Opcode.BACKWARD))]
    for place, code in np.unique(np.stack([stage[directed], opcode[directed]], axis=1), axis=0).tolist():
        direction = "forward" if code == Opcode.FORWARD else "backward"
        yield "stage", f"{direction} of stage {place}", (opcode == code) & (stage == place)
    computes = np.isin(opcode, (Opcode.FORWARD, Opcode.BACKWARD, Opcode.OPTIMIZER_STEP))
    names = np.array(devices)[unrolled.stream]
    for device in np.unique(names[here[computes[here]]]).tolist():
        yield "device", f"{device} computing", computes & (names == device)
    yield from _links(path, unrolled, prices)


def _links(path: CriticalPath, unrolled: Unrolled, prices: Prices) -> Classes:
    network = unrolled.network
    route_of_link = np.repeat(np.arange(len(network.route_offsets) - 1), np.diff(network.route_offsets))
    on_path = np.isin(route_of_link, network.route[path.instruction])
    for link in np.unique(network.route_links[on_path]).tolist():
        name = prices.link_names[link] if prices.link_names else f"link number {link}"
        yield "link", name, np.isin(network.route, route_of_link[network.route_links == link])


def _work(opcode: Opcode) -> str:
    match opcode:
        case Opcode.FORWARD:
            return "forwards"
        case Opcode.BACKWARD:
            return "backwards"
        case Opcode.OPTIMIZER_STEP:
            return "optimizer"
        case Opcode.SEND_ACTIVATION:
            return "sends of activations"
        case Opcode.SEND_GRADIENT:
            return "sends of gradients"
        case Opcode.RECEIVE_ACTIVATION | Opcode.RECEIVE_GRADIENT:
            return "receives"
        case Opcode.ALL_REDUCE:
            return "sums of gradients"
        case _:
            assert_never(opcode)
