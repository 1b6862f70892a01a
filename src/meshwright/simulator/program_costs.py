"""Costs of a program on some machines (`ProgramCosts`), independent of when instructions run.

Every instruction has a **cost class**, so that a new estimate changes only a small table. A class has a duration, and
the bytes that are allocated at the start and freed at the end, by part of memory (parameters, saved activations, ...).
Transfers have **routes**: the links that one transfer holds at the same time; route -1 needs no link. The class of a
send or all-reduce may also have the processor time that it takes from each participating rank (`simulate`). The class
of a computation may have the time for which an asynchronous host issues it (`host_issue`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.compiled import compiled
from meshwright.spec import Program, ProgramError, Section


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SectionCosts:
    """Costs of one section's instructions and marks.

    Per instruction: ``cost_class`` and ``route``, -1 for no links. Per mark: ``mark_offset_ps``, its time after the
    start of its instruction; ``mark_earliest_ps``, its earliest time after a host began to issue the instruction, None
    without asynchronous hosts.
    """

    cost_class: NDArray[np.int32]
    route: NDArray[np.int32]
    mark_offset_ps: NDArray[np.int64]
    mark_earliest_ps: NDArray[np.int64] | None = None


class IssueCosts(NamedTuple):
    """Times of an asynchronous host per cost class, shape (C,) each; all 0 for classes that the host does not issue.

    ``host_ps``: how long the host issues; ``earliest_ps``: the least time from the start of the issue to the end on the
    device; ``is_awaited``: whether the host waits until the device could begin (`host_issue`).
    """

    host_ps: NDArray[np.int64]
    earliest_ps: NDArray[np.int64]
    is_awaited: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProgramCosts:
    """Costs of a program with C cost classes, P parts of memory, N routes over ``num_links`` links and R ranks.

    ``duration_ps`` (C,): time of an instruction; ``host_ps`` (C,): processor time that a transfer takes from each of
    its ranks. ``allocate_bytes`` and ``free_bytes`` (C, P): allocated at the start and freed at the end.
    ``resident_bytes`` (R, P): in use all the time. ``route_offsets`` (N + 1,) and ``route_links``: the links of each
    route, in CSR form. ``link_names`` (num_links,), or empty. ``exchanged_ps`` (C,): the part of a computation's
    duration in which its rank waits for collectives inside it; None without collectives. ``copied_ps``: the same for
    copies of activations. ``issue``: None if no host issues asynchronously.
    """

    duration_ps: NDArray[np.int64]
    host_ps: NDArray[np.int64]
    allocate_bytes: NDArray[np.int64]
    free_bytes: NDArray[np.int64]
    memory_parts: tuple[str, ...]
    resident_bytes: NDArray[np.int64]
    route_offsets: NDArray[np.int64]
    route_links: NDArray[np.int32]
    num_links: int
    link_names: tuple[str, ...] = ()
    exchanged_ps: NDArray[np.int64] | None = None
    copied_ps: NDArray[np.int64] | None = None
    issue: IssueCosts | None = None
    prologue: SectionCosts
    body: SectionCosts
    epilogue: SectionCosts

    def with_hosts_ahead(self) -> ProgramCosts:
        """Return the costs without asynchronous hosts: every instruction is issued before its device is ready."""
        return self if self.issue is None else replace(self, issue=None)


def bare_costs(program: Program, duration_ps: ArrayLike, routes: Sequence[Sequence[int]] = ()) -> ProgramCosts:
    """Return costs without memory for an empty program that a controller extends.

    Class i takes ``duration_ps[i]``; route r holds the links ``routes[r]``. Raises ProgramError if the program has
    instructions, because these need estimates.
    """
    for name, section in program.sections():
        _require(section.num_instructions == 0, f"the {name} has {section.num_instructions} instructions, not 0")
    durations, links = np.asarray(duration_ps, np.int64), [link for route in routes for link in route]
    none = SectionCosts(
        cost_class=np.zeros(0, np.int32), route=np.zeros(0, np.int32), mark_offset_ps=np.zeros(0, np.int64)
    )
    no_bytes = np.zeros((len(durations), 0), np.int64)
    return ProgramCosts(
        duration_ps=durations,
        host_ps=np.zeros(len(durations), np.int64),
        allocate_bytes=no_bytes,
        free_bytes=no_bytes,
        memory_parts=(),
        resident_bytes=np.zeros((program.num_ranks, 0), np.int64),
        route_offsets=np.cumsum([0, *(len(route) for route in routes)]),
        route_links=np.array(links, np.int32),
        num_links=max(links, default=-1) + 1,
        prologue=none,
        body=none,
        epilogue=none,
    )


def check_costs(program: Program, costs: ProgramCosts) -> None:
    """Raise ProgramError unless the costs fit the program in shapes and ranges, and transfers take at least 1 ps."""
    num_classes, num_parts = len(costs.duration_ps), len(costs.memory_parts)
    for name in ("duration_ps", "host_ps"):
        _require(not num_classes or int(getattr(costs, name).min()) >= 0, f"{name} has a negative entry")
    for name, shape in (
        ("host_ps", (num_classes,)),
        ("allocate_bytes", (num_classes, num_parts)),
        ("free_bytes", (num_classes, num_parts)),
        ("resident_bytes", (program.num_ranks, num_parts)),
    ):
        _require(getattr(costs, name).shape == shape, f"{name} has shape {getattr(costs, name).shape}, not {shape}")
    if costs.issue is not None:
        _check_issue(costs.issue, num_classes)
    links = costs.route_links
    _require(
        not len(links) or (links.min() >= 0 and links.max() < costs.num_links),
        f"a route uses a link outside 0..{costs.num_links - 1}",
    )
    _require(len(costs.link_names) in (0, costs.num_links), f"link_names has {len(costs.link_names)} names")
    for name, section in program.sections():
        _check_section(name, section, getattr(costs, name), costs)


def _check_issue(issue: IssueCosts, num_classes: int) -> None:
    for name in IssueCosts._fields:
        column = getattr(issue, name)
        _require(column.shape == (num_classes,), f"issue.{name} has shape {column.shape}, not {(num_classes,)}")
    _require(bool((issue.host_ps >= 0).all()), "issue.host_ps has a negative entry")
    _require(bool((issue.earliest_ps >= issue.host_ps).all()), "issue.earliest_ps is below issue.host_ps")


def _check_section(name: str, section: Section, section_costs: SectionCosts, costs: ProgramCosts) -> None:
    count, num_marks = section.num_instructions, len(section.mark_instruction)
    _require(
        len(section_costs.cost_class) == count and len(section_costs.route) == count,
        f"the {name} has {count} instructions, but its cost_class or route has another length",
    )
    _require(
        len(section_costs.mark_offset_ps) == num_marks,
        f"the {name} has {num_marks} marks, but its mark_offset_ps has another length",
    )
    if costs.issue is not None:
        given = section_costs.mark_earliest_ps
        _require(
            given is not None and given.shape == (num_marks,),
            f"the {name} has {num_marks} marks, but its mark_earliest_ps is missing or has another length",
        )
    if not count:
        return
    lowest, classes, routes, shortest = _look_through(section_costs.cost_class, section_costs.route, costs.duration_ps)
    _require(
        lowest >= 0 and classes <= len(costs.duration_ps) and routes < len(costs.route_offsets),
        f"the {name} refers to an unknown class or route",
    )
    _require(shortest >= 1, f"a transfer of the {name} takes less than 1 ps on its links")
    raising, offset = section.mark_instruction, section_costs.mark_offset_ps
    span, earliest = costs.duration_ps[section_costs.cost_class[raising]], section_costs.route[raising] >= 0
    _require(bool(((offset >= earliest) & (offset <= span)).all()), f"a mark of the {name} lies outside its span")


@compiled
def _look_through(
    cost_class: NDArray[np.int32], route: NDArray[np.int32], duration_ps: NDArray[np.int64]
) -> tuple[int, int, int, int]:
    """Return the bounds of a section's references: lowest (below 0 is invalid), number of classes and of routes needed.

    The last value is the shortest duration of an instruction with a route, in ps.
    """
    lowest, classes, routes, shortest = 0, 0, 0, np.iinfo(np.int64).max
    for i in range(len(cost_class)):
        lowest = min(lowest, cost_class[i], route[i] + 1)
        classes, routes = max(classes, cost_class[i] + 1), max(routes, route[i] + 1)
        if route[i] >= 0 and 0 <= cost_class[i] < len(duration_ps):
            shortest = min(shortest, duration_ps[cost_class[i]])
    return lowest, classes, routes, shortest


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ProgramError(f"The costs do not match the program: {what}. Estimate the program that is to be simulated.")
