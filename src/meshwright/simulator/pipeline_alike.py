"""Find identical pipelines of a plan, so that only one of each class is simulated (`program.pipeline_folding`).

Two pipelines p and q are identical if all facts that the simulator reads about their ranks and links are the same:

    devices      stage by stage, the same kind of device in the same kind of node
    messages     pair by pair of stages: inside a node or not, and how far apart in the node
    links        if two messages of p share a link, the same messages of q share a link, too
    sums         the rings of the same gradient sums use a link of p and that link's counterpart in q
    work         the same number of microbatches

In addition, no two pipelines of the plan may send over one link, so that none delays another, and the ranks of all
pipelines must have the same order (if two ranks request a link at the same picosecond, the lower rank gets it). Then
identical pipelines have the same times, by induction over the requests for links. One case breaks this symmetry and
shows only in the run: a message and a gradient sum that request one link at the same picosecond, because the sum
requests in the name of its lowest rank alone. `breaks_symmetry` finds this case; then the plan is not folded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.program import Fold, gradient_buckets
from meshwright.simulator.arrivals import find_arrivals, links_of, uses_shared_links
from meshwright.simulator.network import Network, collectives
from meshwright.simulator.routes import hop_links
from meshwright.simulator.sharing import Times
from meshwright.spec import Cluster, Graph, Plan, slice_graph
from meshwright.spec.schedules import NAMED_SCHEDULES

Ids = NDArray[np.int64]

# In these schedules pipelines interact in gradient sums alone, and the order of computations does not depend on ranks.
_FOLDED = tuple(
    name for name, facts in NAMED_SCHEDULES.items() if not facts.is_asynchronous and facts.layout != "bidirectional"
)


def find_fold(plan: Plan, graph: Graph, cluster: Cluster) -> Fold | None:
    """Return the fold of a plan, which must match graph and cluster; None if no two pipelines are identical."""
    counts = {len(stage.ranks) for stage in plan.stages}
    if (
        plan.schedule not in _FOLDED
        or plan.has_shares
        or len(counts) > 1
        or counts == {1}
        or cluster.paths
        or not _meets_in_sums_alone(plan)
    ):
        return None
    ranks = np.array([stage.ranks for stage in plan.stages])
    order = _order_of_ranks(ranks)
    if order is None:
        return None
    sources, targets = _messages(plan, graph, ranks)
    links = hop_links(cluster, sources, targets).reshape(-1, ranks.shape[1])
    known, first, inverse = np.unique(links, return_index=True, return_inverse=True)
    inverse = inverse.reshape(links.shape)
    used = np.zeros((len(known), ranks.shape[1]), np.bool_)
    used[inverse, np.arange(ranks.shape[1])] = True
    if bool((used[known >= 0].sum(axis=1) > 1).any()):
        return None
    columns = cluster.columns()
    inside = columns.node[sources] == columns.node[targets]
    facts = [
        order,
        columns.node_kind[ranks],
        columns.kind[ranks],
        np.where(inside, targets - sources, 0),
        # The position at which the link of each message occurs first.
        np.where(links >= 0, (first // ranks.shape[1])[inverse], -1),
        _sums_on_links(plan, graph, cluster, known)[inverse],
        np.arange(ranks.shape[1])[None] < plan.num_microbatches % ranks.shape[1],
    ]
    table = np.ascontiguousarray(np.concatenate(facts).T.astype(np.int64))
    numbers: dict[bytes, int] = {}
    classes = tuple(numbers.setdefault(row.tobytes(), len(numbers)) for row in table)
    is_whole = len(numbers) == 1 or not plan.exchange.shard_size or len(numbers) % plan.exchange.shard_size == 0
    return Fold(whole=plan, classes=classes) if len(numbers) < len(classes) and is_whole else None


def _meets_in_sums_alone(plan: Plan) -> bool:
    """Whether all ranks that hold a bucket are reduced in one collective, regardless of their numbers."""
    is_hybrid = plan.exchange.shard_optimizer and plan.exchange.shard_size > 0
    return not plan.exchange.servers and plan.exchange.algorithm != "hierarchical" and not is_hybrid


def _order_of_ranks(ranks: Ids) -> Ids | None:
    """Return each stage rank's order within its pipeline; None if a rank is in two pipelines, or the orders differ."""
    apart = len(np.unique(ranks)) == sum(len(np.unique(column)) for column in ranks.T)
    order = np.stack([np.unique(column, return_inverse=True)[1] for column in ranks.T], axis=1)
    return order if apart and bool((order == order[:, :1]).all()) else None


def _messages(plan: Plan, graph: Graph, ranks: Ids) -> tuple[Ids, Ids]:
    """Return sources and targets of each pipeline's messages per microbatch: two arrays (messages, replicas)."""
    pairs: list[tuple[int, int]] = []
    for channel in (channel for stage in slice_graph(graph, plan.bounds) for channel in stage.outgoing):
        pairs.append((channel.source, channel.target))
        if channel.gradients:
            pairs.append((channel.target, channel.source))
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return ranks[table[:, 0]], ranks[table[:, 1]]


def _sums_on_links(plan: Plan, graph: Graph, cluster: Cluster, links: Ids) -> Ids:
    """Number the set of groups whose gradient rings use each given link, shape (links,); 0 for the empty set."""
    buckets = gradient_buckets(graph, plan) if graph.mode == "training" else ()
    groups = [np.array(ranks) for ranks in dict.fromkeys(bucket.ranks for bucket in buckets)]
    sets = np.zeros(len(links), np.int64)
    if not groups or not len(links):
        return sets
    lies = np.zeros((len(links), len(groups)), np.bool_)
    members = np.concatenate(groups)
    following = np.concatenate([np.roll(ranks, -1) for ranks in groups])
    number = np.repeat(np.arange(len(groups)), [len(ranks) for ranks in groups])
    for found in hop_links(cluster, members, following):
        place = np.minimum(np.searchsorted(links, found), len(links) - 1)
        hit = (links[place] == found) & (found >= 0)
        lies[place[hit], number[hit]] = True
    met = lies.any(axis=1)
    if met.any():
        sets[met] = 1 + np.unique(np.packbits(lies[met], axis=1), axis=0, return_inverse=True)[1].ravel()
    return sets


def breaks_symmetry(network: Network, end_ps: Times, num_links: int) -> bool:
    """Return whether, in a run, a message and a gradient sum requested one link at the same picosecond."""
    shared = uses_shared_links(network)
    wanting = np.flatnonzero(shared)
    collective, arrival_ps = collectives(network)[wanting], find_arrivals(network, end_ps, shared)[wanting]
    is_sum = collective >= 0
    if is_sum.all() or not is_sum.any():
        return False
    latest = np.zeros(len(network.collective_size), np.int64)
    np.maximum.at(latest, collective[is_sum], arrival_ps[is_sum])
    requests = np.where(is_sum, latest[collective], arrival_ps)
    links, user = links_of(network, wanting)
    of_messages = np.zeros(num_links, np.bool_)
    of_messages[links[~is_sum[user]]] = True
    links, user = links[of_messages[links]], user[of_messages[links]]
    moments = np.unique(requests, return_inverse=True)[1][user] * num_links + links
    return bool(len(np.intersect1d(moments[is_sum[user]], moments[~is_sum[user]])))
