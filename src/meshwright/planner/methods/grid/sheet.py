"""All uniform configurations of a problem with lower bounds (`bound_grid`), one sheet per sharding; memory bounds.

Bounds are computed in two steps. The first bounds consider computation only, because communication among replicas takes
longer to estimate than everything else together. When the lowest of all bounds is on a sheet without communication, it
is estimated and raises the bounds of that sheet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.methods.grid.cover import (
    FLIGHTS,
    IN_TURN,
    SPLIT,
    WHOLE_IN_TURN,
    ConfigurationRows,
    Exchanges,
    Form,
    Layers,
    cover,
    forwards_ahead,
    forwards_of,
    in_flight,
    microbatches_in_turn,
    parameters_of_rank,
)
from meshwright.planner.methods.grid.figures import Figures
from meshwright.planner.problem import Problem, divisors
from meshwright.planner.rank_layouts import memory_limit, slice_evenly
from meshwright.planner.short import ShortGraph
from meshwright.planner.step_bounds import ROUNDING
from meshwright.program import own_workload
from meshwright.spec import MeshwrightError, Sharding
from meshwright.spec.recompute import is_alike, words_of


# For configurations about to be simulated, this adds to the bound of `cover` what a backward needs at its start: the
# needs of the last layer of a position's last stage, found by a walk through this layer alone. With f of n microbatches
# in flight, a rank needs at least
#
#     static + f · kept + first(last layer)                 when the first backward of a step starts
#     static + g · kept + gradients + later(last layer)     when a later one does; g is f, or n - 1 if f = n
#
# If a rank has several chunks, each has its own f and g, and the later backward is the first that starts after every
# chunk has made its gradients. ZeRO 3 adds the parameters gathered then. If activations are in host memory between
# passes, only those of a stage's last layer stay. With ZeRO 2 and 3, gradients are not added to wider ones, for which a
# later backward would need a copy: the needs of the first one are used instead.
def floor_bytes(figures: Figures, wanted: Configuration) -> float:
    """Return a lower bound of the bytes on the fullest rank; 0 for inference and split backwards (not modelled)."""
    flight = FLIGHTS[wanted.schedule]
    if figures.workload.kind != "training" or flight == SPLIT:
        return 0.0
    size, recompute = wanted.microbatch_size, wanted.recompute
    positions, chunks = wanted.positions, wanted.chunks
    weights, keeps = figures.bytes(recompute), figures.keeps_on_device
    replicas = wanted.num_ranks // positions
    shared = min(wanted.shard_size, replicas) if wanted.shard_size else replicas
    rounds = -(-(figures.workload.global_batch // size) // replicas)
    form = Form(positions, replicas, shared, chunks, flight, wanted.zero, rounds, True, 0)
    kept = weights.kept_fixed + size * weights.kept_per_sample
    is_cut, is_gathered = wanted.zero >= 2 and shared > 1, wanted.zero >= 3 and shared > 1
    fullest = 0.0
    for position in range(positions):
        mine = [wanted.bounds[chunk * positions + position] for chunk in range(chunks)]
        parameters, states = (
            sum(float(column[start:stop].sum()) for start, stop in mine)
            for column in (weights.parameters, weights.states)
        )
        static = figures.library_bytes + parameters_of_rank(parameters, wanted.zero, shared, figures.has_masters)
        static += states / (shared if wanted.zero else 1)
        counts = [in_flight(form, position, chunk) for chunk in range(chunks)]
        ends = [figures.moments.of_layer(stop - 1, size, recompute) for _, stop in mine]
        of_one = [
            float(kept[start:stop].sum()) if keeps else end.kept for (start, stop), end in zip(mine, ends, strict=True)
        ]
        held = _add_up(counts, of_one)
        gathered = [_gathered_bytes(figures, recompute, mine, chunk) if is_gathered else 0.0 for chunk in range(chunks)]
        fullest = max(fullest, static + gathered[-1] + held + ends[-1].first)
        if rounds > 1:
            made = sum(float(weights.gradients[start:stop].sum()) for start, stop in mine) / (shared if is_cut else 1)
            chunk, left = _left_later(form, position, counts)
            last = ends[chunk]
            begun = last.first if is_cut else last.later
            fullest = max(fullest, static + gathered[chunk] + _add_up(left, of_one) + made + begun)
    return fullest


def _left_later(form: Form, position: int, counts: Sequence[int]) -> tuple[int, Sequence[int]]:
    """Return the chunk of the first backward with all gradients made, and the microbatches in flight of each chunk.

    ``counts`` are those in flight when the first backward of a step starts.
    """
    rounds, chunks = form.rounds, form.chunks
    if chunks == 1:
        return 0, [counts[0] - (counts[0] == rounds)]
    size = microbatches_in_turn(form)
    if form.flight != IN_TURN or rounds == size:
        # The first chunk's second backward; the other chunks have freed what they kept.
        return 0, [rounds - 1, *[0] * (chunks - 1)]
    # The first backward of the second turn.
    forwards = min(forwards_ahead(form, position) + size * chunks, rounds * chunks)
    return chunks - 1, [forwards_of(form, chunk, forwards) - size for chunk in range(chunks)]


def _gathered_bytes(figures: Figures, recompute: str, mine: Sequence[tuple[int, int]], chunk: int) -> float:
    """Return the bytes of parameters that ZeRO 3 has gathered at the start of a chunk's backward.

    The layers of the root are always gathered (`cost.memory.shared_units`). Of the others, the last one is gathered; so
    is the one before it if the chunk's last layer is outside the root.
    """
    parameters, in_root = figures.bytes(recompute).parameters, figures.is_in_root
    root = sum(float(parameters[start:stop][in_root[start:stop]].sum()) for start, stop in mine) - figures.tied_bytes
    start, stop = mine[chunk]
    units = np.flatnonzero(~in_root[start:stop])[-1 - (not in_root[stop - 1]) :] + start
    return max(root, 0.0) + float(parameters[units].sum())


def _add_up(counts: Sequence[int], each: Sequence[float]) -> float:
    return sum(count * value for count, value in zip(counts, each, strict=True))


Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A uniform configuration: pipeline positions with equal numbers of replicas, and layers cut evenly.

    ``num_ranks``: teams of devices in all. ``positions``: length of the pipeline; ``chunks``: stages on each position.
    ``bounds``: first layer and end of each stage. ``shard_size``: replicas that shard states, 0 for all. ``idle``:
    devices that are left out.
    """

    num_ranks: int
    sharding: Sharding
    zero: int
    shard_size: int
    recompute: str
    microbatch_size: int
    positions: int
    schedule: str
    chunks: int
    bounds: tuple[tuple[int, int], ...]
    idle: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Cell:
    """Configurations with the same ranks, microbatch size, recompute word, and shard size."""

    figures: Figures
    num_ranks: int
    microbatch_size: int
    recompute: str
    shard_size: int
    counts: Integers


@dataclass(slots=True, kw_only=True, eq=False)
class Sheet:
    """The configurations of one sharding, with lower bounds of step time (``seconds``) and memory (``bytes``).

    Both have shape (configurations,). ``limit_bytes`` is the memory limit of a rank. ``knows_exchange``: the bounds
    include communication among replicas.
    """

    problem: Problem
    cells: list[_Cell]
    rows: list[ConfigurationRows]
    limit_bytes: float
    knows_exchange: bool = False
    seconds: Floats = field(init=False)
    bytes: Floats = field(init=False)

    def __post_init__(self) -> None:
        self._gather()

    def refine(self) -> None:
        """Compute the bounds again, with communication among replicas."""
        self.knows_exchange = True
        for index, cell in enumerate(self.cells):
            exchanges = cell.figures.exchanges(
                cell.num_ranks, tuple(cell.counts.tolist()), self.problem.exchange, cell.shard_size
            )
            self.rows[index] = _cover_cell(self.problem, cell, exchanges)
        self._gather()

    def configuration(self, row: int) -> Configuration:
        """Return the configuration with index ``row``."""
        place = int(np.searchsorted(np.cumsum([len(rows.seconds) for rows in self.rows]), row, side="right"))
        before = sum(len(rows.seconds) for rows in self.rows[:place])
        cell, rows, row = self.cells[place], self.rows[place], row - before
        schedule, chunks = variants_of(self.problem)[rows.schedule[row]]
        work = cell.figures.seconds(cell.microbatch_size, cell.recompute).work
        return Configuration(
            num_ranks=cell.num_ranks,
            sharding=cell.figures.sharding,
            zero=int(rows.zero[row]),
            shard_size=cell.shard_size,
            recompute=cell.recompute,
            microbatch_size=cell.microbatch_size,
            positions=int(rows.positions[row]),
            schedule=schedule,
            chunks=chunks,
            bounds=slice_evenly(work.tolist(), int(rows.positions[row]) * chunks),
            idle=cell.figures.idle,
        )

    def _gather(self) -> None:
        self.seconds = np.concatenate([rows.seconds for rows in self.rows] or [np.empty(0)]) * ROUNDING
        self.bytes = np.concatenate([rows.bytes for rows in self.rows] or [np.empty(0)])


@dataclass(frozen=True, kw_only=True, eq=False)
class ConfigurationGrid:
    """All uniform configurations of a problem; ``is_complete`` is False if only its first shardings were bounded."""

    sheets: tuple[Sheet, ...]
    is_complete: bool = True

    @property
    def num_configurations(self) -> int:
        """The number of configurations that were bounded."""
        return sum(len(sheet.seconds) for sheet in self.sheets)

    @property
    def num_fitting(self) -> int:
        """The number of configurations whose memory bound is within the limit."""
        return sum(int((sheet.bytes <= sheet.limit_bytes).sum()) for sheet in self.sheets)

    def share_needed(self, wanted: Configuration) -> float:
        """Return the memory bound of a configuration as a share of the limit; above 1, the configuration cannot fit.

        This bound (`floor_bytes`) is tighter than that of the sheet.
        """
        sheet = self._by_axes[wanted.idle, wanted.sharding]
        figures = next(cell.figures for cell in sheet.cells if cell.microbatch_size == wanted.microbatch_size)
        return floor_bytes(figures, wanted) / sheet.limit_bytes if sheet.limit_bytes > 0 else math.inf

    @cached_property
    def _by_axes(self) -> dict[tuple[tuple[int, ...], Sharding], Sheet]:
        sheets = (sheet for sheet in self.sheets if sheet.cells)
        return {(sheet.cells[0].figures.idle, sheet.cells[0].figures.sharding): sheet for sheet in sheets}

    def by_bound(self) -> Iterator[tuple[float, Configuration]]:
        """Yield (lower bound in seconds, configuration) for all that may fit into memory, the lowest bound first."""
        seconds, places, rows = self._fitting()
        done = np.zeros(len(seconds), bool)
        while not done.all():
            order = np.flatnonzero(~done)
            for index in order[np.argsort(seconds[order], kind="stable")].tolist():
                sheet = self.sheets[places[index]]
                if not sheet.knows_exchange:
                    sheet.refine()
                    mine = places == places[index]
                    seconds[mine] = sheet.seconds[rows[mine]]
                    break
                done[index] = True
                yield float(seconds[index]), sheet.configuration(int(rows[index]))

    def leanest(self, most: int) -> Iterator[tuple[float, Configuration]]:
        """Yield (lower bound in seconds, configuration) for the ``most`` configurations with the least memory."""
        over = [sheet.bytes / sheet.limit_bytes for sheet in self.sheets]
        places = np.repeat(np.arange(len(over)), [len(item) for item in over])
        rows = np.concatenate([np.arange(len(item)) for item in over] or [np.empty(0, np.int64)])
        for index in np.argsort(np.concatenate([*over, np.empty(0)]), kind="stable")[:most].tolist():
            sheet, row = self.sheets[places[index]], int(rows[index])
            yield float(sheet.seconds[row]), sheet.configuration(row)

    def _fitting(self) -> tuple[Floats, Integers, Integers]:
        rows = [np.flatnonzero(sheet.bytes <= sheet.limit_bytes) for sheet in self.sheets]
        seconds = [sheet.seconds[mine] for sheet, mine in zip(self.sheets, rows, strict=True)]
        places = [np.full(len(mine), place) for place, mine in enumerate(rows)]
        empty = np.empty(0, np.int64)
        return np.concatenate([*seconds, np.empty(0)]), np.concatenate([*places, empty]), np.concatenate([*rows, empty])


def bound_grid(problem: Problem, seconds_left: Callable[[], float] | None = None) -> ConfigurationGrid:
    """Return all uniform configurations of a problem with their lower bounds.

    If the time ends (``seconds_left`` returns 0), only the first shardings are included. Raises the first error of the
    shardings if no sharding is possible.
    """
    short = _figures_graph(problem, 1) if _is_symbolic(problem) else None
    sheets: list[Sheet] = []
    errors: list[MeshwrightError] = []
    is_complete = True
    for idle, sharding in product(problem.choices.idle, problem.choices.shardings):
        if sheets and seconds_left is not None and seconds_left() <= 0:
            is_complete = False
            break
        try:
            sheets.append(_make_sheet(problem, short, sharding, idle))
        except MeshwrightError as error:
            errors.append(error)
    if not sheets:
        raise errors[0]
    return ConfigurationGrid(sheets=tuple(sheets), is_complete=is_complete)


def _figures_graph(problem: Problem, microbatch_size: int) -> ShortGraph:
    """Return the shortened graph, or the whole graph if only some of its equal layers may be recomputed."""
    words = [word for text in problem.choices.recompute for word in words_of(text)]
    if all(map(is_alike, words)):
        return problem.short_graph(microbatch_size)
    graph = problem.graph_for(microbatch_size)
    return ShortGraph(graph=graph, stands_for=np.arange(len(graph.layers)))


def variants_of(problem: Problem) -> list[tuple[str, int]]:
    """Return pairs of a schedule that supports uniform configurations and a number of stages per rank."""
    found: list[tuple[str, int]] = []
    # Split backwards need activations on the device: both parts read what layers kept.
    away = all(offload.activations != "device" for offload in problem.choices.offload)
    names = problem.choices.schedules if problem.workload.kind == "training" else problem.choices.schedules[:1]
    for name in names:
        if name in FLIGHTS and not (FLIGHTS[name] == SPLIT and away):
            in_turn = FLIGHTS[name] in (IN_TURN, WHOLE_IN_TURN)
            found += [(name, chunks) for chunks in (problem.choices.num_chunks if in_turn else (1,))]
    return found


def _is_symbolic(problem: Problem) -> bool:
    """Return whether one graph serves all microbatch sizes."""
    try:
        return problem.graph_for(1).batch_size is None
    except MeshwrightError:
        return False


def _make_sheet(problem: Problem, short: ShortGraph | None, sharding: Sharding, idle: tuple[int, ...]) -> Sheet:
    sizes = problem.microbatch_sizes(own_workload(problem.workload, sharding))
    counts = [count for left_out, count in problem.devices() if left_out == idle]
    num_ranks = [count // sharding.width for count in counts if count % sharding.width == 0]
    if short is not None:
        sizes = _sizes_for_all(problem, short, sharding, sizes, num_ranks)
        figures = Figures(problem, short, sharding, idle)
        figures.prepare(sizes)
    cells = []
    for size in sizes:
        if short is None:
            figures = Figures(problem, _figures_graph(problem, size), sharding, idle)
        sharing = dict.fromkeys(shard_size for _, shard_size in problem.choices.sharing())
        for recompute, count, shard_size in product(problem.choices.recompute, num_ranks, sharing):
            cell = _Cell(
                figures=figures,
                num_ranks=count,
                microbatch_size=size,
                recompute=recompute,
                shard_size=shard_size,
                counts=_numbers_of_positions(problem, count, figures.num_layers),
            )
            cells.append(cell)
    limits = (memory_limit(figures.cluster, rank, problem.memory) for rank in figures.first_of_kinds)
    return Sheet(
        problem=problem,
        cells=cells,
        rows=[_cover_cell(problem, cell, _no_exchanges(len(cell.counts))) for cell in cells],
        limit_bytes=max(limits) if cells else 0.0,
    )


def _sizes_for_all(
    problem: Problem, short: ShortGraph, sharding: Sharding, sizes: tuple[int, ...], num_ranks: list[int]
) -> tuple[int, ...]:
    """Return the microbatch sizes that give every replica a microbatch, in the longest possible pipeline."""
    batch = own_workload(problem.workload, sharding).global_batch
    longest = (max(n for n in divisors(count) if n <= len(short.stands_for)) for count in num_ranks)
    least = min((count // positions for count, positions in zip(num_ranks, longest, strict=True)), default=0)
    return tuple(size for size in sizes if batch // size >= least)


def _cover_cell(problem: Problem, cell: _Cell, exchanges: Exchanges) -> ConfigurationRows:
    seconds, weights = cell.figures.seconds(cell.microbatch_size, cell.recompute), cell.figures.bytes(cell.recompute)
    variants = variants_of(problem)
    columns = (
        seconds.forward,
        seconds.backward,
        seconds.accumulate,
        seconds.optimizer,
        weights.parameters,
        weights.states,
        weights.gradients,
        weights.kept_fixed + cell.microbatch_size * weights.kept_per_sample,
        cell.figures.waiting(cell.microbatch_size),
    )
    return cover(
        Layers(*map(_running, columns)),
        seconds.work,
        exchanges,
        cell.figures.cluster.columns().kind[: cell.num_ranks],
        cell.figures.workload.global_batch // cell.microbatch_size,
        cell.figures.goes_through_all,
        cell.counts,
        np.array([FLIGHTS[schedule] for schedule, _ in variants], np.int64),
        np.array([chunks for _, chunks in variants], np.int64),
        np.array([zero for zero, size in problem.choices.sharing() if size == cell.shard_size], np.int64),
        cell.shard_size,
        cell.shard_size > 0 and 0 in problem.choices.shard_sizes,
        cell.figures.has_masters,
    )


def _running(values: Floats) -> Floats:
    """Return cumulative sums along the last axis: before each layer, and over all."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums


def _no_exchanges(count: int) -> Exchanges:
    nothing = np.zeros(count)
    return Exchanges(
        latency_s=nothing,
        bucket_s=nothing,
        gather_s=nothing,
        scatter_s=nothing,
        tied_parameters=0.0,
        tied_gradients=0.0,
        copy_s=0.0,
        bucket_bytes=1.0,
        overlap=True,
        wait=False,
    )


def _numbers_of_positions(problem: Problem, num_ranks: int, num_layers: int) -> Integers:
    wanted = problem.choices.num_stages
    counts = [n for n in divisors(num_ranks) if n <= num_layers and (not wanted or n in wanted)]
    return np.array(counts, np.int64)
