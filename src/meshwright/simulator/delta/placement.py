"""How long does a step take when one stage of a placement moves to another rank? Followed without building it anew.

A search over placements tries many moves. estimated again are the stages whose slices differ (`program.placed_moves`),
their channels, and the optimizer's steps of both ranks; simulated again are the instructions that appear, vanish or go
elsewhere, and those whose ends move (`streams`). The ends are those of the program of the changed placement, estimated
and simulated anew, bit for bit.

What lies between is not in proportion to the move: all computations and messages of all ranks are laid out again as
columns (`placed_rows.write_table`), which are compared as a whole with those of before (`differing_rows`), and the
columns of costs are copied, so that they can be put back. That is most of a move: of 4 ms for 6,700 instructions the
engine takes 0.2 ms (docs/concepts/simulation.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshwright.cost import CostModel
from meshwright.cost.memory import backend_of
from meshwright.program import build_placed_program
from meshwright.program.placed_moves import MovableStages, Pair
from meshwright.simulator.delta.graph import NOWHERE
from meshwright.simulator.delta.placed_rows import Channels, Sizes, Table, computation, differing_rows, write_table
from meshwright.simulator.delta.streams import DeltaStreams
from meshwright.simulator.program_estimate import SHORTEST_S, estimate_program
from meshwright.simulator.simulate import run_unrolled
from meshwright.simulator.stage_costs import stage_costs
from meshwright.simulator.unroll import unroll
from meshwright.simulator.waiters import Times
from meshwright.spec import Graph, Placement, PlanError, ProgramError, to_picoseconds
from meshwright.spec.placement import check_placement


class _Saved(NamedTuple):
    """What was before a move: the stage and its rank, what all took, and the table or the ends."""

    stage: int
    rank: int
    costs: tuple[Channels, Times, Times]
    slots: tuple[dict[Pair, int], list[int]]
    table: Table | None
    end_ps: Times


class DeltaPlacement:
    """Follows moves of the stages of a placement on the ranks of the cost model's cluster.

    Where ranks are on several nodes, whose transfers share links, where transfers take processor time from
    computations, or hosts issue what devices compute, each move is simulated in full; ``is_followed`` says whether that
    is so. Raises PlanError if the placement does not fit the graph and the cluster.
    """

    def __init__(self, placement: Placement, graph: Graph, cost: CostModel) -> None:
        check_placement(placement, graph, cost.cluster)
        self._given, self._graph, self._cost = placement, graph, cost
        self._stages = MovableStages(graph, placement)
        self._sizes = Sizes(len(placement.stages), placement.num_microbatches, cost.cluster.num_ranks)
        kinds = cost.cluster.device_kinds
        self.is_followed = len(cost.cluster.nodes) == 1 and all(backend_of(kind) == "cpu" for kind in kinds)
        self._slots: dict[Pair, int] = {}
        self._free_slots: list[int] = []
        self._pairs: dict[int, set[Pair]] = {}
        self._parameters: dict[int, frozenset[int]] = {}
        self._channels = _empty_channels(0)
        self._computed_ps = np.full(self._sizes.num_computations, NOWHERE, np.int64)
        self._stepped_ps = np.full(self._sizes.ranks, NOWHERE, np.int64)
        self._known: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._streams = DeltaStreams(self._sizes.num_streams)
        self._table: Table | None = None
        self._end_ps = np.zeros(0, np.int64)
        self._estimate(set(range(self._sizes.stages)), set(self._stages.ranks))
        self._simulate()
        self._last: _Saved | None = None

    @property
    def placement(self) -> Placement:
        """The placement as it is now."""
        ranks = zip(self._given.stages, self._stages.ranks, strict=True)
        return replace(self._given, stages=tuple(replace(stage, rank=rank) for stage, rank in ranks))

    @property
    def step_ps(self) -> int:
        """When the last instruction ends, in ps."""
        return int((self._streams.end_ps if self.is_followed else self._end_ps).max(initial=0))

    def end_ps(self) -> Times:
        """When each instruction ends, in ps, in the order of the program of the placement."""
        return self._followed_ends() if self.is_followed else self._end_ps

    def move(self, stage: int, rank: int) -> None:
        """Put a stage on another rank. Raises PlanError for a stage or rank that there is not.

        Whatever is raised, by the cost model too, leaves everything as it was, and the move before can be taken back.
        """
        if not (0 <= stage < self._sizes.stages and 0 <= rank < self._sizes.ranks):
            raise PlanError(
                f"Stage {stage} was to move to rank {rank}; the placement has stages 0 to {self._sizes.stages - 1}, "
                f"cluster {self._cost.cluster.name!r} has ranks 0 to {self._sizes.ranks - 1}."
            )
        saved, was_followed, places = self._saved(stage), self.is_followed, {self._stages.ranks[stage], rank}
        try:
            self._estimate(self._stages.move(stage, rank), places)
            if was_followed and not self.is_followed:
                saved = saved._replace(end_ps=self._followed_ends())
            self._simulate()
        except BaseException:
            self._restore(saved)
            self.is_followed = was_followed
            raise
        self._last = saved

    def undo(self) -> None:
        """Take the last move back. Raises ProgramError if there is none that was not taken back yet."""
        if self._last is None:
            raise ProgramError("No move is left to take back: only the last one can be, once.")
        self._restore(self._last)
        if self.is_followed:
            self._streams.undo()
        self._last = None

    def _saved(self, stage: int) -> _Saved:
        costs = (
            Channels(*(column.copy() for column in self._channels)),
            self._computed_ps.copy(),
            self._stepped_ps.copy(),
        )
        slots = dict(self._slots), self._free_slots.copy()
        return _Saved(stage, self._stages.ranks[stage], costs, slots, self._table, self._end_ps)

    def _restore(self, saved: _Saved) -> None:
        """What was before a move, but for the streams."""
        stage, rank, costs, slots, self._table, self._end_ps = saved
        self._channels, self._computed_ps, self._stepped_ps = costs
        self._slots, self._free_slots = slots
        for changed in self._stages.move(stage, rank):
            self._note(changed)

    def _followed_ends(self) -> Times:
        return self._streams.end_ps[self._streams.rows().instruction]

    def _simulate(self) -> None:
        """The ends of what is estimated."""
        if self.is_followed:
            ranks = np.array(self._stages.ranks, np.int64)
            table = write_table(self._sizes, ranks, (self._computed_ps, self._stepped_ps), self._channels)
            self._streams.change(differing_rows(self._table, table))
            self._table = table
            return
        placement = self.placement
        program = build_placed_program(placement, self._graph)
        costs = estimate_program(program, placement, self._graph, self._cost)
        self._end_ps = run_unrolled(program, unroll(program, costs, 1), costs.host_ps)[2]

    def _estimate(self, stages: set[int], ranks: set[int]) -> None:
        """Find out anew what these stages, their channels and the steps of the optimizer on these ranks take."""
        before = {pair for stage in stages for pair in self._pairs.get(stage, ())}
        for stage in stages:
            self._note(stage)
        pairs = {pair for stage in stages for pair in self._pairs[stage]}
        for pair in sorted(before - pairs):
            self._channels.key[self._slots[pair]] = NOWHERE
            self._free_slots.append(self._slots.pop(pair))
        for pair in sorted(pairs):
            self._estimate_channel(pair)
        for stage in sorted(stages):
            self._estimate_stage(stage)
        for rank in sorted(ranks):
            self._estimate_step(rank)

    def _note(self, stage: int) -> None:
        """Which channels and parameters a stage has now."""
        self._pairs[stage] = set(self._stages.pairs_of(stage))
        tensors, ops = self._graph.tensors, self._graph.ops
        read = (i for op in self._stages.ops_of(stage) for i in ops[op].inputs)
        self._parameters[stage] = frozenset(i for i in read if tensors[i].role == "parameter")

    def _estimate_channel(self, pair: Pair) -> None:
        if pair not in self._slots:
            if not self._free_slots:
                self._more_slots()
            self._slots[pair] = self._free_slots.pop()
        slot, channel = self._slots[pair], self._stages.channel(pair)
        size, width = self._given.microbatch_size, self._given.workload.float_bytes
        there = self._send_ps(pair, channel.forward_bytes(self._graph, size, width))
        back = NOWHERE
        if channel.gradients:
            back = self._send_ps(pair[::-1], channel.backward_bytes(self._graph, size, width))
        self._channels.key[slot] = pair[0] * self._sizes.stages + pair[1]
        self._channels.forward_ps[slot], self._channels.backward_ps[slot] = there, back

    def _more_slots(self) -> None:
        count = len(self._channels.key)
        wider = _empty_channels(2 * count + 8)
        for column, values in zip(wider, self._channels, strict=True):
            column[:count] = values
        self._channels = wider
        self._free_slots += range(count, len(wider.key))

    def _send_ps(self, stages: Pair, num_bytes: int) -> int:
        pair = self._stages.ranks[stages[0]], self._stages.ranks[stages[1]]
        if pair[0] == pair[1]:
            return 0
        key = ("send", pair, num_bytes)
        if key not in self._known:
            takes_host = bool(self._cost.collective_host_seconds("send", pair, num_bytes))
            seconds = self._cost.collective_seconds("send", pair, num_bytes)
            self._known[key] = to_picoseconds(max(seconds, SHORTEST_S)), int(takes_host)
        duration_ps, is_on_host = self._known[key]
        if is_on_host:
            self.is_followed = False
        return duration_ps

    def _estimate_stage(self, index: int) -> None:
        """Its forward, its first backward and the other ones, as `program_estimate` has them."""
        stages, sizes = self._stages, self._sizes
        pairs = self._pairs[index]
        returned = sum(bool(stages.gradients.get(pair)) for pair in pairs)
        kind = self._cost.cluster.device_kind(stages.ranks[index])
        # The number of channels and of those that return gradients is what the host's time follows.
        key = (kind.name, stages.ops_of(index), len(pairs), returned)
        if key not in self._known:
            found = stage_costs(self._graph, self._given, stages.slice_of(index), (), kind, self._cost)
            seconds = found.forward_s, found.backward.seconds, found.backward.later_s
            self._known[key] = tuple(to_picoseconds(item) for item in seconds)
        forward_ps, first_ps, later_ps = self._known[key]
        last = sizes.microbatches - 1
        microbatches = np.arange(sizes.microbatches)
        self._computed_ps[computation(sizes, index, microbatches, False)] = forward_ps
        backwards = computation(sizes, index, microbatches, True)
        self._computed_ps[backwards] = later_ps if index in stages.differentiated else NOWHERE
        self._computed_ps[backwards[last]] = first_ps if index in stages.differentiated else NOWHERE

    def _estimate_step(self, rank: int) -> None:
        """The optimizer's step over all parameters of a rank, if it trains any."""
        mine = [index for index, place in enumerate(self._stages.ranks) if place == rank]
        parameters = sorted(frozenset().union(*(self._parameters[index] for index in mine)))
        tensors = self._graph.tensors
        self._stepped_ps[rank] = NOWHERE
        if self._graph.mode == "training" and any(tensors[i].requires_grad for i in parameters):
            kind, optimizer = self._cost.cluster.device_kind(rank), self._given.workload.optimizer
            seconds = self._cost.optimizer_seconds(self._graph, parameters, optimizer, kind)
            seconds += self._cost.serial_overhead_s(kind)
            self._stepped_ps[rank] = to_picoseconds(seconds)


def _empty_channels(count: int) -> Channels:
    return Channels(*(np.full(count, NOWHERE, np.int64) for _ in range(3)))
