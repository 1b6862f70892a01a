"""What a search of the SOAP space found: the strategy, how it was found, as a table, as words and as a document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.planner.methods.flexflow.chain import ACCEPTED, CUT, SIMULATED, WORSE, WORSE_ACCEPTED
from meshwright.planner.methods.flexflow.configure import configure_all
from meshwright.planner.methods.flexflow.full import simulate_all
from meshwright.planner.methods.flexflow.soap_arrays import HELD, TIME, Integers, empty_schedule, empty_strategy
from meshwright.spec import DocumentError, format_bytes, format_seconds
from meshwright.spec.plan_files import STRATEGY
from meshwright.spec.units import PICOSECONDS_PER_SECOND

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwright.planner.methods.flexflow.soap_chains import StrategyArrays
    from meshwright.planner.methods.flexflow.soap_spaces import SoapSpace

SCHEMA = f"meshwright/{STRATEGY}/1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SoapResult:
    """A strategy (``candidates`` (n,), ``devices`` (n, P)) and its simulated seconds.

    ``history``: (proposals of its chain, best step so far in s). ``starts``: step of each start, and of the best that a
    chain reached from there. ``tally``: see `chain`.
    """

    space: SoapSpace
    candidates: Integers
    devices: Integers
    step_s: float
    history: tuple[tuple[int, float], ...]
    starts: Mapping[str, tuple[float, float]]
    tally: tuple[int, ...]
    seed: int
    wall_s: float

    @property
    def num_simulated(self) -> int:
        """Number of simulated proposals of all chains. Proposals that equal the current strategy are not simulated."""
        return self.tally[SIMULATED]

    @property
    def acceptance_rate(self) -> float:
        """Share of simulated proposals that were accepted."""
        return self.tally[ACCEPTED] / max(self.num_simulated, 1)

    @property
    def degrees(self) -> tuple[tuple[int, ...], ...]:
        """The degrees of the dims of each layer."""
        rows = self.space.soap.degrees[self.candidates].tolist()
        return tuple(tuple(row[: len(layer.dims)]) for row, layer in zip(rows, self.space.layers, strict=True))

    @property
    def is_split(self) -> bool:
        """Whether some layer has several parts."""
        return bool((self.space.soap.parts[self.candidates] > 1).any())

    def configurations(self) -> list[dict[str, Any]]:
        """Return for each layer its name, degrees by dim and devices of its parts."""
        soap = self.space.soap
        rows = []
        for at, layer in enumerate(self.space.layers):
            degrees = soap.degrees[self.candidates[at]]
            split = [(dim.kind, int(degree)) for dim, degree in zip(layer.dims, degrees, strict=False) if degree > 1]
            count = int(soap.parts[self.candidates[at]])
            rows.append({"layer": layer.name, "degrees": split, "devices": self.devices[at, :count].tolist()})
        return rows

    def explain(self) -> str:
        """Return sentences on the step, on the busiest device and links, and on the search."""
        strategy, schedule = empty_strategy(self.space.soap), empty_schedule(self.space.soap)
        configure_all(self.space.soap, strategy, self.candidates, self.devices)
        simulate_all(self.space.soap, strategy, schedule)
        soap, width = self.space.soap, 1 << self.space.soap.shift
        num_passes = 2 * len(soap.trains) * width
        first_sync = num_passes + 2 * len(soap.source) * width**2
        order = schedule.order[: schedule.num_run[0]]
        times = strategy.task[order, TIME] / PICOSECONDS_PER_SECOND
        passes, syncs = order < num_passes, order >= first_sync
        busy = np.zeros(len(soap.kind))
        np.add.at(busy, strategy.pool[strategy.task[order[passes], HELD] + 1], times[passes])
        moved = int((~passes & ~syncs).sum())
        longer = max(self.tally[WORSE], 1)
        sums = "after the barrier" if soap.barrier else f"{int(syncs.sum())} sums of gradients, "
        sums += "" if soap.barrier else f"{format_seconds(float(times[syncs].sum()))} of links"
        return "\n".join(
            [
                f"Step {format_seconds(self.step_s)}: {len(self.space.layers)} layers on {len(soap.kind)} devices.",
                f"Devices compute {format_seconds(float(busy.min()))} to {format_seconds(float(busy.max()))} of it.",
                f"{moved} transfers, {format_seconds(float(times[~passes & ~syncs].sum()))} of links; {sums}.",
                f"Fullest device {format_bytes(int(strategy.memory_bytes.max()))}.",
                f"{self.num_simulated:,} proposals simulated in {format_seconds(self.wall_s)}, "
                f"{self.tally[CUT]:,} until it was certain that they are refused; "
                f"{self.acceptance_rate:.1%} accepted, {self.tally[WORSE_ACCEPTED] / longer:.1%} of those that were "
                f"longer. Seed {self.seed}.",
                *(
                    f"From {name}: {format_seconds(first)} to {format_seconds(last)}."
                    for name, (first, last) in self.starts.items()
                ),
            ]
        )

    def document(self) -> dict[str, Any]:
        """Return the strategy as plain data; `read_strategy` reads it."""
        return {
            "schema": SCHEMA,
            "graph_hash": self.space.graph.content_hash,
            "cluster": self.space.cluster.name,
            "global_batch": self.space.workload.global_batch,
            "step_s": self.step_s,
            "seed": self.seed,
            "layers": [
                {
                    "name": layer.name,
                    "degrees": list(self.degrees[at]),
                    "devices": row["devices"],
                }
                for at, (layer, row) in enumerate(zip(self.space.layers, self.configurations(), strict=True))
            ],
        }


def read_strategy(space: SoapSpace, document: Mapping[str, Any]) -> StrategyArrays:
    """Return the candidates and devices of a strategy's document.

    Raises DocumentError if it is not a strategy of this space.
    """
    layers = document.get("layers", [])
    fits = document.get("schema") == SCHEMA and document.get("graph_hash") == space.graph.content_hash
    if not fits or len(layers) != len(space.layers):
        raise DocumentError(
            f"A document of schema {document.get('schema')!r} with {len(layers)} layers of graph "
            f"{document.get('graph_hash')!r} was given; expected {SCHEMA!r} with {len(space.layers)} layers of "
            f"{space.graph.content_hash!r}. Search again for this graph."
        )
    soap = space.soap
    candidates = np.zeros(len(layers), np.int64)
    devices = np.zeros((len(layers), 1 << soap.shift), np.int64)
    for at, item in enumerate(layers):
        rows = soap.degrees[soap.candidates[at] : soap.candidates[at + 1]]
        wanted = [*item["degrees"], *[1] * (rows.shape[1] - len(item["degrees"]))]
        found = np.flatnonzero((rows == wanted).all(axis=1))
        given = np.array(item["devices"], np.int64)
        parts = int(soap.parts[soap.candidates[at] + found[0]]) if len(found) else -1
        if len(given) != parts or not ((given >= 0) & (given < len(soap.kind))).all():
            raise DocumentError(
                f"Layer {item['name']!r} has degrees {item['degrees']} on devices {item['devices']}; expected degrees "
                f"that divide its dims and one of the devices 0 to {len(soap.kind) - 1}. Search again."
            )
        candidates[at] = soap.candidates[at] + found[0]
        devices[at, :parts] = given
    return candidates, devices
