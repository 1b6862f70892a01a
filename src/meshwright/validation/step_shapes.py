"""Which model a row of measured training steps is of: its columns, and what is published of models they cannot hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.templates.shapes import Experts, LatentAttention, ResidualShape, TransformerShape
from meshwright.validation.step_cells import UNSTATED, CellError, read_number, read_word

if TYPE_CHECKING:
    from meshwright.validation.step_cells import Row

# A vocabulary that a row does not state: GPT-2's (VIA-Research/vTrain, src/config.py has the same default).
_GPT2_VOCAB = 50257
# Models whose columns cannot hold their blocks (DeepSeek-AI, config.json of DeepSeek-V2 and DeepSeek-V3).
_LATENT = LatentAttention(query_rank=1536, kv_rank=512, content_dim=128, rotary_dim=64, value_dim=128)
_DEEPSEEK = {
    "deepseekv2": Experts(num_experts=160, top_k=6, ffn=1536, num_shared=2, num_dense_layers=1),
    "deepseekv3": Experts(num_experts=256, top_k=8, ffn=2048, num_shared=1, num_dense_layers=1),
}
# Alpa's mixture of experts: every second layer, from the first, two of its experts for each of 1024 tokens, all
# matrices eight times as wide as the model (parax/model/moe.py and benchmark_2d_one_case_moe.py of alpa-projects/alpa).
_GSHARD, _GSHARD_WIDTH = Experts(num_experts=1, top_k=2, ffn=1, period=2, gated=False, group=1024), 8
# Blocks of the stages of a residual network by its layers (He et al., CVPR 2016, table 1); Alpa's take images of 224
# pixels, have 1024 classes and inner convolutions twice as wide (exp_intra_ablation.py, parax/model/wide_resnet.py).
_BLOCKS = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3)}


def read_shape(row: Row, features: frozenset[str], vocabulary_multiple: int = 1) -> TransformerShape | ResidualShape:
    """The model of a row, with the features that it states. Raises CellError or TransformerError as `read_step`."""
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
