"""What the ranks of a plan keep in the memory of their hosts and on drives, and whether a node has it.

Of a stage with E trained elements per rank (its share, where replicas share states out), w bytes wide on the device,

    host     gradients that came down, and parameters that go up from the same place: w·E
             states; in float32 a copy of the parameters, too, of which mixed precision has a master in its states;
             where parameters are kept there, these (and frozen ones) instead of such a copy
    activations  what layers keep of each microbatch under way (`cost.memory.away`)
    drives   the states, of which `PIECES_AT_HAND` pieces are on the host meanwhile

All devices of a node together have to find room. Where ranks are teams, all of this is of one device of each, and the
node what falls to those (`spec.teams`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.cost import CostModel
from meshwright.cost.memory import as_kept, backend_of, find_away
from meshwright.cost.optimizers import state_bytes
from meshwright.program import PIECES_AT_HAND, gradient_buckets, host_pieces, max_in_flight
from meshwright.spec import Graph, Placement, Plan, format_bytes, format_count, slice_graph
from meshwright.spec.offload import ON_DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """Bytes on one node's host and drives, and what these have; ``ranks`` are those of the plan that are there."""

    name: str
    ranks: tuple[int, ...]
    host_bytes: int
    host_limit_bytes: int
    nvme_bytes: int
    nvme_limit_bytes: int

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.host_bytes <= self.host_limit_bytes and self.nvme_bytes <= self.nvme_limit_bytes

    @property
    def share(self) -> float:
        """The part of the host or of the drives that is taken, whichever is fuller."""
        nvme = self.nvme_bytes / self.nvme_limit_bytes if self.nvme_bytes else 0.0
        return max(self.host_bytes / self.host_limit_bytes, nvme)

    def describe(self) -> str:
        """For people: ``the host of node0 keeps 37 GiB of 1.86 TiB, its drives 31.7 GiB of 13.6 TiB``."""
        host = f"the host of {self.name} keeps {format_bytes(self.host_bytes)} of {format_bytes(self.host_limit_bytes)}"
        if not self.nvme_bytes:
            return host
        return f"{host}, its drives {format_bytes(self.nvme_bytes)} of {format_bytes(self.nvme_limit_bytes)}"


def explain_nodes(nodes: Sequence[NodeMemory]) -> list[str]:
    """A sentence on the fullest of some nodes; none where nothing is away from the devices."""
    if not nodes:
        return []
    fullest, over = max(nodes, key=lambda node: node.share), sum(not node.fits for node in nodes)
    sentence = f"{fullest.describe()}."
    if over:
        return [f"{over} of {format_count(len(nodes), 'node')} have no room: {sentence}"]
    return [sentence[0].upper() + sentence[1:]]


def node_memory(plan: Plan | Placement, graph: Graph, cost: CostModel) -> tuple[NodeMemory, ...]:
    """What each node that a plan uses keeps away from its devices; none where everything is on them."""
    if isinstance(plan, Placement) or plan.offload == ON_DEVICE:
        return ()
    of_stages = [(0, 0)] * len(plan.stages) if plan.offload.optimizer == "device" else _stage_bytes(plan, graph, cost)
    activations = _activation_bytes(plan, graph, cost) if plan.offload.activations == "host" else [0] * len(of_stages)
    cluster = cost.cluster
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank in range(plan.num_ranks):
        ranks[cluster.node_index(rank)].append(rank)
    found = []
    for index, members in ranks.items():
        node = cluster.nodes[index]
        kept = [of_stages[stage] for rank in members for stage in plan.stages_of(rank)]
        found.append(
            NodeMemory(
                name=node.name,
                ranks=tuple(members),
                host_bytes=sum(host for host, _ in kept)
                + sum(activations[stage] for rank in members for stage in plan.stages_of(rank)),
                host_limit_bytes=node.host_memory_bytes,
                nvme_bytes=sum(nvme for _, nvme in kept),
                nvme_limit_bytes=node.nvme.capacity_bytes if node.nvme else 0,
            )
        )
    return tuple(found)


def _stage_bytes(plan: Plan, graph: Graph, cost: CostModel) -> list[tuple[int, int]]:
    """Bytes on the host and on drives of one rank of each stage."""
    workload, buckets = plan.workload, gradient_buckets(graph, plan)
    numbers, states = workload.numbers, state_bytes(workload.optimizer, workload.precision)
    largest: dict[int, int] = defaultdict(int)
    for index, num_bytes in (
        *((index, bucket.num_bytes) for bucket in buckets for index in bucket.stages),
        *((piece.stage, piece.num_bytes) for piece in host_pieces(graph, plan, buckets)),
    ):
        largest[index] = max(largest[index], num_bytes)
    found = []
    for stage in slice_graph(graph, plan.bounds):
        memory = cost.stage_memory(graph, stage, plan.microbatch_size, workload)
        parts = plan.exchange.num_parts(len(plan.stages[stage.index].ranks))
        gradients, kept = -(-memory.gradient_bytes // parts), -(-memory.optimizer_bytes // parts)
        copied = 0 if numbers.master_bytes else gradients
        if plan.offload.parameters == "host":
            shared = {parameter for bucket in buckets for parameter in bucket.parameters}
            own = (graph.tensors[i].num_bytes(0, numbers.value_bytes) for i in stage.parameters if i not in shared)
            copied = -(-sum(own) // parts)
        host = gradients + copied
        if plan.offload.optimizer == "host":
            found.append((host + kept, 0))
        else:
            at_hand = PIECES_AT_HAND * -(-largest[stage.index] // (numbers.gradient_bytes * parts)) * states
            found.append((host + min(at_hand, kept), kept))
    return found


def _activation_bytes(plan: Plan, graph: Graph, cost: CostModel) -> list[int]:
    """Bytes of activations on the host of one rank of each stage."""
    found = []
    for stage in slice_graph(graph, plan.bounds):
        kind = cost.cluster.device_kind(plan.stages[stage.index].ranks[0])
        kept = as_kept(graph, plan.workload.numbers, backend_of(kind))
        away = find_away(kept, stage, plan.microbatch_size, plan.workload.float_bytes)
        found.append(max_in_flight(plan, stage.index) * away.num_bytes)
    return found
