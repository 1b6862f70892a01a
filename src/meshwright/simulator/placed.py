"""Memory and work that the stages of a placement share on their rank, so that it is counted once.

- Parameters, buffers and inputs that several stages of a rank read exist once.
- A value that a stage passes to later stages of its rank stays until the last of them has read it. If there is a
  backward, its producer keeps it until then anyway.
- A bucket of gradients that several stages of a rank fill exists once.
- The optimizer steps once over all parameters of a rank.
"""

from __future__ import annotations

from meshwright.cost import CostModel
from meshwright.cost.optimizers import optimizer_bytes
from meshwright.program import gradient_buckets, trained_stages
from meshwright.simulator.stage_bytes import Bytes, by_part
from meshwright.simulator.stage_costs import step_issue
from meshwright.spec import Graph, Placement, StageSlice
from meshwright.spec.memory import BUCKETS, BUFFERS, INPUTS, OPTIMIZER, PARAMETERS, RECEIVED, SENT


class PlacedRanks:
    """Shared memory and optimizer steps of the ranks of one placement; ``stages`` are its slices."""

    def __init__(self, placement: Placement, graph: Graph, stages: tuple[StageSlice, ...]) -> None:
        self._placement, self._graph, self._stages = placement, graph, stages
        self._size, self._width = placement.microbatch_size, placement.workload.float_bytes
        self._kept = [by_part({}) for _ in stages]
        self._released = [by_part({}) for _ in stages]
        for stage in stages:
            if not stage.has_backward:
                self._hold(stage)

    def shared_bytes(self, rank: int) -> Bytes:
        """Return the bytes that a sum over the stages of a rank counts more than once."""
        seen: set[int] = set()
        total = by_part({})
        for index in self._placement.stages_of(rank):
            stage = self._stages[index]
            for part, tensors in ((PARAMETERS, stage.parameters), (BUFFERS, stage.buffers), (INPUTS, stage.inputs)):
                count = self._placement.num_microbatches if part == INPUTS else 1
                again = [tensor for tensor in tensors if tensor in seen]
                total += by_part({part: count * sum(map(self._bytes, again))})
                if part == PARAMETERS:
                    total += by_part({OPTIMIZER: sum(map(self._state_bytes, again))})
                seen.update(tensors)
        mine = set(self._placement.stages_of(rank))
        for bucket in gradient_buckets(self._graph, self._placement):
            total += by_part({BUCKETS: max(len(mine.intersection(bucket.stages)) - 1, 0) * bucket.num_bytes})
        return total

    def keep_handed_on(self, stage: int, forward: tuple[Bytes, Bytes]) -> tuple[Bytes, Bytes]:
        """Return the bytes that a forward allocates and frees, adjusted for values that later stages read."""
        takes, frees = forward
        return takes, frees - self._kept[stage] + self._released[stage]

    def optimizer_step(self, stage: int, cost: CostModel) -> tuple[float, float, tuple[int, ...]]:
        """Return the seconds of the rank's step, of an asynchronous host, and the stages whose gradients it uses."""
        rank = self._placement.stages[stage].rank
        stages = trained_stages(self._placement, self._graph, rank)
        parameters = sorted({tensor for index in stages for tensor in self._stages[index].parameters})
        kind = cost.cluster.device_kind(rank)
        seconds = cost.optimizer_seconds(self._graph, parameters, self._placement.workload.optimizer, kind)
        issue = step_issue(self._graph, self._placement, parameters, cost, 1)
        return seconds + cost.serial_overhead_s(kind), issue.optimizer_s, stages

    def _hold(self, stage: StageSlice) -> None:
        """Keep values that later stages of the rank read until the last of them, each storage once."""
        rank = self._placement.stages[stage.index].rank
        received = {self._graph.tensors[i].storage for channel in stage.incoming for i in channel.tensors}
        last: dict[int, int] = {}
        for channel in stage.outgoing:
            if self._placement.stages[channel.target].rank == rank:
                for storage in (self._graph.tensors[tensor].storage for tensor in channel.tensors):
                    if self._graph.tensors[storage].role == "activation":
                        last[storage] = max(last.get(storage, 0), channel.target)
        for storage, target in last.items():
            held = by_part({RECEIVED if storage in received else SENT: self._bytes(storage)})
            self._kept[stage.index] += held
            self._released[target] += held

    def _bytes(self, tensor: int) -> int:
        return self._graph.tensors[tensor].num_bytes(self._size, self._width)

    def _state_bytes(self, parameter: int) -> int:
        workload, tensor = self._placement.workload, self._graph.tensors[parameter]
        if workload.kind != "training" or not tensor.requires_grad:
            return 0
        return optimizer_bytes(tensor, workload)
