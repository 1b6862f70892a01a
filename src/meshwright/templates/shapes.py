"""Sizes of models without a captured graph (shapes), and the layout of one training step of a transformer (setups).

Public measurements name sizes, not modules. `templates` makes graphs from shapes; `validation.step_plans` makes plans
from setups.

    shape    L layers, hidden h, a heads (k of keys and values, each d wide), inner width f, vocabulary v
    setup    tp · cp · dp · pp devices; each microbatch is b sequences of s tokens; m microbatches per step

A device holds s / cp tokens of a sequence; with sequence parallelism norms and dropout hold s / (cp · tp) of them
(Korthikanti et al., MLSys 2023, section 4.2). Experts are divided over ep of the dp · cp devices.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, get_args

from meshwright.spec import MeshwrightError

# What is recomputed in the backward. "selective": attention's core (Korthikanti et al., section 5); "op": all but
# attention and every second matrix product (torchtitan, activation checkpoint mode "selective", option "op"); "full":
# all of a layer but its input.
Recompute = Literal["none", "selective", "op", "full"]
# In which order a stage takes its microbatches (Narayanan et al., SC 2021, section 2.2; Qi et al., ICLR 2024).
Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-1p", "zb-2p"]
# 0: nothing sharded; 1: optimizer states; 2: gradients too; 3: parameters too (Rajbhandari et al., SC 2020).
ZeroStage = Literal[0, 1, 2, 3]
# What products run in; weights and gradients are then kept as software does.
Precision = Literal["fp16", "bf16", "fp8", "fp32"]


class TransformerError(MeshwrightError):
    """Raised for an impossible shape or setup, such as sizes below 1 or heads that tp does not divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """The experts of a mixture-of-experts model.

    Each token is routed to ``top_k`` of ``num_experts`` experts with inner size ``ffn``, and to all of ``num_shared``
    further experts. The first ``num_dense_layers`` layers have a plain feed-forward; after them, every ``period``-th
    layer has experts, starting with the first. ``gated``: an expert has three matrices (SwiGLU) instead of two.
    ``group``: 0 if tokens are sorted by expert; otherwise the number of tokens in a group from which each expert gets
    an equal number by products with masks (Lepikhin et al., GShard, 2020, algorithm 1 and section 3.2).
    """

    num_experts: int
    top_k: int
    ffn: int
    num_shared: int = 0
    num_dense_layers: int = 0
    period: int = 1
    gated: bool = True
    group: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: low-rank queries, keys and values (DeepSeek-AI, arXiv 2405.04434, section 2.1).

    ``query_rank`` and ``kv_rank`` are the ranks. The query and the key of a head have ``content_dim`` + ``rotary_dim``
    elements, its value ``value_dim``.
    """

    query_rank: int
    kv_rank: int
    content_dim: int
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """The sizes of a transformer decoder.

    ``kv_heads``: heads of keys and values, a divisor of ``heads``. ``ffn``: inner size of the feed-forward. ``gated``:
    the feed-forward has three matrices (SwiGLU) instead of two (GELU). ``biased``: linear layers and norms have biases.
    ``root_norm``: norms are RMS norms instead of layer norms. ``tied``: the head shares the embedding's weight.
    ``dropout``: after embedding, attention, projection and feed-forward. ``max_positions``: number of learned
    positions, 0 for rotary positions. ``experts``: None without experts. ``latent``: None for usual attention.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = False
    biased: bool = True
    root_norm: bool = False
    tied: bool = True
    dropout: bool = True
    max_positions: int = 0
    experts: ExpertLayers | None = None
    latent: LatentAttention | None = None

    def __post_init__(self) -> None:
        _require_positive(self, ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"))
        if self.heads % self.kv_heads:
            raise TransformerError(
                f"{self.heads} heads cannot share kv_heads = {self.kv_heads} heads of keys and values; expected a "
                f"divisor of {self.heads}. Give kv_heads = heads if each head has its own keys and values."
            )

    def is_dense(self, layer: int) -> bool:
        """Return whether a layer (counted from 0) has a plain feed-forward instead of experts."""
        if self.experts is None or layer < self.experts.num_dense_layers:
            return True
        return (layer - self.experts.num_dense_layers) % self.experts.period > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualShape:
    """The sizes of a residual network with bottleneck blocks.

    ``blocks``: number of blocks in each stage. ``channels``: of the first stage. ``width``: factor by which a block's
    inner convolution is wider (1: ResNet). ``image``: pixels on a side. ``classes``: outputs. Source: He et al., CVPR
    2016, section 4.1; Zagoruyko and Komodakis, BMVC 2016.
    """

    blocks: tuple[int, ...]
    channels: int
    width: int
    image: int
    classes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """The layout of one training step.

    ``seq``: tokens of a whole sequence. ``tp``, ``pp``, ``dp``, ``cp``, ``ep``: sizes of tensor, pipeline, data,
    context and expert parallelism. ``chunks``: parts of the model on each pipeline rank, above 1 only with the schedule
    "interleaved". ``hybrid``: ZeRO shards states among the replicas of a node only (HSDP). ``precision``: "fp16",
    "bf16", "fp8" or "fp32", as in the measured rows.
    """

    seq: int
    microbatch_size: int
    num_microbatches: int
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    zero: ZeroStage = 0
    hybrid: bool = False
    recompute: Recompute = "none"
    schedule: Schedule = "1f1b"
    precision: Precision = "bf16"

    def __post_init__(self) -> None:
        sizes = ("seq", "microbatch_size", "num_microbatches", "tp", "pp", "chunks", "dp", "cp", "ep")
        _require_positive(self, sizes)
        if self.seq % (self.cp * (self.tp if self.sequence_parallel else 1)):
            raise TransformerError(
                f"{self.seq} tokens cannot be split over cp = {self.cp} and tp = {self.tp}; expected a multiple of "
                "their product (of cp alone without sequence parallelism). Choose another seq, cp or tp."
            )
        if self.schedule not in get_args(Schedule):
            raise TransformerError(
                f"{self.schedule!r} is not a known schedule; expected one of {', '.join(get_args(Schedule))}."
            )
        if self.chunks > 1 and self.schedule != "interleaved":
            raise TransformerError(
                f"{self.chunks} chunks per stage cannot run as {self.schedule!r}; expected schedule = 'interleaved'. "
                "Choose this schedule, or one chunk."
            )
        if self.dp * self.cp % self.ep:
            raise TransformerError(
                f"ep = {self.ep} does not divide the {self.dp * self.cp} devices of dp · cp, among which experts are "
                f"divided. Choose a divisor of {self.dp * self.cp}."
            )

    @property
    def num_devices(self) -> int:
        """The number of devices that the step uses: tp · pp · dp · cp."""
        return self.tp * self.pp * self.dp * self.cp


def part_starts(shape: TransformerShape, setup: TrainingSetup) -> tuple[int, ...]:
    """Return the first layer of each of the pp · chunks parts of the model, in order, then the number of layers.

    If the layers cannot be divided evenly, parts at the ends of the model have one layer fewer: the last, the first,
    the last but one and so on, since the ends also hold head and embedding (torchtitan,
    generate_llm_fqn_per_model_part; Qi et al., ICLR 2024, section 5.1). Raises TransformerError if the setup cannot
    divide the model.
    """
    check_layout(shape, setup)
    parts = setup.pp * setup.chunks
    inwards = [part for pair in zip(reversed(range(parts)), range(parts), strict=True) for part in pair][:parts]
    fewer = set(inwards[: -shape.layers % parts])
    most = -(-shape.layers // parts)
    return tuple(itertools.accumulate((most - (part in fewer) for part in range(parts)), initial=0))


def check_layout(shape: TransformerShape, setup: TrainingSetup) -> None:
    """Raise TransformerError unless every device gets whole heads, whole experts, and at least one layer."""
    if shape.layers < setup.pp:
        raise TransformerError(
            f"{shape.layers} layers cannot be split over pp = {setup.pp} stages; expected at least one layer per "
            f"stage. Choose pp up to {shape.layers}."
        )
    if shape.heads % setup.tp:
        raise TransformerError(
            f"{shape.heads} heads cannot be split over tp = {setup.tp}; expected a divisor of {shape.heads}. Choose "
            "such a tp."
        )
    num_experts = shape.experts.num_experts if shape.experts else 1
    if num_experts % setup.ep:
        raise TransformerError(
            f"The model has {num_experts if shape.experts else 'no'} experts, and ep = {setup.ep}; expected a divisor "
            "of their number, or 1 for a model without experts. Choose such an ep."
        )


def _require_positive(value: TransformerShape | TrainingSetup, names: tuple[str, ...]) -> None:
    for name in names:
        found = getattr(value, name)
        if found < 1:
            raise TransformerError(f"{name} is {found}; expected at least 1.")
