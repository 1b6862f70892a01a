"""Read rows of measured training steps: the model's shape, the parallelism, the devices, and the seconds.

A row is a mapping of text by the columns of ``data/training_steps.csv``. Missing values are filled by the same rules in
all rows, never by the row's time: the vocabulary is GPT-2's, there is no recompute, kv_heads equals heads, and the
number of microbatches follows from the batch. A pipeline without stated microbatches has one per stage (torchtitan,
config_manager.py, pipeline_parallel_microbatches); an interleaved schedule without stated chunks has two (torchtitan's
default, too). A row that lacks more, or that has an unknown word or model, is an error that names column, cell, and
what is expected.

The columns determine the model. For models whose blocks the columns cannot describe, published values are added.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from meshwright.cost.software import Software, find_software
from meshwright.spec import MAX_SECONDS, DeviceKind, Node, load_cluster, shipped_kinds
from meshwright.templates.shapes import (
    ExpertLayers,
    LatentAttention,
    ResidualShape,
    TrainingSetup,
    TransformerShape,
    check_layout,
)
from meshwright.validation.step_cells import (
    HYBRID,
    MEASURED,
    PRECISIONS,
    RECOMPUTES,
    SCHEDULES,
    SHARDINGS,
    SWITCHES,
    UNSTATED,
    CellError,
    Row,
    read_date,
    read_features,
    read_framework,
    read_number,
    read_seconds,
    read_word,
)

# Columns that every table must have, though a cell may be empty.
NEEDED = (
    *("id", "source", "family", "layers", "hidden", "heads", "seq", "device", "n_devices"),
    *("tp", "pp", "dp", "gbs_seq", "iter_time_s"),
)
# A Program of more computations takes long to simulate, and a step with more microbatches is a typing error.
_MAX_COMPUTATIONS = 400_000
# The start of a single kernel takes microseconds; a shorter step is in another unit.
_LEAST_STEP_S = 1e-6
# Memory bandwidth of variants of a shipped kind, bytes/s: NVIDIA A100 datasheet (40 GB SXM); the cluster column of
# torchtitan's rows (96 GB of HBM2e).
_VARIANTS = {("A100", 40): 1555e9, ("H100", 96): 2.4e12}
# Power limits of shipped kinds (NVIDIA H100 datasheet, SXM); a device cell may name a lower one, "500W", down to what a
# device needs for more than its clock.
_WATTS, _LEAST_WATTS = {"H100": 700}, 100
# A kind, its memory and its socket in either order, and a remark: "A100-80GB-SXM (rented)". Cards (PCIe, NVL) are
# slower than the modules that are shipped, and no variant of them.
_DEVICE = re.compile(r"(?P<kind>\w+)(?:-SXM[0-9]?|-(?P<memory>[0-9]{1,4})GB){0,2}(?: \(.*\))?")
# A maker's memory size is binary or decimal, net of what the driver keeps or not: within this share it is the same.
_SAME_MEMORY = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """A row of measured steps, as values: all that a prediction needs, and the measured seconds (None if missing)."""

    row_id: str
    source: str
    shape: TransformerShape | ResidualShape
    setup: TrainingSetup
    software: Software
    features: frozenset[str]
    kind: DeviceKind
    node: Node
    measured_s: float | None

    @property
    def origin(self) -> str:
        """The paper or repository that published the measurement, without the number of the table."""
        known = r"arXiv \d{4}\.\d{4,5}|Alpa \(OSDI 2022\)"
        named = re.search(known, self.source) or re.match(r"[\w.-]+/[\w.-]+", self.source)
        return named[0] if named else self.source

    @property
    def job(self) -> tuple[object, ...]:
        """The job that a planner would get: origin, model, devices, batch, sequence length and precision.

        The order of predictions is scored among runs of one job.
        """
        batch = self.setup.microbatch_size * self.setup.num_microbatches * self.setup.dp
        setup = self.setup
        return (self.origin, self.kind.name, setup.num_devices, batch, self.shape, setup.seq, setup.precision)


def read_step(row: Row) -> StepCase:
    """Read one row. Raises CellError or TransformerError if values are missing, unknown or impossible."""
    kind, node = _hardware(row)
    features = read_features(row)
    software = find_software(read_framework(row), read_date(row))
    shape = read_shape(row, features, software.vocabulary_multiple)
    setup = _setup(_completed(row))
    if setup.num_devices != read_number(row, "n_devices"):
        raise CellError("n_devices", row["n_devices"], "tp · cp · pp · dp")
    if isinstance(shape, TransformerShape):
        check_layout(shape, setup)
    return StepCase(
        row_id=row["id"],
        source=row["source"],
        shape=shape,
        setup=setup,
        software=software,
        features=features,
        kind=kind,
        node=node,
        measured_s=_seconds(row),
    )


def _completed(row: Row) -> Row:
    """A row of Alpa's with the mesh that its source does not state: all devices split the batch and the experts."""
    if row["tp"] or row["dp"] or not row.get("framework", "").lower().startswith("alpa"):
        return row
    devices = str(read_number(row, "n_devices") // read_number(row, "pp"))
    return {**row, "tp": "1", "dp": devices, "ep": devices if row["family"] == "moe" else ""}


def _setup(row: Row) -> TrainingSetup:
    pp, dp, batch = read_number(row, "pp"), read_number(row, "dp"), read_number(row, "gbs_seq")
    microbatch, microbatches = read_number(row, "mbs", 0), read_number(row, "n_microbatches", 0)
    if not microbatches and not microbatch and pp > 1:
        microbatch, microbatches = max(batch // (dp * pp), 1), pp
    if not microbatch:
        microbatch = 1 if not microbatches else batch // (dp * microbatches)
    if not microbatches:
        microbatches = batch // (dp * microbatch)
    if microbatch * microbatches * dp != batch:
        raise CellError("gbs_seq", row["gbs_seq"], "mbs · n_microbatches · dp")
    if pp * microbatches > _MAX_COMPUTATIONS:
        raise CellError("gbs_seq", row["gbs_seq"], f"at most {_MAX_COMPUTATIONS} microbatches times stages")
    schedule = read_word(row, "schedule", SCHEDULES)
    unstated = 2 if schedule == "interleaved" else 1
    chunks = read_number(row, "vpp", unstated)
    rounds = max(microbatches // pp, 1)
    if chunks > 1 and microbatches % rounds:
        raise CellError("n_microbatches", str(microbatches), f"{rounds} equal rounds over pp = {pp} interleaved stages")
    if pp * chunks * microbatches > _MAX_COMPUTATIONS:
        raise CellError("vpp", str(chunks), f"at most {_MAX_COMPUTATIONS} microbatches times parts of stages")
    return TrainingSetup(
        seq=read_number(row, "seq", 1 if row["family"] == "wresnet" else None),
        microbatch_size=microbatch,
        num_microbatches=microbatches,
        tp=read_number(row, "tp"),
        pp=pp,
        chunks=chunks,
        dp=dp,
        cp=read_number(row, "cp", 1),
        ep=read_number(row, "ep", 1),
        sequence_parallel=read_word(row, "seq_parallel", SWITCHES),
        zero=read_word(row, "zero_or_sharding", SHARDINGS),
        hybrid=row.get("zero_or_sharding", "").strip().lower() in HYBRID,
        recompute=read_word(row, "recompute", RECOMPUTES),
        schedule=schedule or ("interleaved" if chunks > 1 else "1f1b"),
        precision=read_word(row, "precision", PRECISIONS),
    )


def _hardware(row: Row) -> tuple[DeviceKind, Node]:
    device = row["device"].strip()
    said = _DEVICE.fullmatch(device)
    name = said["kind"] if said else ""
    known = [each for each in shipped_kinds() if _shipped(each, 1)[0].num_multiprocessors]
    if said is None or name not in known:
        raise CellError("device", device, f"one of {', '.join(known)}, with or without -80GB and -SXM")
    kind, node = _shipped(name, read_number(row, "devices_per_node", 8))
    if name in _WATTS:
        kind = _limited(kind, _watts(device, _WATTS[name]) / _WATTS[name])
    memory_gb = int(said["memory"] or 0)
    if (name, memory_gb) in _VARIANTS:
        kind = replace(kind, memory_bandwidth_bytes_per_s=_VARIANTS[name, memory_gb])
    elif memory_gb and abs(memory_gb * 1e9 / kind.memory_bytes - 1) > _SAME_MEMORY:
        raise CellError(
            "device", device, f"a variant that is known, such as {name} of {kind.memory_bytes / 1e9:.0f} GB"
        )
    stated = re.search(r"([0-9]+) Gb/s inter-node", row.get("cluster", ""))
    if stated:
        if not re.fullmatch(r"[1-9][0-9]{0,5}", stated[1]):
            raise CellError("cluster", stated[0], "1 to 999999 Gb/s inter-node")
        link = replace(node.nic, bandwidth_bytes_per_s=int(stated[1]) * 1e9 / 8 / node.num_nics)
        node = replace(node, nic=link)
    return kind, node


def _watts(device: str, most: int) -> int:
    """The power limit that a cell names, or the datasheet's. Raises CellError for one that cannot be."""
    stated = re.search(r"([0-9]+) ?W\b", device)
    if stated is None:
        return most
    if not re.fullmatch(r"[1-9][0-9]{2,3}", stated[1]) or not _LEAST_WATTS <= int(stated[1]) <= most:
        raise CellError("device", device, f"a power limit from {_LEAST_WATTS}W to {most}W")
    return int(stated[1])


def _limited(kind: DeviceKind, share: float) -> DeviceKind:
    """A kind with a share of its power: dynamic power grows with f·V², and the voltage with the clock f."""
    slower = share ** (1 / 3)
    rates = {dtype: rate * slower for dtype, rate in kind.peak_flops_per_s.items()}
    return replace(kind, peak_flops_per_s=rates, clock_hz=kind.clock_hz * slower)


@cache
def _shipped(name: str, per_node: int) -> tuple[DeviceKind, Node]:
    cluster = load_cluster(f"{per_node}x{name}")
    return cluster.device_kinds[0], cluster.nodes[0]


def _seconds(row: Row) -> float | None:
    seconds = read_seconds(row, "iter_time_s", least_s=_LEAST_STEP_S, most_s=MAX_SECONDS)
    if seconds is not None:
        read_word(row, "status", MEASURED)
    return seconds


# A vocabulary that a row does not state: GPT-2's (VIA-Research/vTrain, src/config.py has the same default).
_GPT2_VOCAB = 50257
# Models whose columns cannot hold their blocks (DeepSeek-AI, config.json of DeepSeek-V2 and DeepSeek-V3).
_LATENT = LatentAttention(query_rank=1536, kv_rank=512, content_dim=128, rotary_dim=64, value_dim=128)
_DEEPSEEK = {
    "deepseekv2": ExpertLayers(num_experts=160, top_k=6, ffn=1536, num_shared=2, num_dense_layers=1),
    "deepseekv3": ExpertLayers(num_experts=256, top_k=8, ffn=2048, num_shared=1, num_dense_layers=1),
}
# Alpa's mixture of experts: every second layer, from the first, two of its experts for each of 1024 tokens, all
# matrices eight times as wide as the model (parax/model/moe.py and benchmark_2d_one_case_moe.py of alpa-projects/alpa).
_GSHARD, _GSHARD_WIDTH = ExpertLayers(num_experts=1, top_k=2, ffn=1, period=2, gated=False, group=1024), 8
# Blocks of the stages of a residual network by its layers (He et al., CVPR 2016, table 1); Alpa's take images of 224
# pixels, have 1024 classes and inner convolutions twice as wide (exp_intra_ablation.py, parax/model/wide_resnet.py).
_BLOCKS = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3)}


def read_shape(row: Row, features: frozenset[str], vocabulary_multiple: int = 1) -> TransformerShape | ResidualShape:
    """Return the shape of a row's model; ``features`` are those of `read_features`.

    ``vocabulary_multiple``: the software pads the vocabulary to a multiple of this number per tensor-parallel rank.
    Raises CellError or TransformerError as `read_step` does.
    """
    family = read_word(row, "family", {name: name for name in ("gpt", "mpt", "llama", "moe", "wresnet")})
    if family == "wresnet":
        return _residual_shape(row)
    hidden, heads = read_number(row, "hidden"), read_number(row, "heads")
    known = next((name for name in _DEEPSEEK if row.get("model", "").startswith(name)), None)
    is_gshard = row.get("model", "") == "GShard"
    if family == "moe" and known is None and not is_gshard:
        expected = f"a mixture of experts that is known: {', '.join([*_DEEPSEEK, 'GShard'])}"
        raise CellError("model", row.get("model", ""), expected)
    words = _GPT2_VOCAB if row.get("vocab", "") in UNSTATED else read_number(row, "vocab")
    multiple = vocabulary_multiple * read_number(row, "tp") if vocabulary_multiple > 1 else 1
    is_llama = family == "llama" or known is not None
    experts = _DEEPSEEK[known] if known else None
    if is_gshard:
        experts = replace(_GSHARD, num_experts=read_number(row, "n_experts"), ffn=_GSHARD_WIDTH * hidden)
    return TransformerShape(
        layers=read_number(row, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=read_number(row, "kv_heads", heads),
        head_dim=hidden // heads,
        ffn=read_number(row, "ffn", (_GSHARD_WIDTH if is_gshard else 4) * hidden),
        vocab=-(-words // multiple) * multiple,
        gated=is_llama,
        biased=family == "gpt" or is_gshard,
        root_norm=is_llama,
        tied=not (is_llama or "untied" in features),
        dropout=family == "gpt" and "no dropout" not in features,
        max_positions=0 if is_llama else read_number(row, "seq"),
        experts=experts,
        latent=_LATENT if known else None,
    )


def _residual_shape(row: Row) -> ResidualShape:
    blocks = read_word(row, "layers", _BLOCKS)
    return ResidualShape(blocks=blocks, channels=read_number(row, "hidden"), width=2, image=224, classes=1024)
