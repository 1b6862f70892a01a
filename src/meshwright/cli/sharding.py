"""Options that say how ops are split over devices, and what of a model runs again."""

from __future__ import annotations

from typing import Annotated

import typer

TensorOption = Annotated[
    list[int] | None,
    typer.Option(
        help="Split every op over so many devices side by side (tensor parallelism), as far as it can be; repeat to "
        "let the search choose.",
        min=1,
    ),
]
SequenceParallelOption = Annotated[
    bool, typer.Option("--sequence-parallel", help="With --tensor: between the split products, split the tokens.")
]
ContextOption = Annotated[
    list[int] | None,
    typer.Option(
        help="Split the tokens of every sequence over so many devices (context parallelism); repeat for a choice.",
        min=1,
    ),
]
ExpertOption = Annotated[
    list[int] | None,
    typer.Option(
        help="Lay the experts of every layer out over so many devices, each with samples of its own (expert "
        "parallelism); repeat for a choice.",
        min=1,
    ),
]
PlacementOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OP=AXIS:DIM",
        help="Split ops by your own choice: the name of an op or module (* and ? as in file names), an axis, and a dim "
        "of the first output or input, as in 'embeddings.*=expert:output1'; without a dim the ops stay whole. Repeat "
        "for several.",
    ),
]
RecomputeOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WHAT",
        help="What runs again in the backward instead of being kept: none, selective (attention's scores), full (every "
        "repeated block), or layers, as 0:12; repeat for a choice.",
    ),
]
ZeroOption = Annotated[
    list[int] | None,
    typer.Option(
        help="What replicas share out instead of keeping it alike: nothing (0), optimizer states (1), gradients too "
        "(2), parameters too (3, as FSDP); repeat for a choice.",
        min=0,
        max=3,
    ),
]
OffloadOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WHAT=WHERE",
        help="What is kept away from the devices: optimizer=host or optimizer=nvme, whose states are there then while "
        "the host makes the step; parameters=host, with --zero 3. Repeat for both, or put a comma between them.",
    ),
]
