"""What the software of a training run does beside its kernels: which communication it hides, what it fuses.

A data file, ``software.toml``, names each behaviour with its citation; a row's framework and source pick the entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, ClassVar, Literal

from meshwright.spec import decode_document
from meshwright.spec.parsing import read_data

if TYPE_CHECKING:
    from meshwright.cost.transformer import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Habits of one kind of training software.

    ``fused_accumulation``: weight gradients are added by the product that makes them. ``hidden_tensor_parallel``: the
    backward's reduction among the tensor group runs beside the weight gradients. ``async_tensor_parallel``: gathers and
    scatters of the tensor group are cut up and run beside the products that need or make them. ``regathers_inputs``:
    inputs of split products are gathered again for the weight gradients, not kept. ``gathers_in_8_bits``: what products
    in 8 bits need is gathered in 8 bits. ``stops_early``: recomputing a layer ends with what the backward needs, so its
    last product is not run again. ``reduces_single``: sharded gradients are reduced in single precision.
    ``gathers_once_in_pipelines``: stages keep what they gathered for all microbatches, and scatter gradients once.
    ``embeds_by_products``: rows of the embedding are taken by products with one-hot rows. ``adds_first``: gradients of
    the first microbatch are added, too. ``optimizer_bytes``: what a step of the optimizer moves per parameter, where it
    is not Adam after clipping by the global norm. ``drops_out``: activations are dropped at random.
    ``fused_softmax``: as in `cost.transformer.TrainingSetup`. ``fused_loss``: the loss keeps no logits in single
    precision. ``state_bytes``: master weight and the optimizer's states, per parameter. ``memory_share``: what it
    takes of a device's memory. ``unties``: head and embedding have a matrix each.
    ``validates_later``: in pipelines without bubbles stages update and go on before the norm of all gradients is known,
    and roll back if they should not have.
    ``blocking_messages``: stages wait for their messages. ``gathers_messages``: each rank of a tensor group sends its
    share of an activation, and the receivers gather it. ``compiled``: kernels are started by a compiled program, which
    keeps no device waiting. ``hidden_gradients``: when gradients are reduced beside the backward. ``attention_share``:
    of the peak, by kind of device, that attention without stored scores reaches.

    ``framework``, ``source`` and ``notes``: parts of a row's columns that pick the entry, case and blanks apart.
    """

    name: str
    citation: str
    fused_attention: bool
    fused_accumulation: bool
    hidden_tensor_parallel: bool
    hidden_gradients: Literal["never", "without pipeline", "always"]
    async_tensor_parallel: bool = False
    regathers_inputs: bool = True
    gathers_in_8_bits: bool = False
    stops_early: bool = False
    blocking_messages: bool = False
    gathers_messages: bool = False
    reduces_single: bool = False
    gathers_once_in_pipelines: bool = False
    embeds_by_products: bool = False
    adds_first: bool = True
    optimizer_bytes: int = 0
    state_bytes: int = 12
    memory_share: float = 1.0
    drops_out: bool = True
    fused_softmax: bool = True
    fused_loss: bool = False
    unties: bool = False
    validates_later: bool = False
    compiled: bool = False
    framework: str = ""
    source: str = ""
    notes: str = ""
    attention_share: dict[str, float] = field(default_factory=dict)

    def clips(self, schedule: Schedule) -> bool:
        """Whether the optimizer waits for the norm of all gradients."""
        return not (self.optimizer_bytes or self.rolls(schedule))

    def rolls(self, schedule: Schedule) -> bool:
        """Whether a stage begins its next step when it is done, whatever others do."""
        return self.validates_later and schedule in ("zb-1p", "zb-2p")

    def hides_gradients(self, num_stages: int) -> bool:
        """Whether gradients are reduced beside the backward of a pipeline of so many stages."""
        return self.hidden_gradients == "always" or (self.hidden_gradients == "without pipeline" and num_stages == 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareList:
    """The document: entries in the order in which they are tried."""

    software: tuple[Software, ...]

    SCHEMA_VERSION: ClassVar[int] = 1


def find_software(framework: str = "", source: str = "", notes: str = "") -> Software:
    """The first entry whose parts stand in the framework, the source and the notes; the last one if none does."""
    *entries, other = known_software()
    said = framework.lower(), source.lower(), notes.lower().replace(" ", "")
    found = (
        entry
        for entry in entries
        if all(part in text for part, text in zip((entry.framework, entry.source, entry.notes), said, strict=True))
    )
    return next(found, other)


@cache
def known_software() -> tuple[Software, ...]:
    """All entries of the shipped file, with the last one's shares of attention where they name none."""
    with resources.as_file(resources.files("meshwright.cost.steps") / "software.toml") as path:
        entries = decode_document(SoftwareList, read_data(path), path.name).software
    other = entries[-1].attention_share
    return tuple(replace(entry, attention_share=other | entry.attention_share) for entry in entries)
