"""Models whose ops can be shared out over two and four processes."""

import torch

from meshwright.zoo import load_model
from tests.runtime.models import GPT, Case, _token_loss
from tests.runtime.models import MODELS as OTHERS

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


def ignoring(outputs, targets):
    """Some targets do not count, others weigh more, and large outputs cost something: means, sums and both."""
    weight = torch.linspace(0.5, 2.0, VOCABULARY)
    loss = torch.nn.functional.cross_entropy(
        outputs.flatten(0, 1), targets.flatten(), weight=weight, ignore_index=3, label_smoothing=0.1
    )
    return 2 * loss + 1e-3 * outputs.square().sum() + 0.1 * outputs.square().mean()


def ignoring_whole_head():
    case = gpt(tied=False)()
    return Case(case.model, ignoring, case.make_batch)


class Tied(torch.nn.Module):
    """One weight that is read by rows and as a product, a scale without dims, and a parameter that nothing reads."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.norm, self.inner = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)
        self.scale, self.unused = torch.nn.Parameter(torch.tensor(0.7)), torch.nn.Parameter(torch.ones(3))
        self.head = torch.nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + self.scale * torch.tanh(self.inner(self.norm(x))))


MODELS = {
    "tied": lambda: Case(Tied(), _token_loss, tokens(VOCABULARY, LENGTH)),
    "gpt-ignoring": ignoring_whole_head,
    "gpt-tied": gpt(),
    "gpt": gpt(tied=False),
    "gpt-dropout": gpt(tied=False, dropout=0.2),
    "llama": zoo("llama-tiny"),
    "mixtral": zoo("mixtral-tiny"),
    "resnet": OTHERS["resnet"],
}
