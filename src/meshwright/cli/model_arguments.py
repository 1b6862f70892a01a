"""Get the graph of a model: captured, from a file, or from the user's cache. Also options of several commands.

`graphs_of` returns a function from microbatch size to graph; `graph_of_plan` and `graph_to_show` return the graph of a
plan.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from meshwright.cli.output import note
from meshwright.spec import (
    Graph,
    MeshwrightError,
    ModelReferenceError,
    Placement,
    Plan,
    check_placement,
    check_plan,
    decode_document,
    encode_document,
    load_shipped_graph,
    read_regular,
    shipped_graphs,
    suggest,
)
from meshwright.spec.codec import dump_json
from meshwright.spec.files import write_bytes
from meshwright.spec.model_files import check_model_is_here, read_model_file
from meshwright.spec.own_code import split_reference
from meshwright.spec.parsing import parse_data
from meshwright.spec.shipped import MAX_UNPACKED_BYTES, SUFFIX, pack, unpack

if TYPE_CHECKING:
    from meshwright.capture import Captured
    from meshwright.rewrite.planned import RewriteTarget


# Files to keep; beyond these, the least recently used ones are deleted.
MAX_FILES = 64
# The code that captures: modules of Meshwright with all that they import, and libraries.
_MODULES = ("meshwright.capture", "meshwright.zoo", "meshwright.zoo.huggingface")
_LIBRARIES = ("torch", "transformers")


# A graph follows from the configuration, the sizes, and the code that captures: torch, transformers and Meshwright.
# Files of the cache are named by a digest of all of these, so that any change leads to another file.
def kept_file(config: dict[str, Any], *asked: object) -> Path | None:
    """Return the path of the graph of a Hugging Face configuration in the user's cache; None without a cache folder.

    ``asked`` is all else that the graph depends on: reference, sizes, mode and batch size.

    The folder is MESHWRIGHT_CACHE, else ``meshwright`` in the user's cache folder; an empty MESHWRIGHT_CACHE turns the
    cache off.
    """
    from meshwright.compiled import contents_digest

    folder = os.environ.get("MESHWRIGHT_CACHE")
    if folder == "":
        return None
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    versions = [f"{name} {_version(name)}" for name in _LIBRARIES]
    parts = [json.dumps(config, sort_keys=True), repr(asked), *versions, *map(contents_digest, _MODULES)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    return (Path(folder) if folder else home / "meshwright") / "graphs" / f"{digest}{SUFFIX}"


def read_kept(path: Path | None) -> Graph | None:
    """Return the graph in a file; None if the file is missing or unreadable."""
    if path is None or not path.is_file():
        return None
    try:
        text = unpack(read_regular(path, MAX_UNPACKED_BYTES), path.name)
        with suppress(OSError):
            path.touch()
        return decode_document(Graph, parse_data(text, Path("graph.json")), path.name)
    except (MeshwrightError, OSError):
        return None


def keep(graph: Graph, path: Path | None) -> None:
    """Write a graph to its file in the cache, and delete the least recently used files beyond `MAX_FILES`.

    Does nothing without a path, or if the folder is not writable.
    """
    if path is None:
        return
    with suppress(MeshwrightError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(pack(dump_json(encode_document(graph))), path)
        files = sorted(path.parent.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime)
        for file in files[:-MAX_FILES]:
            file.unlink(missing_ok=True)


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""


Mode = Literal["training", "inference"]

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A shipped model (gpt2-small, llama3-70b, resnet50, ...; `meshwright show zoo` lists them), a shape file "
        "with the sizes of such a model (.toml), a model of the Hugging Face Hub (Qwen/Qwen2.5-7B), its config.json or "
        "its folder, your own model as path/to/file.py:function, or a graph that was captured before (.json).",
    ),
]
SequenceOption = Annotated[
    int | None, typer.Option(help="Tokens per sample, for models that read sequences.", min=1, max=2**24)
]
ImageOption = Annotated[
    int | None, typer.Option(help="Side of the images in pixels, for models that read images.", min=1, max=2**15)
]
MeasurementsOption = Annotated[
    Path | None,
    typer.Option(help="A measurement table of these devices, from `meshwright measure` (.json or .parquet)."),
]
CompiledOption = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Whether torch compiles the layers, each separately; by default as recorded in the plan.",
    ),
]
SoftwareOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[@DATE]",
        help="Predict for this training software instead of Meshwright's own runtime on current PyTorch; attention "
        "kernels and host times differ. One of alpa, llm-foundry, megatron, torchtitan; with a date, the software as "
        "of that time: megatron@2022.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


SIZES = ("sequence_length", "image_size")
# Of each layer of a placement's model, the parts along each of its dims.
Degrees = tuple[tuple[int, ...], ...]


def model_sizes(sequence_length: int | None, image_size: int | None) -> tuple[tuple[str, int], ...]:
    """Return the given sizes as pairs (name, value), as a plan records them. Sizes that are None are left out."""
    given = {"sequence_length": sequence_length, "image_size": image_size}
    return tuple((name, value) for name, value in given.items() if value is not None)


def capture_reference(
    reference: str,
    sizes: tuple[tuple[str, int], ...],
    *,
    mode: Mode = "training",
    batch_size: int | None = None,
    target: RewriteTarget | None = None,
    degrees: Degrees = (),
) -> Captured:
    """Capture a model under fake tensors, so that no weight is allocated.

    ``target``: the model is first rewritten for this device. ``degrees``: the model is first split into the parts of a
    placement. Raises ModelReferenceError if torch is missing or a size is unknown.
    """
    try:
        from meshwright.capture import capture_model
        from meshwright.zoo import load_model
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModelReferenceError(without_torch(reference, sizes, mode)) from None

    odd = [name for name, _ in sizes if name not in SIZES]
    if odd:
        raise ModelReferenceError(
            f"The sizes of {reference!r} contain {odd[0]!r}, which is not a size of a model; the sizes are "
            f"{', '.join(SIZES)}. Make the plan again."
        )
    source = load_model(reference, batch_size=batch_size, fake=True, **dict(sizes))
    if source.loss_origin == "stand-in" and mode == "training":
        note(f"{reference} returns no loss; the mean square of its outputs is used as the loss.")
    if target is not None:
        from meshwright.rewrite.planned import rewrite_source

        source = rewrite_source(source, target, mode)
    if degrees:
        from meshwright.training.split_model import split_source

        source = split_source(source, degrees, mode)
    captured = capture_model(
        source.model,
        source.inputs,
        targets=source.targets if mode == "training" else (),
        loss=source.loss if mode == "training" else None,
        name=reference,
        mode=mode,
        verify=False,
    )
    if captured.remark:
        note(captured.remark)
    return captured


def without_torch(reference: str, sizes: tuple[tuple[str, int], ...], mode: Mode) -> str:
    """Return the message for a user without torch about a model that has to be captured."""
    install = "pip install 'meshwright[torch]'"
    if reference in shipped_graphs():
        asked = ", ".join(
            [*(f"{name}={value}" for name, value in sizes), *(["inference"] if mode != "training" else [])]
        )
        return (
            f"The graph of {reference!r} ships for training in its own sizes only; {asked} was asked for, so the model "
            f"has to be captured, which needs torch. Run {install}, or leave the option out."
        )
    if read_model_file(reference) is not None:
        return (
            f"{reference!r} is the configuration of a Hugging Face model, which is captured with torch and "
            "transformers. Run pip install 'meshwright[torch,hf]'."
        )
    if ":" not in reference and not reference.endswith((".py", ".toml")):
        return (
            f"No model {reference!r} is shipped{suggest(reference, shipped_graphs())}. Give a shipped name or a graph "
            f"that was captured before (.json). Your own model is captured with torch: {install}."
        )
    return (
        f"{reference!r} has to be captured, which needs torch. Run {install}, or give a shipped name or a graph "
        "that was captured elsewhere (.json)."
    )


def refuse_experts(reference: str, sizes: Sequence[int]) -> None:
    """Raise PlanError before a large mixture of experts is captured, if --expert does not divide its experts."""
    if any(size > 1 for size in sizes) and reference not in shipped_graphs():
        from meshwright.program import check_configured_experts

        config = read_model_file(reference)
        if isinstance(config, dict):
            check_configured_experts(config, reference, sizes)


def graphs_of(
    reference: str,
    sizes: tuple[tuple[str, int], ...],
    *,
    mode: Mode = "training",
    target: RewriteTarget | None = None,
    degrees: Degrees = (),
) -> Callable[[int], Graph]:
    """Return a function from microbatch size to graph.

    A graph that is symbolic in the batch size holds for all sizes; otherwise the model is captured once per size. The
    graph of a shipped model in its own sizes is read instead of captured. ``target``: the device that the graph is
    rewritten for; each size is rewritten separately, because the cheapest graph depends on the size. ``degrees``: the
    model is first split into the parts of a placement.
    """
    if target is not None or degrees:
        return _changed_graphs(reference, sizes, mode, target, degrees)
    if reference not in shipped_graphs():
        stored = read_model_file(reference)
        if isinstance(stored, Graph):
            return lambda _: stored
        if isinstance(stored, dict):
            return _configured_graphs(reference, stored, sizes, mode)
    elif mode == "training" and not sizes:
        shipped = load_shipped_graph(reference)
        return lambda _: shipped
    first = capture_reference(reference, sizes, mode=mode).graph
    return _graphs_from(first, lambda size: capture_reference(reference, sizes, mode=mode, batch_size=size).graph)


def _configured_graphs(
    reference: str, config: dict[str, Any], sizes: tuple[tuple[str, int], ...], mode: Mode
) -> Callable[[int], Graph]:
    """The graphs of a configuration; those that were captured before come from the user's cache folder."""

    def find(batch_size: int | None) -> Graph:
        path = kept_file(config, reference, sizes, mode, batch_size)
        if (kept := read_kept(path)) is not None:
            return kept
        captured = capture_reference(reference, sizes, mode=mode, batch_size=batch_size)
        # Remarks on a capture are repeated when the graph comes from the cache.
        if not captured.remark:
            keep(captured.graph, path)
        return captured.graph

    return _graphs_from(find(None), find)


def _graphs_from(first: Graph, capture: Callable[[int], Graph]) -> Callable[[int], Graph]:
    """Return the first graph if it holds for a microbatch size, else one that is captured for that size, once."""
    known: dict[int, Graph] = {}

    def graph_for(microbatch_size: int) -> Graph:
        if first.batch_size is None or first.batch_size == microbatch_size:
            return first
        if microbatch_size not in known:
            known[microbatch_size] = capture(microbatch_size)
        return known[microbatch_size]

    return graph_for


def _changed_graphs(
    reference: str, sizes: tuple[tuple[str, int], ...], mode: Mode, target: RewriteTarget | None, degrees: Degrees
) -> Callable[[int], Graph]:
    if isinstance(read_model_file(reference), Graph):
        raise ModelReferenceError(
            f"{reference!r} is a stored graph, which has no code that could be rewritten or run in parts. Give the "
            "model itself, such as its name or file.py:function."
        )
    return cache(
        lambda size: (
            capture_reference(reference, sizes, mode=mode, batch_size=size, target=target, degrees=degrees).graph
        )
    )


def graph_of_plan(plan: Plan | Placement, graph_file: Path | None) -> Graph:
    """Return the graph that a plan was made for: from a file if given, else captured from the plan's model."""
    if graph_file is None:
        check_model_is_here(plan.model)
    reference, target = (plan.model, planned_target(plan)) if graph_file is None else (str(graph_file), None)
    degrees = plan.degrees if isinstance(plan, Placement) and graph_file is None else ()
    graph_for = graphs_of(reference, plan.model_sizes, mode=plan.workload.kind, target=target, degrees=degrees)
    return graph_for(plan.microbatch_size)


def planned_target(plan: Plan | Placement | None) -> RewriteTarget | None:
    """Return the device that a plan's graph was rewritten for; None, without loading torch, if it was not rewritten."""
    if not isinstance(plan, Plan) or not plan.rewritten:
        return None
    from meshwright.rewrite.planned import target_of

    return target_of(plan)


def graph_to_show(plan: Plan | Placement, document: str, graph_file: Path | None, option: str) -> Graph:
    """Return the graph of a plan that is only displayed, without executing code that only the plan names.

    Raises ModelReferenceError for a model in a Python file without a given graph, and PlanError if the given graph is
    not that of the plan.
    """
    refuse_to_load(plan, document, graph_file, option)
    graph = graph_of_plan(plan, graph_file)
    if isinstance(plan, Placement):
        check_placement(plan, graph)
    elif graph_file is not None:
        check_plan(plan, graph)
    return graph


def refuse_to_load(plan: Plan | Placement, document: str, graph_file: Path | None, option: str) -> None:
    """Raise ModelReferenceError if the plan's model is a Python file, which `show` does not execute."""
    if graph_file is None and split_reference(plan.model) is not None:
        raise ModelReferenceError(
            f"{document} is a plan of {plan.model!r}, and `show` executes no file that only a plan names. Give the "
            f"graph of the model: meshwright capture {quote(plan.model)} --out graph.json, then meshwright show "
            f"{quote(document)} {option} --graph graph.json."
        )
