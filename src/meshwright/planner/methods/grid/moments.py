"""Memory needs of the backward of a single layer, found by a walk through the layer alone (`cost.memory.walk`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from meshwright.planner.stage_tables import as_kept_least, sent_to_several, weigh_alone
from meshwright.spec import slice_graph
from meshwright.spec.memory import GRADIENTS, SENT
from meshwright.spec.recompute_words import words_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from meshwright.cost import CostModel
    from meshwright.spec import Graph, StageSlice, Workload


class Moment(NamedTuple):
    """Bytes that a layer's backward needs if it is a stage's last layer, without gradients of parameters.

    ``first`` and ``later`` are additional to the memory in use at its start, for a step's first backward and for a
    later one. ``kept`` is what the layer keeps of a microbatch, independently of earlier layers.
    """

    kept: float
    first: float
    later: float


class Moments:
    """Moments of the layers of a graph, each computed once; ``graph_with`` returns the graph with some recompute words.

    ``stands_for`` has the layer of that graph for each layer of the model, shape (L,). ``activations_away``: what
    layers keep is in host memory between forward and backward.
    """

    def __init__(
        self,
        graph_with: Callable[[str], Graph],
        stands_for: NDArray[np.int64],
        workload: Workload,
        cost: CostModel,
        *,
        activations_away: bool,
    ) -> None:
        self._graph_with, self._stands_for = graph_with, stands_for
        self._workload, self._cost, self._away = workload, cost, activations_away
        self._found: dict[tuple[int, str, int], Moment] = {}
        self._alone: dict[str, tuple[Graph, tuple[StageSlice, ...]]] = {}

    def of_layer(self, layer: int, microbatch_size: int, recompute: str) -> Moment:
        """Return the least memory needs of the backward of a layer."""
        key = microbatch_size, recompute, int(self._stands_for[layer])
        if key not in self._found:
            found = [self._walk(microbatch_size, word, key[-1]) for word in words_of(recompute)]
            self._found[key] = Moment(*map(min, zip(*found, strict=True)))
        return self._found[key]

    def _walk(self, microbatch_size: int, recompute: str, layer: int) -> Moment:
        if recompute not in self._alone:
            graph = as_kept_least(self._graph_with(recompute), self._workload, self._cost.cluster)
            self._alone[recompute] = graph, tuple(slice_graph(graph, [(i, i + 1) for i in range(len(graph.layers))]))
        graph, stages = self._alone[recompute]
        memory = weigh_alone(
            graph,
            stages[layer],
            microbatch_size,
            self._workload,
            self._cost,
            exchanges=True,
            activations_away=self._away,
        )
        # Within a longer stage this layer receives nothing, and does not add up gradients that come back twice.
        width = self._workload.float_bytes
        several = sum(graph.tensors[i].num_bytes(microbatch_size, width) for i in sent_to_several(stages[layer]))
        left_out, phases = memory.received_bytes + several, memory.phases
        first, later = (phase.most_bytes - max(phase.most[GRADIENTS], 0) for phase in (phases.first, phases.later))
        return Moment(
            kept=max(phases.forward.after_bytes - phases.forward.after[SENT], 0),
            first=max(first - left_out, 0),
            later=max(later - left_out, 0),
        )
