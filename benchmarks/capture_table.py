"""What is captured, in how long, and what is refused: the tables of docs/concepts/captured.md, made anew.

Every model is captured and planned in a fresh process, without weights; CPU seconds of the capture alone and the
process's peak resident memory after it. ``--quick`` takes the small models only and writes no page.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import make_row, parse_options, publish

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for tests.docs.refused_models
PAGE = ROOT / "docs" / "concepts" / "captured.md"
CLUSTER = "2x8xH100"
HUGGING_FACE = (
    "gpt2", "bert-base", "t5-small", "vit-base", "whisper-small", "llama-2-7b", "mistral-7b", "mixtral-8x7b",
)  # fmt: skip
ZOO = (
    "gpt2-small", "llama3-8b", "resnet50", "vgg16", "unet", "bert-base", "t5-small", "mixtral-8x7b", "gnmt", "dlrm",
    "ddpm-cifar10", "llama3-8b-lora",
)  # fmt: skip
QUICK = ("gpt2", "t5-small", "gnmt")
TARGET_S = 60.0

# Types of transformers that are refused, each in a small configuration.
REFUSED_CONFIGS = {
    "Mixtral with `experts_implementation: eager`: a loop over the experts that were hit": {
        "model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64, "experts_implementation": "eager",
    },
    "Whisper with `encoder_layerdrop`: layers left out at random": {
        "model_type": "whisper", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layerdrop": 0.1,
    },
    "Longformer: global attention found by `nonzero`": {
        "model_type": "longformer", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 66, "attention_window": 8,
    },
    "BLOOM: a GELU with a gradient of its own": {
        "model_type": "bloom", "n_layer": 2, "hidden_size": 64, "n_head": 4, "vocab_size": 64,
    },
    "code of its own (`auto_map`)": {"model_type": "gpt2", "auto_map": {"AutoModel": "modeling.Mine"}},
    "quantised weights (`quantization_config`)": {"model_type": "gpt2", "quantization_config": {"bits": 4}},
    "a task without a batch and a loss here": {"model_type": "wav2vec2"},
}  # fmt: skip


def main() -> int:
    options = parse_options(__doc__)
    models = [("Hugging Face", name) for name in HUGGING_FACE] + [("zoo", name) for name in ZOO]
    if options.quick:
        models = [item for item in models if item[1] in QUICK]
    found = []
    for origin, name in models:
        done = subprocess.run(
            [sys.executable, __file__, "--capture-one", reference(origin, name)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found.append((origin, name, json.loads(done.stdout.splitlines()[-1])))
        print(origin, name, found[-1][2], flush=True)
    rows = [
        make_row(f"capture {name} ({origin})", facts["capture_s"], "CPU s", target=TARGET_S)
        for origin, name, facts in found
    ]
    if not options.quick:
        replace_table("captured", captured_table(found))
        replace_table("refused", refused_table())
    return publish("capture_table", rows, options)


def reference(origin: str, name: str) -> str:
    return str(ROOT / "examples" / "huggingface" / f"{name}.json") if origin == "Hugging Face" else name


def capture_one(model: str) -> dict[str, float | int | str]:
    """Capture, then plan, and what both took."""
    import meshwright.capture  # what is imported is not counted
    from meshwright.cli.model_arguments import capture_reference
    from meshwright.cost import CostModel
    from meshwright.planner import Problem, search_plans
    from meshwright.spec import Workload, load_cluster

    if model.endswith(".json"):
        import meshwright.zoo.huggingface  # noqa: F401
    start = time.process_time()
    graph = capture_reference(model, ()).graph
    seconds = time.process_time() - start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    cluster = load_cluster(CLUSTER)
    plans = search_plans(
        Problem(
            graph_for=lambda _: graph,
            cluster=cluster,
            workload=Workload(global_batch=128, precision="bfloat16"),
            cost=CostModel(cluster=cluster, measurements=None, precision="bfloat16"),
            model=model,
        )
    )
    best = plans.best.plan
    widest = max(len(stage.ranks) for stage in best.stages)
    return {
        "num_parameters": graph.num_parameters(),
        "num_ops": len(graph.ops),
        "num_layers": len(graph.layers),
        "capture_s": round(seconds, 2),
        "peak_bytes": peak_bytes,
        "layout": f"{len(best.stages)} × {widest}",
    }


def captured_table(found: list) -> list[str]:
    lines = [
        f"| model | from | parameters | ops | layers | capture, CPU s | peak memory | best plan on `{CLUSTER}` |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for origin, name, facts in found:
        lines.append(
            f"| `{name}` | {origin} | {facts['num_parameters']:,} | {facts['num_ops']:,} | {facts['num_layers']} "
            f"| {facts['capture_s']:.1f} | {facts['peak_bytes'] / 2**30:.2f} GiB | {facts['layout']} |"
        )
    return lines


def refused_table() -> list[str]:
    return ["| what | message |", "|---|---|", *(f"| {what} | {message} |" for what, message in refusals())]


def refusals() -> list[tuple[str, str]]:
    """(what, message) of everything that is refused; raises if one of them is not."""
    from meshwright.spec import MeshwrightError
    from tests.docs.refused_models import REFUSED

    found = []
    for kind in REFUSED:
        model = f"{ROOT / 'tests' / 'docs' / 'refused_models.py'}:{kind.__name__.lower()}"
        found.append((kind.__doc__, told(model, MeshwrightError, verify=kind.__name__ == "PythonRandom")))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        for what, data in REFUSED_CONFIGS.items():
            path.write_text(json.dumps(data))
            found.append((what, told(str(path), MeshwrightError, verify=False).replace(f"{folder}/", "")))
    return found


def told(model: str, kind: type[Exception], *, verify: bool) -> str:
    """The message of a refusal, with paths that do not depend on where things are installed."""
    from meshwright.capture import capture_model
    from meshwright.zoo import load_model

    try:
        source = load_model(model, fake=not verify)
        capture_model(source.model, source.inputs, targets=source.targets, loss=source.loss, verify=verify)
    except kind as error:
        text = " ".join(str(error).split()).replace("|", "\\|")
        return re.sub(r"[^\s:(']*/(?:site-packages|tests/docs)/", "", text)
    raise SystemExit(f"{model} was captured; it is listed as refused")


def replace_table(name: str, lines: list[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- table {name} -->\n", f"<!-- end of table {name} -->\n"
    head, tail = text.split(begin)[0], text.split(end)[1]
    PAGE.write_text("".join([head, begin, "\n", *(f"{line}\n" for line in lines), "\n", end, tail]), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--capture-one"]:
        print(json.dumps(capture_one(sys.argv[2])))
        sys.exit(0)
    sys.exit(main())
