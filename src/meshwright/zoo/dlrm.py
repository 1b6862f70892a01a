"""DLRM: click prediction from numbers and categories; almost all of its parameters are embeddings.

    d = bottom(numbers);   v_0 = d, v_i = E_i[category_i];   z = (v_i · v_j for i > j);   logit = top(d, z)

A sample reads one row of every embedding, so the model computes little and takes much memory. Gradients of the
embeddings are dense here, as under plain data parallelism. Source: Naumov et al., "Deep Learning Recommendation Model"
(2019), section 2 and its published code (facebookresearch/dlrm), initial weights included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.spec import ModelReferenceError
from meshwright.zoo.batch_examples import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class DLRMShape:
    """The sizes of a DLRM: ``categories`` are the rows of each embedding table, all of them ``width`` wide.

    ``num_numbers`` is the number of numeric features. ``bottom_widths`` and ``top_widths`` are the hidden widths of the
    two perceptrons; the output of the bottom one has ``width`` elements.
    """

    source: str
    num_numbers: int
    categories: tuple[int, ...]
    width: int
    bottom_widths: tuple[int, ...]
    top_widths: tuple[int, ...]
    batch_size: int

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if min((self.num_numbers, self.width, *self.categories, *self.bottom_widths, *self.top_widths)) < 1 or not (
            self.categories
        ):
            raise ModelReferenceError(
                f"A DLRM of {self.num_numbers} numerical features, tables of {list(self.categories)} rows, width "
                f"{self.width} and layers of {list(self.bottom_widths)} and {list(self.top_widths)} was described; "
                "expected numbers of at least 1, and at least one table."
            )

    def build(self) -> DLRM:
        """Return the model with newly initialised weights."""
        return DLRM(self)

    def batch(self) -> Batch:
        """Return a synthetic batch.

        Inputs: numbers (batch, numbers) and categories (batch, categories). Targets: clicks, 0 or 1 (batch,).
        """
        categories = [torch.randint(rows, (self.batch_size,)) for rows in self.categories]
        clicks_B = torch.randint(2, (self.batch_size,)).float()
        return (torch.rand(self.batch_size, self.num_numbers), torch.stack(categories, dim=1)), (clicks_B,)

    @staticmethod
    def loss(logits_B: torch.Tensor, clicks_B: torch.Tensor) -> torch.Tensor:
        """Return the mean binary cross-entropy of logits and clicks."""
        return F.binary_cross_entropy_with_logits(logits_B, clicks_B.type_as(logits_B))


class DLRM(nn.Module):
    """Embeddings, the bottom perceptron for numbers, dot products of all pairs of vectors, and the top perceptron."""

    def __init__(self, shape: DLRMShape) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(rows, shape.width) for rows in shape.categories)
        self.bottom = perceptron((shape.num_numbers, *shape.bottom_widths, shape.width))
        num_vectors = len(shape.categories) + 1
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.top = perceptron((shape.width + num_pairs, *shape.top_widths))
        self.head = nn.Linear((shape.width + num_pairs, *shape.top_widths)[-1], 1)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.uniform_(module.weight, -(module.num_embeddings**-0.5), module.num_embeddings**-0.5)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=math.sqrt(2 / (module.in_features + module.out_features)))
                nn.init.normal_(module.bias, std=math.sqrt(1 / module.out_features))

    def forward(self, numbers_BN: torch.Tensor, categories_BC: torch.Tensor) -> torch.Tensor:
        """Numbers (batch, numbers) and categories (batch, categories) → logits (batch,)."""
        dense_BD = self.bottom(numbers_BN)
        rows = [embedding(categories_BC[:, i]) for i, embedding in enumerate(self.embeddings)]
        vectors_BVD = torch.stack([dense_BD, *rows], dim=1)
        products_BVV = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2))
        num_vectors = products_BVV.shape[1]
        later, earlier = torch.tril_indices(num_vectors, num_vectors, -1, device=products_BVV.device)
        pairs_BP = products_BVV[:, later, earlier]
        return self.head(self.top(torch.cat((dense_BD, pairs_BP), dim=1))).squeeze(1)


def perceptron(widths: tuple[int, ...]) -> nn.Sequential:
    """Return linear layers with the given widths of inputs and outputs in turn, each followed by ReLU."""
    return nn.Sequential(*(RectifiedLinear(inputs, outputs) for inputs, outputs in pairwise(widths)))


class RectifiedLinear(nn.Linear):
    """A linear layer followed by ReLU."""

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        """(batch, inputs) → (batch, outputs)."""
        return super().forward(x_BD).relu()
