"""Stages, replicas and devices as shares: a smooth step time with a penalty for memory, and its gradient.

Boundary s is a distribution p_s over the layers' edges, rank d belongs to stage s with share X_ds (softmax of the
logits over stages). Tables are bilinear in the boundaries around a stage, extended to ends before starts by the
opposite sign, so that boundaries gain nothing by crossing:

    T_ks = p_s' seconds[k] p_s+1                        seconds of stage s on kind k; likewise g_s and m_s, in bytes
    r_s  = Σ_d X_ds,   n_s = M / r_s
    t_s  = τ log (Σ_d X_ds exp(T_ks / τ) / r_s)         the slowest rank, softly; k the kind of d
    x_s  = Σ_de X_d,s-1 X_es transfer[d, e] / (r_s-1 r_s)
    e_s  = 2 (1 - 1 / r_s) g_s Σ_de X_ds X_es pair_s / r_s²
    b_s  = (n_s - f) t_s + e_s

    cost = f Σ_s (t_s + x_s) + τ' log Σ_s exp(b_s / τ')
           + λ Σ_ds X_ds max(m_s / memory_d - 1, 0) + λ Σ_s max(1 - r_s, 0)²

The closed form of `stage_repair` has maxima where this has means (links), and the optimizer; it decides in the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.planner.methods.chain.problem import Floats
from meshwright.planner.methods.differentiable.descent import softmax, softmax_gradient
from meshwright.planner.methods.differentiable.stage_arrays import StageSpace


class Logits(NamedTuple):
    """Of boundaries (S - 1, L - 1), and of ranks over stages (D, S)."""

    edges: Floats
    ranks: Floats

    def flat(self) -> Floats:
        """Both as one array."""
        return np.concatenate([self.edges.ravel(), self.ranks.ravel()])

    def like(self, flat: Floats) -> Logits:
        """Both from one array, in these shapes."""
        size = self.edges.size
        return Logits(flat[:size].reshape(self.edges.shape), flat[size:].reshape(self.ranks.shape))


class Smooth:
    """The smooth cost of one number of stages; tables are prepared once."""

    def __init__(self, space: StageSpace, num_stages: int) -> None:
        self._space, self._num_stages = space, num_stages
        self._seconds = np.stack([_both_ways(table) for table in space.seconds])
        self._gradients = _both_ways(space.exchange_bytes)
        replicas = min(max(round(space.num_ranks / num_stages), 1), len(space.held_bytes) - 1)
        self._held, self._more = _both_ways(space.held_bytes[replicas]), _both_ways(space.more_bytes[replicas])
        self._links = np.eye(len(space.transfer_s))[space.link_of]
        self._transfer = np.pad(space.transfer_s, ((0, 0), (0, 1)))
        # The mean stage by the mean device: temperatures are shares of its work in a step.
        whole = float(space.seconds[space.kind_of, 0, -1].mean()) / num_stages
        self.stage_s, self.step_s = whole, whole * space.num_microbatches * num_stages / space.num_ranks

    def gradient(self, logits: Logits, heat: float, smooth: float, penalty: float) -> tuple[float, Logits]:
        """The cost and its gradient; ``heat`` of the shares, ``smooth`` of maxima and ``penalty`` over the step."""
        space, num_stages = self._space, self._num_stages
        inner, ranks = softmax(logits.edges / heat), softmax(logits.ranks / heat)
        edges = np.zeros((num_stages + 1, space.num_layers + 1))
        edges[0, 0] = edges[-1, -1] = 1.0
        edges[1:-1, 1:-1] = inner
        starts, stops = edges[:-1], edges[1:]
        replicas = np.maximum(ranks.sum(axis=0), 1e-6)
        rounds, fills = space.num_microbatches / replicas, space.num_fills
        by_replicas, by_ranks = np.zeros(num_stages), np.zeros_like(ranks)
        # t: the slowest rank of each stage.
        of_kind = np.einsum("si,kij,sj->ks", starts, self._seconds, stops)
        each, tau = of_kind[space.kind_of], smooth * self.stage_s
        top = each.max(axis=0)
        weights = ranks * np.exp((each - top) / tau)
        sums = np.maximum(weights.sum(axis=0), 1e-300)
        seconds = top + tau * np.log(sums / replicas)
        # x and e: links by shares.
        pairs = np.einsum("ds,es,del->sl", ranks[:, :-1], ranks[:, 1:], self._links)
        norm = replicas[:-1] * replicas[1:]
        by_link = edges[1:-1] @ self._transfer.T
        transfer = (pairs * by_link).sum(axis=1) / norm
        per_byte = np.einsum("ds,de,es->s", ranks, space.pair_s, ranks) / replicas**2
        gradients = np.einsum("si,ij,sj->s", starts, self._gradients, stops)
        turns = 2 * np.maximum(1 - 1 / replicas, 0)
        bottleneck = (rounds - fills) * seconds + turns * gradients * per_byte
        tau_step = smooth * self.step_s
        slow = softmax(bottleneck / tau_step)
        largest = bottleneck.max() + tau_step * np.log(np.exp((bottleneck - bottleneck.max()) / tau_step).sum())
        # Memory.
        flights = self._in_flight(rounds)
        held = np.einsum("si,ij,sj->s", starts, self._held, stops)
        more = np.einsum("si,ij,sj->s", starts, self._more, stops)
        over = (held + (flights - 1) * more) / space.memory_limit[:, None] - 1
        penalty = penalty * self.step_s
        empty = np.maximum(1 - replicas, 0)
        cost = fills * (seconds.sum() + transfer.sum()) + largest
        cost += penalty * ((ranks * np.maximum(over, 0)).sum() + (empty**2).sum())

        # Backwards: by t, by x, by e, by memory, to replicas, ranks and edges.
        by_seconds = fills + slow * (rounds - fills)
        by_replicas -= slow * seconds * rounds / replicas + by_seconds * tau / replicas + penalty * 2 * empty
        by_ranks += by_seconds * tau * np.exp((each - top) / tau) / sums
        by_kind = np.stack(
            [np.where((space.kind_of == k)[:, None], weights, 0).sum(axis=0) for k in range(len(of_kind))]
        )
        by_table = by_seconds * by_kind / sums
        by_replicas[:-1] -= fills * transfer / replicas[:-1]
        by_replicas[1:] -= fills * transfer / replicas[1:]
        carried = np.einsum("sl,del->sde", by_link, self._links) * (fills / norm)[:, None, None]
        by_ranks[:, :-1] += np.einsum("sde,es->ds", carried, ranks[:, 1:])
        by_ranks[:, 1:] += np.einsum("sde,ds->es", carried, ranks[:, :-1])
        scale = slow * turns * gradients
        by_replicas += slow * gradients * per_byte * np.where(replicas > 1, 2 / replicas**2, 0)
        by_replicas -= 2 * scale * per_byte / replicas
        by_ranks += 2 * scale * (space.pair_s @ ranks) / replicas**2
        excess = penalty * (ranks * (over > 0) / space.memory_limit[:, None]).sum(axis=0)
        by_replicas -= np.where(flights == rounds, excess * more * rounds / replicas, 0)
        by_ranks += penalty * np.maximum(over, 0) + by_replicas
        tables = np.einsum("ks,kij->sij", by_table, self._seconds)
        tables += (slow * turns * per_byte)[:, None, None] * self._gradients
        tables += excess[:, None, None] * self._held + (excess * (flights - 1))[:, None, None] * self._more
        by_edges = np.zeros_like(edges)
        by_edges[:-1] += np.einsum("sij,sj->si", tables, stops)
        by_edges[1:] += np.einsum("sij,si->sj", tables, starts)
        by_edges[1:-1] += fills * (pairs / norm[:, None]) @ self._transfer
        return float(cost), Logits(
            softmax_gradient(inner, by_edges[1:-1, 1:-1]) / heat, softmax_gradient(ranks, by_ranks) / heat
        )

    def _in_flight(self, rounds: Floats) -> Floats:
        """Microbatches in flight as if stages had equally many ranks: all, or 1F1B's."""
        if self._space.num_fills == 0:
            return np.ones(self._num_stages)
        if self._space.keeps_all:
            return rounds
        return np.minimum(np.arange(self._num_stages, 0, -1), rounds)


def _both_ways(table: Floats) -> Floats:
    """A table (L, L + 1) of stages i:j, for all pairs of edges (L + 1, L + 1): j:i counts against i:j."""
    whole = np.zeros((len(table) + 1, len(table) + 1))
    whole[:-1] = np.triu(table, 1)
    return whole - whole.T
