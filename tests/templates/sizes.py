"""Sizes of models that tests of templates share."""

from dataclasses import replace

from meshwright.templates.shapes import TransformerShape


def gpt(layers, hidden, heads, vocab, positions, **changes):
    shape = TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=vocab,
        max_positions=positions,
        dropout=False,
    )
    return replace(shape, **changes)


LLAMA = TransformerShape(
    layers=4,
    hidden=128,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ffn=344,
    vocab=256,
    gated=True,
    biased=False,
    root_norm=True,
    tied=False,
    dropout=False,
)
