"""A smooth step time with a memory penalty (`Smooth`), over relaxed stages and devices; its gradient; descent.

Boundary s is a distribution p_s over the edges between layers. Rank d belongs to stage s with probability X_ds (a
softmax of logits over stages). Tables are bilinear in the two boundaries of a stage. If its end comes before its start,
the entry has the opposite sign, so that crossing boundaries gain nothing:

    T_ks = p_s' seconds[k] p_s+1                        seconds of stage s on kind k; likewise g_s and m_s, in bytes
    r_s  = Σ_d X_ds,   n_s = M / r_s
    t_s  = τ log (Σ_d X_ds exp(T_ks / τ) / r_s)         the slowest rank, softly; k the kind of d
    x_s  = Σ_de X_d,s-1 X_es transfer[d, e] / (r_s-1 r_s)
    e_s  = 2 (1 - 1 / r_s) g_s Σ_de X_ds X_es pair_s / r_s²
    b_s  = (n_s - f) t_s + e_s

    cost = f Σ_s (t_s + x_s) + τ' log Σ_s exp(b_s / τ')
           + λ Σ_ds X_ds max(m_s / memory_d - 1, 0) + λ Σ_s max(1 - r_s, 0)²

with S stages, M microbatches, f (`num_fills`) as in `stage_arrays`, temperatures τ and τ', and the penalty λ. The final
choice uses the closed form of `stage_repair`, which has maxima instead of means over links, and adds the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, zip_longest
from typing import NamedTuple

import numpy as np

from meshwright.compiled import compiled
from meshwright.planner.methods.differentiable.stage_arrays import Floats, Integers, StageSpace
from meshwright.planner.methods.slicing.assemble import make_problem
from meshwright.planner.methods.slicing.dynamic_program import SlicingProblem, memory_of
from meshwright.planner.rank_layouts import Layout, find_places
from meshwright.planner.space import Space


def make_stages(space: Space, microbatch_size: int, schedule: str) -> StageSpace:
    """Return the arrays (`StageSpace`) for one setting, microbatch size and schedule."""
    tables, num_ranks = space.tables(microbatch_size), space.num_ranks
    shape = len(tables.graph.layers), len(tables.graph.layers) + 1
    places = find_places(
        Layout(name="stage-major", num_ranks=num_ranks),
        space.cluster,
        space.cost,
        replicas=(1,),
        bucket_bytes=space.exchange.bucket_bytes,
        memory=space.memory,
    )
    links, link_of, pair_s = _find_links(space)
    problem = make_problem(
        tables,
        replace(places, links=links),
        in_flight=np.ones((num_ranks, num_ranks + 1), np.int64),
        beside=np.zeros(shape),
        exchange=space.exchange,
        workload=space.workload,
        cost=space.cost,
        offload=space.offload,
    )
    most = min(num_ranks, tables.num_microbatches)
    # The peak memory of a step is convex in the microbatches in flight: the line is an upper bound.
    flights = tables.num_microbatches if schedule == "gpipe" else most
    held, full = _weigh(problem, most), _weigh(problem._replace(in_flight=flights * problem.in_flight), most)
    return StageSpace(
        num_microbatches=tables.num_microbatches,
        num_fills=problem.num_fills,
        keeps_all=schedule == "gpipe",
        overlap=problem.overlap,
        seconds=problem.seconds,
        backward_s=problem.backward_s,
        optimizer_s=problem.optimizer_s,
        exchange_bytes=problem.exchange_bytes,
        transfer_s=problem.transfer_s,
        held_bytes=held,
        more_bytes=(full - held) / max(flights - 1, 1),
        kind_of=places.kind_of[:, 1].copy(),
        link_of=link_of,
        node_of=np.array([space.cluster.node_index(rank) for rank in range(num_ranks)]),
        pair_s=pair_s,
        group_factor=_find_factors(space, pair_s, most),
        memory_limit=places.memory_limit[:, 1].copy(),
    )


def _find_links(space: Space) -> tuple[tuple[tuple[int, int], ...], Integers, Floats]:
    """Return pairs of ranks that represent a link each (the first: no link), each pair's link, and seconds per byte."""
    cluster, bucket = space.cluster, space.exchange.bucket_bytes
    links: list[tuple[int, int]] = [(0, 0)]
    link_of = np.zeros((space.num_ranks, space.num_ranks), np.int64)
    pair_s = np.zeros(link_of.shape)
    known: dict[object, int] = {}
    for pair in combinations(range(space.num_ranks), 2):
        key = cluster.link_between(*pair), cluster.node_index(pair[0]) == cluster.node_index(pair[1])
        if key not in known:
            known[key] = len(links)
            links.append(pair)
        seconds = space.cost.collective_seconds("all_reduce", links[known[key]], bucket) / bucket
        for one, other in (pair, pair[::-1]):
            link_of[one, other], pair_s[one, other] = known[key], seconds
    return tuple(links), link_of, pair_s


def _find_factors(space: Space, pair_s: Floats, most: int) -> Floats:
    """Return the factor of r ranks on a number of nodes over their slowest pair.

    Ranks are taken from the largest nodes in turn.
    """
    ranks: list[list[int]] = [[] for _ in space.cluster.nodes]
    for rank in range(space.num_ranks):
        ranks[space.cluster.node_index(rank)].append(rank)
    ranks = sorted(filter(None, ranks), key=len, reverse=True)
    bucket = space.exchange.bucket_bytes
    factors = np.repeat(2 * (1 - 1 / np.maximum(np.arange(most + 1), 1))[:, None], len(space.cluster.nodes) + 1, axis=1)
    for num_nodes in range(1, len(ranks) + 1):
        dealt = [rank for turn in zip_longest(*ranks[:num_nodes]) for rank in turn if rank is not None]
        for r in range(max(num_nodes, 2), min(len(dealt), most) + 1):
            group = tuple(sorted(dealt[:r]))
            slowest = pair_s[np.ix_(group, group)].max()
            factors[r, num_nodes] = space.cost.collective_seconds("all_reduce", group, bucket) / bucket / slowest
    return factors


@compiled
def _weigh(problem: SlicingProblem, most: int) -> Floats:
    """Return the bytes of every stage with 1 to ``most`` replicas, with the problem's microbatches in flight."""
    num_layers = problem.static_bytes.shape[0]
    table = np.zeros((most + 1, num_layers, num_layers + 1))
    for r in range(1, most + 1):
        for i in range(num_layers):
            for j in range(i + 1, num_layers + 1):
                table[r, i, j] = memory_of(problem, i, j, 0, r)
    return table


_FIRST, _SECOND, _TINY = 0.9, 0.999, 1e-8


# Adam on one array. Source: Kingma and Ba, "Adam" (ICLR 2015), algorithm 1, with its constants except the rate.
def descend(gradient_at: Callable[[Floats, float], Floats], start: Floats, num_steps: int, rate: float) -> Floats:
    """Return the point after ``num_steps`` steps of Adam from ``start``, at learning rate ``rate``.

    ``gradient_at(point, progress)`` returns the gradient; ``progress`` rises from 0 at the first step to 1 at the last.
    """
    point, mean, square = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for step in range(num_steps):
        gradient = gradient_at(point, step / max(num_steps - 1, 1))
        mean += (1 - _FIRST) * (gradient - mean)
        square += (1 - _SECOND) * (gradient**2 - square)
        unbiased = np.sqrt(square / (1 - _SECOND ** (step + 1))) + _TINY
        point -= rate * mean / (1 - _FIRST ** (step + 1)) / unbiased
    return point


def anneal(start: float, end: float, progress: float) -> float:
    """Return the geometric interpolation from ``start`` (progress 0) to ``end`` (progress 1)."""
    return float(start * (end / start) ** progress)


def softmax(logits: Floats) -> Floats:
    """Return the softmax along the last axis."""
    shares: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return shares


def softmax_gradient(shares: Floats, gradient: Floats) -> Floats:
    """Return the gradient with respect to the logits, from ``gradient`` with respect to their softmax ``shares``."""
    centred: Floats = shares * (gradient - (shares * gradient).sum(axis=-1, keepdims=True))
    return centred


class Logits(NamedTuple):
    """The optimised variables: logits of boundaries over edges, (S - 1, L - 1), and of ranks over stages, (D, S)."""

    edges: Floats
    ranks: Floats

    def flat(self) -> Floats:
        """Return both arrays, flattened into one."""
        return np.concatenate([self.edges.ravel(), self.ranks.ravel()])

    def like(self, flat: Floats) -> Logits:
        """Return the logits in a flattened array (as `flat` makes it), with the shapes of these logits."""
        size = self.edges.size
        return Logits(flat[:size].reshape(self.edges.shape), flat[size:].reshape(self.ranks.shape))


class _Terms(NamedTuple):
    """Values of each stage (S,) under the names of the model.

    ``weights`` (D, S) are those of ranks in t, ``over`` (D, S) the excess over memory.
    """

    replicas: Floats
    rounds: Floats
    weights: Floats
    seconds: Floats
    pairs: Floats
    by_link: Floats
    transfer: Floats
    turns: Floats
    gradients: Floats
    per_byte: Floats
    bottleneck: Floats
    flights: Floats
    more: Floats
    over: Floats


class Smooth:
    """The smooth cost of layouts with ``num_stages`` stages, and its gradient."""

    def __init__(self, space: StageSpace, num_stages: int) -> None:
        self._space, self._num_stages = space, num_stages
        self._seconds = np.stack([_both_ways(table) for table in space.seconds])
        self._gradients = _both_ways(space.exchange_bytes)
        replicas = min(max(round(space.num_ranks / num_stages), 1), len(space.held_bytes) - 1)
        self._held, self._more = _both_ways(space.held_bytes[replicas]), _both_ways(space.more_bytes[replicas])
        self._links = np.eye(len(space.transfer_s))[space.link_of]
        self._transfer = np.pad(space.transfer_s, ((0, 0), (0, 1)))
        # The mean stage on the mean device: temperatures are shares of its work in a step.
        whole = float(space.seconds[space.kind_of, 0, -1].mean()) / num_stages
        self.stage_s, self.step_s = whole, whole * space.num_microbatches * num_stages / space.num_ranks

    def gradient(self, logits: Logits, heat: float, smooth: float, penalty: float) -> tuple[float, Logits]:
        """Return the cost in seconds, and its gradient with respect to the logits.

        ``heat`` is the temperature of the softmaxes, ``smooth`` that of the maxima, relative to the step (or stage)
        time of a mean device. ``penalty`` is the weight of missing memory, relative to the step time.
        """
        inner, ranks = softmax(logits.edges / heat), softmax(logits.ranks / heat)
        edges = np.zeros((self._num_stages + 1, self._space.num_layers + 1))
        edges[0, 0] = edges[-1, -1] = 1.0
        edges[1:-1, 1:-1] = inner
        terms = self._terms(edges, ranks, smooth)
        by_ranks, by_tables, by_edges = self._by_ranks(ranks, terms, smooth, penalty * self.step_s)
        by_edges[:-1] += np.einsum("sij,sj->si", by_tables, edges[1:])
        by_edges[1:] += np.einsum("sij,si->sj", by_tables, edges[:-1])
        by_logits = Logits(
            softmax_gradient(inner, by_edges[1:-1, 1:-1]) / heat, softmax_gradient(ranks, by_ranks) / heat
        )
        return self._cost(ranks, terms, smooth, penalty * self.step_s), by_logits

    def _terms(self, edges: Floats, ranks: Floats, smooth: float) -> _Terms:
        space, starts, stops = self._space, edges[:-1], edges[1:]
        replicas = np.maximum(ranks.sum(axis=0), 1e-6)
        rounds = space.num_microbatches / replicas
        each = np.einsum("si,kij,sj->ks", starts, self._seconds, stops)[space.kind_of]
        top, tau = each.max(axis=0), smooth * self.stage_s
        weights = np.exp((each - top) / tau)
        sums = np.maximum((ranks * weights).sum(axis=0), 1e-300)
        seconds = top + tau * np.log(sums / replicas)
        norm = replicas[:-1] * replicas[1:]
        pairs = np.einsum("ds,es,del->sl", ranks[:, :-1], ranks[:, 1:], self._links) / norm[:, None]
        by_link = edges[1:-1] @ self._transfer.T
        per_byte = np.einsum("ds,de,es->s", ranks, space.pair_s, ranks) / replicas**2
        gradients = np.einsum("si,ij,sj->s", starts, self._gradients, stops)
        turns = 2 * np.maximum(1 - 1 / replicas, 0)
        flights = self._in_flight(rounds)
        more = np.einsum("si,ij,sj->s", starts, self._more, stops)
        held = np.einsum("si,ij,sj->s", starts, self._held, stops) + (flights - 1) * more
        return _Terms(
            replicas=replicas,
            rounds=rounds,
            weights=weights / sums,
            seconds=seconds,
            pairs=pairs,
            by_link=by_link,
            transfer=(pairs * by_link).sum(axis=1),
            turns=turns,
            gradients=gradients,
            per_byte=per_byte,
            bottleneck=(rounds - space.num_fills) * seconds + turns * gradients * per_byte,
            flights=flights,
            more=more,
            over=held / space.memory_limit[:, None] - 1,
        )

    def _cost(self, ranks: Floats, terms: _Terms, smooth: float, penalty: float) -> float:
        tau, top = smooth * self.step_s, terms.bottleneck.max()
        cost = self._space.num_fills * (terms.seconds.sum() + terms.transfer.sum())
        cost += top + tau * np.log(np.exp((terms.bottleneck - top) / tau).sum())
        empty = np.maximum(1 - terms.replicas, 0)
        return float(cost + penalty * ((ranks * np.maximum(terms.over, 0)).sum() + (empty**2).sum()))

    def _by_ranks(self, ranks: Floats, terms: _Terms, smooth: float, penalty: float) -> tuple[Floats, Floats, Floats]:
        """Return the derivatives by X, by the bilinear tables of each stage, and by edges (through links only)."""
        space, fills, replicas, tau = self._space, self._space.num_fills, terms.replicas, smooth * self.stage_s
        slow = softmax(terms.bottleneck / (smooth * self.step_s))
        # By t, in the first microbatch and the slowest stage's others.
        by_seconds = fills + slow * (terms.rounds - fills)
        by_replicas = -slow * terms.seconds * terms.rounds / replicas - by_seconds * tau / replicas
        by_ranks = by_seconds * tau * terms.weights
        kinds = np.eye(len(space.seconds))[space.kind_of]
        tables = np.einsum("ks,kij->sij", by_seconds * (kinds.T @ (ranks * terms.weights)), self._seconds)
        # By x.
        by_replicas[:-1] -= fills * terms.transfer / replicas[:-1]
        by_replicas[1:] -= fills * terms.transfer / replicas[1:]
        norm = (replicas[:-1] * replicas[1:])[:, None, None]
        carried = np.einsum("sl,del->sde", terms.by_link, self._links) * fills / norm
        by_ranks[:, :-1] += np.einsum("sde,es->ds", carried, ranks[:, 1:])
        by_ranks[:, 1:] += np.einsum("sde,ds->es", carried, ranks[:, :-1])
        by_edges = np.zeros((self._num_stages + 1, space.num_layers + 1))
        by_edges[1:-1] += fills * terms.pairs @ self._transfer
        # By e.
        scale = slow * terms.turns * terms.gradients
        by_replicas += slow * terms.gradients * terms.per_byte * np.where(replicas > 1, 2 / replicas**2, 0)
        by_replicas -= 2 * scale * terms.per_byte / replicas
        by_ranks += 2 * scale * (space.pair_s @ ranks) / replicas**2
        tables += (slow * terms.turns * terms.per_byte)[:, None, None] * self._gradients
        # By memory, and by stages without a rank.
        excess = penalty * (ranks * (terms.over > 0) / space.memory_limit[:, None]).sum(axis=0)
        by_replicas -= np.where(terms.flights == terms.rounds, excess * terms.more * terms.rounds / replicas, 0)
        by_replicas -= 2 * penalty * np.maximum(1 - replicas, 0)
        tables += excess[:, None, None] * self._held + (excess * (terms.flights - 1))[:, None, None] * self._more
        return by_ranks + penalty * np.maximum(terms.over, 0) + by_replicas, tables, by_edges

    def _in_flight(self, rounds: Floats) -> Floats:
        """Return microbatches in flight as if stages had equal numbers of ranks: all, or those of 1F1B."""
        if self._space.num_fills == 0:
            return np.ones(self._num_stages)
        if self._space.keeps_all:
            return rounds
        return np.minimum(np.arange(self._num_stages, 0, -1), rounds)


def _both_ways(table: Floats) -> Floats:
    """Return the table (L, L + 1) of stages i:j for all pairs of edges, shape (L + 1, L + 1).

    Entry j:i has the opposite sign of i:j.
    """
    whole = np.zeros((len(table) + 1, len(table) + 1))
    whole[:-1] = np.triu(table, 1)
    return whole - whole.T
