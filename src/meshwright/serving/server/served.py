"""The models of a server: each copy of a deployment's models, with the tensors and latencies that workers have found.

Processes read the list of models from a file when they start (`write_models`); later changes are sent to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.serving.batching import batch_nanoseconds
from meshwright.spec import Deployment, Latency, ServedModel, ServingError, TensorSpec, write_text
from meshwright.spec.codec import decode, encode

# A batch of more requests would not fit into one message (`channel`).
LARGEST = 4096
_FILE = "models.json"


@dataclass(slots=True, eq=False)
class Served:
    """A model that is served, and its number.

    ``table[b]`` is the time (ns) of a batch of b requests; entry 0 is unused. `learn` sets ``platform``, ``inputs``,
    ``outputs`` and ``table`` from the first worker's report.
    """

    number: int
    name: str
    model: ServedModel
    version: str = "1"
    platform: str = ""
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    table: list[int] = field(default_factory=list)

    @property
    def slo_ns(self) -> int:
        """Time from arrival to deadline (ns), if a request does not give one."""
        return round(self.model.slo * 1e9)

    def learn(self, found: dict[str, Any]) -> None:
        """Take the tensors and latencies that a worker found when it loaded the model.

        Raises ServingError if two workers found different tensors, or if a batch of one takes longer than the SLO.
        """
        inputs, outputs = (read_tensors(found[key]) for key in ("inputs", "outputs"))
        if self.table:
            if (inputs, outputs) != (self.inputs, self.outputs):
                raise ServingError(
                    f"Model {self.name!r}: two workers have loaded it with different tensors ({self.inputs} and "
                    f"{inputs}). A model's function must return the same in each process."
                )
            return
        latency = self.model.latency or Latency.through(found["points"])
        table = batch_nanoseconds(latency, self.model.slo)[: min(found["largest"], LARGEST) + 1].tolist()
        if len(table) < 2:
            raise ServingError(
                f"Model {self.name!r}: a batch of one took {latency.of(1):.4g} s, longer than its SLO of "
                f"{self.model.slo:g} s, so no request can be answered in time. Increase slo, or use a faster device."
            )
        self.inputs, self.outputs, self.platform, self.table = inputs, outputs, found["platform"], table

    def identity(self) -> dict[str, Any]:
        """Return the JSON document from which `read_identity` makes the model in another process."""
        return {"number": self.number, "name": self.name, "version": self.version, "model": encode(self.model)}

    def document(self) -> dict[str, Any]:
        """Return the description of the model for frontends; ``most`` is the largest batch."""
        return {
            "number": self.number,
            "name": self.name,
            "version": self.version,
            "platform": self.platform,
            "slo_ns": self.slo_ns,
            "most": len(self.table) - 1,
            "inputs": [asdict(tensor) for tensor in self.inputs],
            "outputs": [asdict(tensor) for tensor in self.outputs],
        }


def read_identity(document: dict[str, Any]) -> Served:
    """Return a model from `Served.identity`, without tensors and latencies."""
    return Served(**{**document, "model": decode(ServedModel, document["model"])})


def write_models(served: Iterable[Served], folder: Path) -> None:
    """Write the list of models to a file in ``folder``, for processes that start later."""
    write_text(json.dumps([one.identity() for one in served]), folder / _FILE)


def read_models(folder: Path) -> list[Served]:
    """Read the list of models that `write_models` wrote."""
    return [read_identity(item) for item in json.loads((folder / _FILE).read_text(encoding="utf-8"))]


def read_tensors(items: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    """Return tensor specs from a message between processes."""
    return tuple(TensorSpec(**{**item, "shape": tuple(item["shape"])}) for item in items)


def served_models(deployment: Deployment) -> list[Served]:
    """Return all models, with an entry for each copy: the third copy of ``detector`` is ``detector-2``."""
    names = [(name, model) for model in deployment.models for name in copy_names(model)]
    served = [Served(number=number, name=name, model=model) for number, (name, model) in enumerate(names)]
    check_names(served)
    return served


def copy_names(model: ServedModel) -> list[str]:
    """Return the names of a model's copies."""
    return [model.name] if model.copies == 1 else [f"{model.name}-{copy}" for copy in range(model.copies)]


def check_names(served: Iterable[Served]) -> None:
    """Raise ServingError if two models have the same name."""
    names = [one.name for one in served]
    again = sorted({name for name in names if names.count(name) > 1})
    if again:
        raise ServingError(
            f"Two models would be called {again[0]!r} (copies are NAME-0, NAME-1, ...). Give one of them another name."
        )
