"""Write the graphs that ship with Meshwright anew: those of the zoo (src/meshwright/spec/graphs), and those of models
that were measured in sizes of their own (src/meshwright/validation/data).

    .venv/bin/python scripts/renew_graphs.py [NAME ...]

Every name is captured for training in its own sizes. A file is written only where its graph has changed, and
files of models that are gone are removed, so that running it twice changes nothing.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from meshwright.capture import capture_model
from meshwright.cli.model_arguments import capture_reference
from meshwright.spec import Graph, encode_document, shipped_graphs
from meshwright.spec.codec import dump_json
from meshwright.spec.shipped import SUFFIX, pack
from meshwright.validation.datasets import load_graph
from meshwright.zoo import LlamaShape, zoo_names

SOURCE = Path(__file__).resolve().parent.parent / "src" / "meshwright"
FOLDER, MEASURED_FOLDER = SOURCE / "spec" / "graphs", SOURCE / "validation" / "data"
_ONE = LlamaShape(
    source="Llama 3.2, 1B",
    num_layers=16,
    width=2048,
    num_heads=32,
    num_key_value_heads=8,
    hidden_width=8192,
    vocabulary=128256,
    context=8192,
    rope_base=500000.0,
    batch_size=2,
    sequence_length=2048,
)
_EIGHT = replace(
    _ONE, source="Llama 3, 8 layers of the 8B", num_layers=8, width=4096, hidden_width=14336, sequence_length=4096
)
# Models of rows of `steps_cuda.csv` that are not in the zoo, and the type of their weights.
MEASURED = {
    "llama-1b": (_ONE, torch.float32),
    "llama-1b-bfloat16": (_ONE, torch.bfloat16),
    "llama3-8b-8layers-bfloat16": (_EIGHT, torch.bfloat16),
}


def renew(name: str, graph: Graph) -> str:
    folder = MEASURED_FOLDER if name in MEASURED else FOLDER
    known = (folder / f"{name}{SUFFIX}").exists() and load_graph(name)
    if known == graph:
        return "as it was"
    packed = pack(dump_json(encode_document(graph)))
    folder.mkdir(exist_ok=True)
    (folder / f"{name}{SUFFIX}").write_bytes(packed)
    return f"written, {len(packed)} bytes"


def capture(name: str) -> Graph:
    if name not in MEASURED:
        return capture_reference(name, ()).graph
    shape, dtype = MEASURED[name]
    with torch.device("meta"):
        model = shape.build().to(dtype)
    inputs, targets = shape.batch()
    return capture_model(model, inputs, targets=targets, loss=shape.loss, name=name, verify=False).graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these models; by default all")
    names = parser.parse_args().names or [*zoo_names(), *MEASURED]
    for name in names:
        graph = capture(name)
        if graph.batch_size is not None:
            raise SystemExit(f"{name}: its sizes are not symbolic in the batch; a shipped graph must be.")
        print(f"{name}: {graph.content_hash} {renew(name, graph)}", flush=True)
    for name in set(shipped_graphs()) - set(zoo_names()):
        (FOLDER / f"{name}{SUFFIX}").unlink()
        print(f"{name}: removed")


if __name__ == "__main__":
    main()
