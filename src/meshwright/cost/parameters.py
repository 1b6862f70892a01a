"""How many parameters a transformer has on a device: of one layer, and of a stage with its embedding or head.

Matrices are split over tp, those of experts laid out over ep; norms and biases are on every device. Of a layer with
hidden h, a heads of width d and k of keys and values, and inner width f (twice f into it where gated):

    attention     h·(a + 2k)·d + a·d·h        latent: through the ranks of queries, keys and values
    feed-forward  h·f + f·h                   experts: for each of them, and the router's h·experts
    not split     two norms, and the biases of the matrices
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from meshwright.cost.transformer import layers_of_stage

if TYPE_CHECKING:
    from meshwright.cost.transformer import TrainingSetup, TransformerShape

Products = Counter[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """Parameters on one device: ``dense`` ones, which all data-parallel ranks have, and those of its ``experts``.

    ``head`` and ``embedding`` are part of ``dense``. ``products`` counts the matrices of layers by (rows, columns).
    """

    dense: int
    experts: int
    head: int
    embedding: int
    largest_layer: int
    products: Products

    def share(self, setup: TrainingSetup) -> int:
        """Parameters whose states a rank holds where data-parallel ranks share; experts have dp · cp / ep ranks."""
        ranks = setup.dp * setup.cp
        return self.dense // ranks + self.experts // (ranks // setup.ep)


@lru_cache(maxsize=4096)
def count_parameters(shape: TransformerShape, setup: TrainingSetup, stage: int) -> StageParameters:
    """Parameters of a device of one stage. Biases and norms are not split, matrices are split over tp."""
    products: Products = Counter()
    dense = experts = largest = 0
    for layer in layers_of_stage(shape, setup, stage):
        shared, routed = _products_of_layer(shape, setup, layer)
        products += shared + routed
        own = _elements(shared) + _unsplit(shape, layer)
        own_experts = _elements(routed)
        dense, experts = dense + own, experts + own_experts
        largest = max(largest, own + own_experts)
    first, last = stage == 0, stage == setup.pp - 1
    words = shape.vocab * shape.hidden // setup.tp
    embedding = words if first or (last and shape.tied and setup.pp > 1) else 0
    embedding += shape.max_positions * shape.hidden if first else 0
    head = words if last and not shape.tied else 0
    final_norm = _norm_elements(shape) if last else 0
    return StageParameters(
        dense=dense + embedding + head + final_norm,
        experts=experts,
        head=head,
        embedding=embedding,
        largest_layer=largest,
        products=products,
    )


@lru_cache(maxsize=4096)
def layer_parameters(shape: TransformerShape, setup: TrainingSetup, layer: int) -> int:
    """Parameters of one layer on a device, its experts' included."""
    shared, routed = _products_of_layer(shape, setup, layer)
    return _elements(shared) + _elements(routed) + _unsplit(shape, layer)


def gate_and_up(shape: TransformerShape) -> int:
    """Columns of the matrices into the feed-forward: the inner width, and the gate's."""
    return shape.ffn * (2 if shape.gated else 1)


def _products_of_layer(shape: TransformerShape, setup: TrainingSetup, layer: int) -> tuple[Products, Products]:
    """Matrices of a layer on one device by (rows, columns): those of all ranks, those of its experts."""
    hidden, split = shape.hidden, setup.tp
    shared: Products = Counter()
    if shape.latent is None:
        width = (shape.heads // split + 2 * shape.local_kv_heads(split)) * shape.head_dim
        shared[(hidden, width)] += 1
        shared[(shape.heads * shape.head_dim // split, hidden)] += 1
    else:
        latent = shape.latent
        shared[(hidden, latent.query_rank)] += 1
        shared[(latent.query_rank, shape.heads * (latent.content_dim + latent.rotary_dim) // split)] += 1
        shared[(hidden, latent.kv_rank + latent.rotary_dim)] += 1
        shared[(latent.kv_rank, shape.heads * (latent.content_dim + latent.value_dim) // split)] += 1
        shared[(shape.heads * latent.value_dim // split, hidden)] += 1
    routed: Products = Counter()
    if shape.experts is None or shape.is_dense(layer):
        shared[(hidden, gate_and_up(shape) // split)] += 1
        shared[(shape.ffn // split, hidden)] += 1
    else:
        experts = shape.experts
        routed[(hidden, experts.columns // split)] += experts.num_experts // setup.ep
        routed[(experts.ffn // split, hidden)] += experts.num_experts // setup.ep
        shared[(hidden, experts.columns * experts.num_shared // split)] += min(experts.num_shared, 1)
        shared[(experts.ffn * experts.num_shared // split, hidden)] += min(experts.num_shared, 1)
        shared[(hidden, experts.num_experts)] += 1
    return shared, routed


def _unsplit(shape: TransformerShape, layer: int) -> int:
    """Elements of a layer's norms and biases."""
    norms = 2 * _norm_elements(shape)
    if shape.latent is not None:
        norms += shape.latent.query_rank + shape.latent.kv_rank
    biases = (shape.heads + 2 * shape.kv_heads) * shape.head_dim + 2 * shape.hidden + gate_and_up(shape)
    return norms + (biases if shape.biased and shape.is_dense(layer) else 0)


def _norm_elements(shape: TransformerShape) -> int:
    return shape.hidden * (2 if shape.biased else 1)


def _elements(products: Products) -> int:
    return sum(rows * columns * count for (rows, columns), count in products.items())
