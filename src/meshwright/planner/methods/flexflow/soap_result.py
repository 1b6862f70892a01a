"""The result of a search of the SOAP space (`SoapResult`), as a table, as text and as a document."""

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
    """The best strategy that a search found, its simulated step time, and how it was found.

    ``candidates`` (n,) and ``devices`` (n, P) are the strategy of n layers (`soap_arrays`). ``history``: pairs of the
    number of proposals of the best chain and its best step so far, in seconds. ``starts``: for each start, the step
    time of the start and the best that a chain reached from it, in seconds. ``tally``: counts of proposals, indexed by
    `chain.SIMULATED` and so on. ``wall_s``: seconds that the search took.
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
        """Number of simulated proposals of all chains, without those that equal the current strategy."""
        return self.tally[SIMULATED]

    @property
    def acceptance_rate(self) -> float:
        """Share of the simulated proposals that were accepted, 0..1."""
        return self.tally[ACCEPTED] / max(self.num_simulated, 1)

    @property
    def degrees(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, the number of parts along each of its SOAP dims."""
        rows = self.space.soap.degrees[self.candidates].tolist()
        return tuple(tuple(row[: len(layer.dims)]) for row, layer in zip(rows, self.space.layers, strict=True))

    @property
    def is_split(self) -> bool:
        """True if at least one layer is split into several parts."""
        return bool((self.space.soap.parts[self.candidates] > 1).any())

    def configurations(self) -> list[dict[str, Any]]:
        """Return one dict per layer.

        Keys: ``layer`` (name), ``degrees`` (pairs of the kind of a SOAP dim and a degree above 1), ``devices`` (one per
        part).
        """
        soap = self.space.soap
        rows = []
        for at, layer in enumerate(self.space.layers):
            degrees = soap.degrees[self.candidates[at]]
            split = [(dim.kind, int(degree)) for dim, degree in zip(layer.dims, degrees, strict=False) if degree > 1]
            count = int(soap.parts[self.candidates[at]])
            rows.append({"layer": layer.name, "degrees": split, "devices": self.devices[at, :count].tolist()})
        return rows

    def explain(self) -> str:
        """Return printable sentences on the step, the work of devices and links, memory, and the search."""
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
        sums = "gradients after the barrier" if soap.barrier else f"{int(syncs.sum())} gradient all-reduces, "
        sums += "" if soap.barrier else f"{format_seconds(float(times[syncs].sum()))} on links"
        return "\n".join(
            [
                f"Step {format_seconds(self.step_s)}: {len(self.space.layers)} layers on {len(soap.kind)} devices.",
                f"A device computes {format_seconds(float(busy.min()))} to {format_seconds(float(busy.max()))} of it.",
                f"{moved} transfers, {format_seconds(float(times[~passes & ~syncs].sum()))} on links; {sums}.",
                f"The fullest device holds {format_bytes(int(strategy.memory_bytes.max()))}.",
                f"{self.num_simulated:,} proposals simulated in {format_seconds(self.wall_s)}, "
                f"{self.tally[CUT]:,} of them only until their rejection was certain; "
                f"{self.acceptance_rate:.1%} were accepted, {self.tally[WORSE_ACCEPTED] / longer:.1%} of the slower "
                f"ones. Seed {self.seed}.",
                *(
                    f"Start {name}: {format_seconds(first)} per step, improved to {format_seconds(last)}."
                    for name, (first, last) in self.starts.items()
                ),
            ]
        )

    def document(self) -> dict[str, Any]:
        """Return the strategy as a dict for a JSON file, which `read_strategy` reads."""
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
    """Return the candidates (n,) and devices (n, P) of a document that `SoapResult.document` made.

    Raises DocumentError if the document is of another graph or does not match the space.
    """
    layers = document.get("layers", [])
    fits = document.get("schema") == SCHEMA and document.get("graph_hash") == space.graph.content_hash
    if not fits or len(layers) != len(space.layers):
        raise DocumentError(
            f"A document with schema {document.get('schema')!r} and {len(layers)} layers of graph "
            f"{document.get('graph_hash')!r} was given; expected schema {SCHEMA!r} and {len(space.layers)} layers of "
            f"graph {space.graph.content_hash!r}. Search again for this graph."
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
                f"that divide its dims, and for each part one of the devices 0 to {len(soap.kind) - 1}. Search again."
            )
        candidates[at] = soap.candidates[at] + found[0]
        devices[at, :parts] = given
    return candidates, devices
