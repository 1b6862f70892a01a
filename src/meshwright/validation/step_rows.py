"""What a row of measured training steps says: the model's shape, how it was laid out, on what, and the seconds.

A row is a mapping of text by the columns of ``data/training_steps.csv``. What a row leaves out is filled by one rule
for all rows, never by its time: an unstated vocabulary is GPT-2's, an unstated recompute is none, an unstated kv_heads
is heads, microbatches follow from the batch, and a pipeline whose microbatches are not stated runs them one sequence at
a time (torchtitan's default). Rows that lack more, or whose model the columns cannot describe, are named with the
reason.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from meshwright.cost.steps import Software, find_software
from meshwright.cost.transformer import (
    Experts,
    LatentAttention,
    TrainingSetup,
    TransformerError,
    TransformerShape,
    check_layout,
)
from meshwright.spec import MeasurementError, load_cluster
from meshwright.spec.cluster import shipped_kinds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.cost.transformer import Recompute, Schedule, ZeroStage
    from meshwright.spec import DeviceKind, Node

NEEDED = ("id", "source", "family", "layers", "hidden", "heads", "seq", "device", "n_devices", "tp", "pp", "dp")
# Columns whose numbers tell one run from another (`row_hash`).
_RUN = ("layers", "hidden", "heads", "seq", "n_devices", "tp", "pp", "dp", "gbs_seq")
# A vocabulary that a row does not state: GPT-2's (VIA-Research/vTrain, src/config.py has the same default).
_GPT2_VOCAB = 50257
# More than any model and any node has; a table with a slip of the pen ends here and not in memory.
_MAX_LAYERS, _MAX_PER_NODE = 10_000, 1024
# Chunks per device of SC'21's interleaved runs, which its table leaves out: layers and stages of the model, and
# layers per stage over --num-layers-per-virtual-pipeline-stage of NVIDIA/Megatron-LM, examples/sc21 (run_table_1.sh; 96
# layers: run_figure_12.sh). The table says "interleaved" of two models that the script runs without: fewest chunks.
_SC21, _SC21_CHUNKS = "2104.04473", {(60, 4): 3, (80, 8): 2, (96, 16): 2, (105, 35): 3, (96, 12): 4}
# Models whose columns cannot hold their blocks (DeepSeek-AI, config.json of DeepSeek-V2 and DeepSeek-V3).
_LATENT = LatentAttention(query_rank=1536, kv_rank=512, content_dim=128, rotary_dim=64, value_dim=128)
_DEEPSEEK = {
    "deepseekv2": Experts(num_experts=160, top_k=6, ffn=1536, num_shared=2, num_dense_layers=1),
    "deepseekv3": Experts(num_experts=256, top_k=8, ffn=2048, num_shared=1, num_dense_layers=1),
}
# How rows name schedules, by the start of the name; longer ones first.
_SCHEDULES: dict[str, Schedule] = {
    "gpipe": "gpipe",
    "interleaved": "interleaved",
    "1f1b-i": "interleaved",
    "1f1b": "1f1b",
    "zb-1p": "zb-1p",
    "zb-2p": "zb-2p",
}
# Memory bandwidth of variants of a shipped kind, bytes/s: NVIDIA A100 datasheet (40 GB SXM); the cluster column of
# torchtitan's rows (96 GB of HBM2e).
_VARIANTS = {"A100-40GB": 1555e9, "H100-96GB": 2.4e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """One row, read: everything that a prediction needs, and the measured seconds (None if the row has none)."""

    row_id: str
    source: str
    shape: TransformerShape
    setup: TrainingSetup
    software: Software
    kind: DeviceKind
    node: Node
    measured_s: float | None

    @property
    def origin(self) -> str:
        """Who measured it: the paper or the repository that the source names, whatever table of it."""
        named = re.search(r"arXiv \d{4}\.\d{4,5}", self.source) or re.match(r"[\w.-]+/[\w.-]+", self.source)
        return named[0] if named else self.source


def read_steps(rows: Sequence[Mapping[str, str]]) -> tuple[list[StepCase], Counter[str]]:
    """The rows that can be predicted, in their order, and how many were left out for which reason.

    Raises MeasurementError if there is no row, or a column is missing altogether.
    """
    if not rows:
        raise MeasurementError("The table of steps has no rows; expected at least one below the line of column names.")
    missing = [name for name in NEEDED if name not in rows[0]]
    if missing:
        raise MeasurementError(
            f"The table of steps lacks the columns {', '.join(missing)}; expected those of training_steps.csv. Add "
            "them (empty cells are allowed where a row does not say)."
        )
    cases, left_out = [], Counter[str]()
    for row in rows:
        try:
            cases.append(read_step(row))
        except (MeasurementError, TransformerError) as error:
            left_out[str(error)] += 1
    return cases, left_out


def read_step(row: Mapping[str, str]) -> StepCase:
    """One row. Raises MeasurementError or TransformerError if it does not say enough, or what cannot be."""
    kind, node = _hardware(row)
    software = find_software(row.get("framework", ""), row["source"])
    shape = _shape(row)
    setup = replace(_setup(row), fused_attention=software.fused_attention)
    if setup.num_devices != _number(row, "n_devices"):
        raise MeasurementError("tp, pp, dp and cp do not multiply to the number of devices")
    if shape.layers > _MAX_LAYERS:
        raise MeasurementError(f"more than {_MAX_LAYERS} layers")
    check_layout(shape, setup)
    return StepCase(
        row_id=row["id"],
        source=row["source"],
        shape=shape,
        setup=setup,
        software=software,
        kind=kind,
        node=node,
        measured_s=_seconds(row),
    )


def row_hash(row: Mapping[str, str]) -> int:
    """64 bits of the run that a row is of: model, layout, device and seconds to four digits; the same on every machine.

    What can be said of a run in other words (id, source, notes, framework, what defaults fill) is no part of it.
    """
    device = row.get("device", "")
    said = (
        next((kind for kind in shipped_kinds() if re.match(rf"{kind}\b", device)), device),
        *(_plain(row.get(name, "")) for name in _RUN),
        _plain(row.get("iter_time_s", ""), digits=4),
        _zero(row.get("zero_or_sharding", "")),
        _recompute(row.get("recompute", "")),
        _precision(row.get("precision", "")),
        row.get("seq_parallel", "") == "1",
    )
    return int.from_bytes(hashlib.sha256("\n".join(map(str, said)).encode()).digest()[:8], "big")


def _plain(text: str, digits: int = 12) -> str:
    """A number as it would be written anywhere, "1.50" as "1.5"; another text as it stands."""
    try:
        return f"{float(text):.{digits}g}"
    except ValueError:
        return text.strip()


def _shape(row: Mapping[str, str]) -> TransformerShape:
    hidden, heads = _number(row, "hidden"), _number(row, "heads")
    is_llama = row["family"] in ("llama", "moe")
    known = next((name for name in _DEEPSEEK if row.get("model", "").startswith(name)), None)
    if row["family"] == "moe" and known is None:
        raise MeasurementError("a mixture of experts that the columns do not describe")
    if row["family"] not in ("gpt", "mpt", "llama", "moe"):
        raise MeasurementError(f"a model of family {row['family']!r}; gpt, mpt, llama and moe are known")
    vocab = row.get("vocab", "")
    return TransformerShape(
        layers=_number(row, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_number(row, "kv_heads", heads),
        head_dim=hidden // heads,
        ffn=_number(row, "ffn", 4 * hidden),
        vocab=int(vocab) if re.fullmatch(r"[0-9]{1,12}", vocab) else _GPT2_VOCAB,
        gated=is_llama,
        biased=row["family"] == "gpt",
        root_norm=is_llama,
        tied=not is_llama,
        dropout=row["family"] == "gpt",
        max_positions=0 if is_llama else _number(row, "seq"),
        experts=_DEEPSEEK[known] if known else None,
        latent=_LATENT if known else None,
    )


def _setup(row: Mapping[str, str]) -> TrainingSetup:
    pp, dp, batch = _number(row, "pp"), _number(row, "dp"), _number(row, "gbs_seq")
    microbatch, microbatches = _number(row, "mbs", 0), _number(row, "n_microbatches", 0)
    if not microbatch:
        microbatch = 1 if not microbatches else batch // (dp * microbatches)
    if not microbatches:
        microbatch = 1 if pp > 1 else microbatch
        microbatches = batch // (dp * microbatch)
    if microbatch * microbatches * dp != batch:
        raise MeasurementError("a batch that is not microbatch size times microbatches times dp")
    chunks = _number(row, "vpp", 1)
    if _SC21 in row["source"]:
        chunks = _SC21_CHUNKS.get((_number(row, "layers"), pp), min(pp, 2))
    return TrainingSetup(
        seq=_number(row, "seq"),
        microbatch_size=microbatch,
        num_microbatches=microbatches,
        tp=_number(row, "tp"),
        pp=pp,
        # torchtitan's interleaved schedule has two chunks unless told.
        chunks=max(chunks, 2) if row.get("schedule", "").startswith("Interleaved") else chunks,
        dp=dp,
        cp=_number(row, "cp", 1),
        ep=_number(row, "ep", 1),
        sequence_parallel=row.get("seq_parallel", "") == "1",
        zero=_zero(row.get("zero_or_sharding", "")),
        recompute=_recompute(row.get("recompute", "")),
        schedule=_schedule(row.get("schedule", ""), chunks),
        precision=_precision(row.get("precision", "")),
    )


def _schedule(text: str, chunks: int) -> Schedule:
    name = text.lower()
    if name in ("", "n/a"):
        return "interleaved" if chunks > 1 else "1f1b"
    found = next((schedule for start, schedule in _SCHEDULES.items() if name.startswith(start)), None)
    if found is None:
        raise MeasurementError(f"a schedule that is not described; {', '.join(_SCHEDULES)} are known")
    return found


def _zero(text: str) -> ZeroStage:
    if any(mark in text for mark in ("ZeRO-3", "FULL_SHARD")):
        return 3
    return 2 if "SHARD_GRAD_OP" in text else 1 if "ZeRO-1" in text else 0


def _recompute(text: str) -> Recompute:
    if "(op)" in text or "torchtitan default" in text:
        return "op"
    return "full" if text.startswith("full") else "selective" if text.startswith("selective") else "none"


def _precision(text: str) -> Literal["fp16", "bf16", "fp8"]:
    if "8" in text.replace("16", ""):
        return "fp8"
    return "bf16" if "bf16" in text else "fp16"


def _hardware(row: Mapping[str, str]) -> tuple[DeviceKind, Node]:
    device = row["device"]
    name = next((kind for kind in shipped_kinds() if re.match(rf"{kind}\b", device)), None)
    if name is None:
        raise MeasurementError(f"a device that is not described: {device!r}")
    per_node = _number(row, "devices_per_node", 8)
    if per_node > _MAX_PER_NODE:
        raise MeasurementError(f"more than {_MAX_PER_NODE} devices in a node")
    kind, node = _shipped(name, per_node)
    variant = next((bandwidth for mark, bandwidth in _VARIANTS.items() if device.startswith(mark)), None)
    if variant is not None:
        kind = replace(kind, memory_bandwidth_bytes_per_s=variant)
    stated = re.search(r"(\d+) Gb/s inter-node", row.get("cluster", ""))
    if stated:
        link = replace(node.nic, bandwidth_bytes_per_s=int(stated[1]) * 1e9 / 8 / node.num_nics)
        node = replace(node, nic=link)
    return kind, node


@cache
def _shipped(name: str, per_node: int) -> tuple[DeviceKind, Node]:
    cluster = load_cluster(f"{per_node}x{name}")
    return cluster.device_kinds[0], cluster.nodes[0]


def _seconds(row: Mapping[str, str]) -> float | None:
    text = row.get("iter_time_s", "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise MeasurementError("a step time that is no positive number of seconds")
    return seconds


def _number(row: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = row.get(name, "") or ""
    if not text and otherwise is not None:
        return otherwise
    if not re.fullmatch(r"[1-9]\d{0,11}", text):
        raise MeasurementError(f"no number of {name} (an empty cell, or not a positive whole number)")
    return int(text)
