"""The one answer to how long a collective of a cluster takes: measured there, else by datasheet.

    own         the user's rows (`fit_collectives`), where all ranks are of the measured kind of device
    datasheet   `quote_collective`, with the interval that such prices had on public clusters (`errors`)

The first that has something comparable answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from meshwright.cost.collectives.algorithms import check_messages
from meshwright.cost.collectives.datasheet import quote_collective
from meshwright.cost.collectives.errors import datasheet_scale
from meshwright.cost.collectives.fitted import with_interval
from meshwright.cost.collectives.groups import place_group

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from meshwright.cost.collectives.algorithms import CollectiveOp
    from meshwright.cost.collectives.fitted import CollectiveModel
    from meshwright.cost.prediction import Basis, Floats, Predictions
    from meshwright.spec import Cluster

T = TypeVar("T")
Groups = tuple[tuple[int, ...], ...]

_ROOFLINE: tuple[Basis, ...] = ("roofline",)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectivePrices:
    """Answers for one cluster. ``dtype``: what is sent; it matters where more than one was measured.

    ``own``: seconds measured by the user, ``host``: those of a rank's processor; None where there are none.
    """

    cluster: Cluster
    dtype: str = ""
    own: CollectiveModel | None = None
    host: CollectiveModel | None = None
    _kept: dict[Hashable, Any] = field(init=False, repr=False, default_factory=dict)

    def predict(
        self, op: CollectiveOp, ranks: Sequence[int], num_bytes: Floats, concurrent: Groups = ()
    ) -> Predictions:
        """Seconds for each size (shape (n,), bytes of the full tensor), while the ``concurrent`` groups run the same.

        Raises MeasurementError for what is no collective or no size, ClusterError for ranks that cannot be a group.
        """
        check_messages(op, num_bytes)
        found = self._ask(self.own, op, tuple(ranks), num_bytes, concurrent)
        return found if found is not None else self._by_datasheet(op, tuple(ranks), num_bytes, concurrent)

    def predict_host(
        self, op: CollectiveOp, ranks: Sequence[int], num_bytes: Floats, concurrent: Groups = ()
    ) -> Predictions | None:
        """Seconds of processor time that each rank gives meanwhile; None where none were measured. Raises as above."""
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
        """What a model fitted on one kind of device says, if all ranks are of it."""
        group = self._keep(("group", ranks, concurrent), lambda: place_group(self.cluster, ranks, concurrent))
        kinds = self._keep(("kinds", ranks), lambda: {self.cluster.device_kind(rank).name for rank in ranks})
        if model is None or kinds != {model.device}:
            return None
        num_groups = len({frozenset(ranks), *map(frozenset, concurrent)})
        return model.predict(op, group, num_bytes, dtype=self.dtype, num_groups=num_groups)

    def _by_datasheet(
        self, op: CollectiveOp, ranks: tuple[int, ...], num_bytes: Floats, concurrent: Groups
    ) -> Predictions:
        group = self._keep(("group", ranks, concurrent), lambda: place_group(self.cluster, ranks, concurrent))
        tariff = self._keep(("tariff", op, ranks, concurrent), lambda: quote_collective(self.cluster, op, ranks, group))
        scale = datasheet_scale(op, by_nccl=tariff.by_nccl)
        latency_s, seconds = float(tariff.latency_s.min()), tariff.price(num_bytes)
        return with_interval(seconds, latency_s, scale, 1.0, _ROOFLINE * len(num_bytes))

    def _keep(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = compute()
        return cast("T", self._kept[key])
