"""The cost of a collective on a cluster: measured on the cluster, else measured elsewhere, else by datasheet.

    own         the user's measurements (`fit_links`), if all ranks are of the measured device kind
    shipped     public measurements of nodes with the same device kind and link (`shipped_fits`), inside a node
    datasheet   `quote_collective`, with the errors of such estimates on public clusters as interval (`datasheet`)

The first applicable source is used. Datasheet estimates are mostly too fast. Two lower bounds correct them: a link
takes at least the measured time of a faster link; and across nodes an all-reduce, all-gather, reduce-scatter or
broadcast takes at least the time of its ranks on one node.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import log
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from meshwright.cost.collectives.algorithms import Algorithm, CollectiveOp, check_messages
from meshwright.cost.collectives.collective_groups import CollectiveGroup, place_group
from meshwright.cost.collectives.datasheet import Tariff, bound_cost, datasheet_scale, quote_collective
from meshwright.cost.collectives.shipped_fits import load_shipped
from meshwright.cost.collectives.uneven_links import LinkModels, even_links, find_slowness
from meshwright.cost.costs import Basis, Floats, Predictions

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from meshwright.cost.collectives.fitted import CollectiveModel
    from meshwright.spec import Cluster

T = TypeVar("T")
Groups = tuple[tuple[int, ...], ...]

_ROOFLINE: tuple[Basis, ...] = ("roofline",)
# The bytes through a port do not decrease with the number of ranks.
_GROWING: tuple[CollectiveOp, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveCosts:
    """The costs of collectives on one cluster.

    ``dtype``: data type of the messages; used only if several types were measured. ``own``: the user's measured
    seconds by slowness of links (`uneven_links`); ``host``: the measured CPU seconds of a rank; None if not measured.
    ``changed``: the same cluster with other links, or None. With ``changed``, the seconds on ``cluster`` are multiplied
    by the ratio of the datasheet costs on the two clusters.
    """

    cluster: Cluster
    dtype: str = ""
    own: LinkModels = field(default_factory=dict)
    host: CollectiveModel | None = None
    changed: Cluster | None = None
    _kept: dict[Hashable, Any] = field(init=False, repr=False, default_factory=dict)

    def predict(
        self,
        op: CollectiveOp,
        ranks: Sequence[int],
        num_bytes: Floats,
        concurrent: Groups = (),
        algorithm: Algorithm | None = None,
    ) -> Predictions:
        """Return the seconds of a collective among ``ranks`` for each size (shape (n,), bytes of the full tensor).

        The ``concurrent`` groups run the same collective at the same time. With an ``algorithm``, the datasheet is
        used, because measurement tables do not name the algorithm. Raises MeasurementError for an invalid collective or
        size, ClusterError for ranks that cannot form a group.
        """
        check_messages(op, num_bytes)
        if algorithm is not None:
            return self._by_datasheet(op, tuple(ranks), num_bytes, concurrent, algorithm)
        self._place(tuple(ranks), concurrent)
        found, usual = self._ask_own(op, tuple(ranks), num_bytes, concurrent)
        if found is None and len(ranks) > 1:
            found, usual = self._ask_shipped(op, tuple(ranks), num_bytes, concurrent), self.cluster
        if found is None:
            found, usual = self._by_datasheet(op, tuple(ranks), num_bytes, concurrent), self.cluster
        actual = self.changed or self.cluster
        return found if usual is actual else self._scaled(found, usual, actual, op, tuple(ranks), num_bytes, concurrent)

    def predict_host(
        self, op: CollectiveOp, ranks: Sequence[int], num_bytes: Floats, concurrent: Groups = ()
    ) -> Predictions | None:
        """Return the CPU seconds that each rank spends during the collective, for each size; None if not measured.

        Raises as `predict`.
        """
        check_messages(op, num_bytes)
        return self._ask(self.host, op, tuple(ranks), num_bytes, concurrent)

    def _ask(
        self,
        model: CollectiveModel | None,
        op: CollectiveOp,
        ranks: tuple[int, ...],
        num_bytes: Floats,
        concurrent: Groups,
    ) -> Predictions | None:
        """Return the prediction of a model fitted on one device kind, if all ranks are of it."""
        group = self._place(ranks, concurrent)
        kinds = self._keep(("kinds", ranks), lambda: {self.cluster.device_kind(rank).name for rank in ranks})
        if model is None or kinds != {model.device}:
            return None
        num_groups = len({frozenset(ranks), *map(frozenset, concurrent)})
        return model.predict(op, group, num_bytes, dtype=self.dtype, num_groups=num_groups)

    def _ask_shipped(
        self, op: CollectiveOp, ranks: tuple[int, ...], num_bytes: Floats, concurrent: Groups
    ) -> Predictions | None:
        """Return the prediction from public measurements of such nodes, widened for another machine."""
        shipped = load_shipped()
        model = self._keep(("shipped", ranks), lambda: shipped.find(self.cluster, ranks))
        found = self._ask(model, op, ranks, num_bytes, concurrent)
        return None if found is None else shipped.widen(found)

    def _by_datasheet(
        self,
        op: CollectiveOp,
        ranks: tuple[int, ...],
        num_bytes: Floats,
        concurrent: Groups,
        algorithm: Algorithm | None = None,
    ) -> Predictions:
        group, tariff = self._quote(self.cluster, op, ranks, concurrent, algorithm)
        scale = datasheet_scale(op, by_nccl=tariff.by_nccl, across=group.num_nodes > 1)
        latency_s, seconds = float(tariff.latency_s.min()), tariff.estimate(num_bytes)
        low_s, high_s = bound_cost(seconds, latency_s, scale)
        found = Predictions(seconds=seconds, low_s=low_s, high_s=high_s, basis=_ROOFLINE * len(num_bytes))
        if algorithm is not None:
            return found
        if group.num_nodes == 1:
            # A link slower than a measured one is not faster than that, whatever its datasheet says.
            shipped = load_shipped()
            model = self._keep(("faster", ranks), lambda: shipped.find_faster(self.cluster, ranks))
            faster = self._ask(model, op, ranks, num_bytes, concurrent) if len(ranks) > 1 else None
            return found if faster is None else _not_below(found, shipped.widen(faster))
        return self._not_below_inside(found, op, ranks, num_bytes)

    def _even(self, slowness: float) -> Cluster:
        return self._keep(("even", slowness), lambda: even_links(self.cluster, slowness))

    def _ask_own(
        self, op: CollectiveOp, ranks: tuple[int, ...], num_bytes: Floats, concurrent: Groups
    ) -> tuple[Predictions | None, Cluster]:
        """Return the prediction from the user's measurements, None without comparable ones, and the cluster it is for.

        Of the models with such groups, else of all, the one of the most similar links is used.
        """
        slowness = 1.0
        if len(self.own) > 1:
            even, actual = (self._quote(each, op, ranks, concurrent)[1] for each in (self._even(1.0), self.cluster))
            slowness = find_slowness([even], [actual])

        def distance(known: float) -> tuple[bool, float]:
            return not self.own[known].has_measured(op, self._place(ranks, concurrent)), abs(log(known / slowness))

        for known in sorted(self.own, key=distance):
            found = self._ask(self.own[known], op, ranks, num_bytes, concurrent)
            if found is not None:
                return found, self._even(known)
        return None, self.cluster

    def _scaled(
        self,
        found: Predictions,
        usual: Cluster,
        actual: Cluster,
        op: CollectiveOp,
        ranks: tuple[int, ...],
        num_bytes: Floats,
        concurrent: Groups,
    ) -> Predictions:
        """Return a prediction for the usual links, scaled to the actual ones."""
        group, tariff = self._quote(usual, op, ranks, concurrent)
        usual_s = tariff.estimate(num_bytes)
        actual_s = self._quote(actual, op, ranks, concurrent)[1].estimate(num_bytes)
        factor = np.divide(actual_s, usual_s, out=np.ones_like(usual_s), where=usual_s > 0)
        scaled = replace(
            found, seconds=found.seconds * factor, low_s=found.low_s * factor, high_s=found.high_s * factor
        )
        return scaled if group.num_nodes == 1 else self._not_below_inside(scaled, op, ranks, num_bytes)

    def _not_below_inside(
        self, found: Predictions, op: CollectiveOp, ranks: tuple[int, ...], num_bytes: Floats
    ) -> Predictions:
        """Return a prediction for several nodes, at least that for the ranks on the fullest of them."""
        if op not in _GROWING:
            return found
        nodes = [self.cluster.node_index(rank) for rank in ranks]
        fullest = max(set(nodes), key=nodes.count)
        inside = [rank for rank, node in zip(ranks, nodes, strict=True) if node == fullest]
        return _not_below(found, self.predict(op, inside, num_bytes))

    def _quote(
        self,
        cluster: Cluster,
        op: CollectiveOp,
        ranks: tuple[int, ...],
        concurrent: Groups,
        algorithm: Algorithm | None = None,
    ) -> tuple[CollectiveGroup, Tariff]:
        """Return the place of a group, and its datasheet tariff on a cluster that differs in links only."""
        group = self._place(ranks, concurrent)
        # All clusters that are asked for are kept by this object, so that no other one gets their ids.
        key = ("tariff", id(cluster), op, ranks, concurrent, algorithm)
        return group, self._keep(key, lambda: quote_collective(cluster, op, ranks, group, algorithm, concurrent))

    def _place(self, ranks: tuple[int, ...], concurrent: Groups) -> CollectiveGroup:
        return self._keep(("group", ranks, concurrent), lambda: place_group(self.cluster, ranks, concurrent))

    def _keep(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = compute()
        return cast("T", self._kept[key])


def _not_below(found: Predictions, least: Predictions) -> Predictions:
    """Return the longer of two predictions for each size, with its basis."""
    longer = least.seconds > found.seconds
    pairs = zip(found.basis, least.basis, longer, strict=True)
    return Predictions(
        seconds=np.maximum(found.seconds, least.seconds),
        low_s=np.maximum(found.low_s, least.low_s),
        high_s=np.maximum(found.high_s, least.high_s),
        basis=tuple(other if is_longer else own for own, other, is_longer in pairs),
    )
