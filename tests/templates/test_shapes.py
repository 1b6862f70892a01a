"""Sizes of transformers and how they are laid out: parameters that models are known to have, and what is refused."""

from dataclasses import replace
from itertools import pairwise

import pytest

from meshwright.templates import decoder_graph
from meshwright.templates.shapes import (
    ExpertLayers,
    LatentAttention,
    TrainingSetup,
    TransformerError,
    part_starts,
)
from tests.templates.sizes import LLAMA, gpt

ONE = TrainingSetup(seq=2048, microbatch_size=1, num_microbatches=1)
# Sizes from the models' own configuration files.
LLAMA_8B = replace(LLAMA, layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256)
DEEPSEEK_V3 = replace(
    LLAMA,
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=128,
    head_dim=56,
    ffn=18432,
    vocab=129280,
    experts=ExpertLayers(num_experts=256, top_k=8, ffn=2048, num_shared=1, num_dense_layers=3),
    latent=LatentAttention(query_rank=1536, kv_rank=512, content_dim=128, rotary_dim=64, value_dim=128),
)


def test_known_models_have_their_known_sizes():
    # Megatron's formula: 12·l·h²·(1 + 13/(12h) + (V + s)/(12·l·h)), without the last norm.
    layers, hidden, vocab, seq = 12, 2048, 51200, 2048
    formula = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + seq) / (12 * layers * hidden))
    assert decoder_graph(gpt(layers, hidden, 16, vocab, seq), seq).num_parameters() == pytest.approx(
        formula + 2 * hidden, rel=1e-12
    )
    # Llama 3.1 8B has 8,030,261,248 parameters (its model card's file sizes), DeepSeek-V3 671 billion (its paper).
    assert decoder_graph(LLAMA_8B, seq).num_parameters() == 8_030_261_248
    assert decoder_graph(DEEPSEEK_V3, seq).num_parameters() == pytest.approx(671e9, rel=1e-3)


@pytest.mark.parametrize("layers", [32, 30, 61])
@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (4, 1), (4, 2), (7, 3)])
def test_parts_hold_all_layers_and_the_ends_the_fewest(layers, pp, chunks):
    setup = replace(ONE, pp=pp, chunks=chunks, schedule="interleaved" if chunks > 1 else "1f1b")
    starts = part_starts(replace(LLAMA_8B, layers=layers), setup)
    held = [stop - start for start, stop in pairwise(starts)]
    assert (starts[0], starts[-1], len(held)) == (0, layers, pp * chunks)
    assert held[-1] == min(held) >= max(held) - 1


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(TransformerError, match="layers is 0"):
        replace(LLAMA_8B, layers=0)
    with pytest.raises(TransformerError, match="cannot share"):
        replace(LLAMA_8B, kv_heads=5)
    with pytest.raises(TransformerError, match="cannot be split"):
        replace(ONE, seq=2049, cp=2)
    with pytest.raises(TransformerError, match="'nonsense' is not a known schedule"):
        replace(ONE, schedule="nonsense")
    with pytest.raises(TransformerError, match="2 chunks per stage cannot run as '1f1b'"):
        replace(ONE, pp=2, chunks=2)
    with pytest.raises(TransformerError, match=r"ep = 3 does not divide the 8 devices"):
        replace(ONE, dp=4, cp=2, ep=3)
