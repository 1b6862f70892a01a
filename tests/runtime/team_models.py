"""Models whose ops can be shared out over two and four processes."""

from __future__ import annotations

import torch

from meshwright.zoo import load_model
from tests.runtime.models import GPT, Case, _token_loss

VOCABULARY, LENGTH = 24, 8


def tokens(vocabulary, length):
    def make(n):
        ids = torch.randint(vocabulary, (n, length + 1))
        return (ids[:, :-1].contiguous(),), (ids[:, 1:].contiguous(),)

    return make


def gpt(**more):
    return lambda: Case(GPT(vocabulary=VOCABULARY, length=LENGTH, heads=4, **more), _token_loss, tokens(24, LENGTH))


def zoo(name):
    def make():
        source = load_model(name, sequence_length=16)
        return Case(source.model, source.loss, tokens(256, 16))

    return make


MODELS = {
    "gpt-tied": gpt(),
    "gpt": gpt(tied=False),
    "gpt-dropout": gpt(tied=False, dropout=0.2),
    "llama": zoo("llama-tiny"),
    "mixtral": zoo("mixtral-tiny"),
}
