"""Mixtral: a Llama whose perceptrons are experts; a router chooses a few of them for every token.

    p = softmax(R y);   chosen: the k largest p, divided by their sum;   mlp(y) = Σ_chosen p_e expert_e(y)

The data decides which tokens an expert computes, but not how many: from every sequence of T tokens, each of the E
experts takes at most

    C = ceil(capacity_factor · k · T / E)

tokens. First choices come before second ones, and earlier tokens before later ones. If an expert is full, the choice is
dropped: the expert adds nothing to the token's residual stream. So all shapes are fixed, every sequence is routed
independently of the others (the split into microbatches and replicas does not matter), and a graph can be captured.
With capacity_factor = E / k nothing is ever dropped, as in the published model. The balance loss of a layer is
E · Σ_e f_e P_e for each sequence, where f_e is the share of choices of expert e and P_e its mean probability.

Source: Jiang et al., "Mixtral of Experts" (2024), section 2 and table 1; capacity: Lepikhin et al., "GShard" (2020),
algorithm 1; balance loss: Fedus et al., "Switch Transformers" (2021), equation 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.spec import ModelReferenceError
from meshwright.zoo.batch_examples import token_cross_entropy
from meshwright.zoo.llama import GroupedAttention, RotaryDecoder, RotaryShape

BALANCE_COEFFICIENT = 0.02  # router_aux_loss_coef of the published configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralShape(RotaryShape):
    """The sizes of a Mixtral: those of a Llama, with ``num_experts`` experts, ``num_chosen`` of them for each token."""

    num_experts: int
    num_chosen: int
    capacity_factor: float

    def __post_init__(self) -> None:
        RotaryShape.__post_init__(self)
        if not 1 <= self.num_chosen <= self.num_experts or self.capacity_factor <= 0:
            raise ModelReferenceError(
                f"A mixture of {self.num_experts} experts, {self.num_chosen} chosen per token, with a capacity factor "
                f"of {self.capacity_factor} was described; expected 1 to all experts chosen, and a positive factor."
            )

    def build(self) -> Mixtral:
        """Return the model with newly initialised weights."""
        return Mixtral(self)

    @staticmethod
    def loss(outputs: tuple[torch.Tensor, torch.Tensor], targets_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the tokens plus 0.02 times the mean balance loss."""
        logits_BTV, balance_B = outputs
        return token_cross_entropy(logits_BTV, targets_BT) + BALANCE_COEFFICIENT * balance_B.mean()


class Mixtral(RotaryDecoder):
    """The whole model: embedding, blocks, norm and head."""

    def __init__(self, shape: MixtralShape) -> None:
        super().__init__(shape, lambda: MixtralBlock(shape))

    def forward(self, tokens_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (batch, sequence) → logits (batch, sequence, vocabulary), balance loss of each sequence (batch,)."""
        cos_TK, sin_TK = self.rotations(tokens_BT)
        x_BTD = self.embedding(tokens_BT)
        balance_B = x_BTD.new_zeros(tokens_BT.shape[0])
        for block in self.blocks:
            x_BTD, balance_B = block(x_BTD, balance_B, cos_TK, sin_TK)
        return self.head(self.norm(x_BTD)), balance_B / len(self.blocks)


class MixtralBlock(nn.Module):
    """Grouped attention and experts, each applied to a normed copy of the residual stream and added to it."""

    def __init__(self, shape: MixtralShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.attention = GroupedAttention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.router = Router(shape)
        self.experts = Experts(shape)

    def forward(
        self, x_BTD: torch.Tensor, balance_B: torch.Tensor, cos_TK: torch.Tensor, sin_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, sequence, width) → (batch, sequence, width), and the balance loss (batch,) plus this layer's."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TK, sin_TK)
        y_BTD = self.mlp_norm(x_BTD)
        places_BTk, weights_BTk, layer_balance_B = self.router(y_BTD)
        return x_BTD + self.experts(y_BTD, places_BTk, weights_BTk), balance_B + layer_balance_B


class Router(nn.Module):
    """Choose the experts of every token, its place in each expert's queue, and the weights of their results."""

    def __init__(self, shape: MixtralShape) -> None:
        super().__init__()
        self.num_experts, self.num_chosen, self.factor = shape.num_experts, shape.num_chosen, shape.capacity_factor
        self.gate = nn.Linear(shape.width, shape.num_experts, bias=False)

    def forward(self, y_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(batch, sequence, width) → places and weights (batch, sequence, chosen), balance loss (batch,).

        Expert e has the places e·C … e·C + C − 1. Dropped choices have the place E·C and the weight 0.
        """
        num_tokens = y_BTD.shape[1]
        room = capacity(num_tokens, self.num_experts, self.num_chosen, self.factor)
        probabilities_BTE = self.gate(y_BTD).softmax(-1)
        weights_BTk, experts_BTk = probabilities_BTE.topk(self.num_chosen, dim=-1)
        weights_BTk = weights_BTk / weights_BTk.sum(-1, keepdim=True)
        # One row per choice, all first choices before all second ones: the order in which places are given.
        chosen_BkTE = (
            experts_BTk.transpose(1, 2).unsqueeze(-1) == torch.arange(self.num_experts, device=y_BTD.device)
        ).long()
        queue_BRE = chosen_BkTE.flatten(1, 2)
        number_BR = ((queue_BRE.cumsum(1) - 1) * queue_BRE).sum(-1)
        number_BTk = number_BR.unflatten(1, (self.num_chosen, num_tokens)).transpose(1, 2)
        taken_BTk = number_BTk < room
        places_BTk = torch.where(taken_BTk, experts_BTk * room + number_BTk, self.num_experts * room)
        share_BE = queue_BRE.type_as(y_BTD).mean(1)
        balance_B = self.num_experts * (share_BE * probabilities_BTE.mean(1)).sum(-1)
        return places_BTk, weights_BTk * taken_BTk, balance_B


class Experts(nn.Module):
    """All experts of a layer: gated perceptrons of one size, computed together as batched matrix products."""

    def __init__(self, shape: MixtralShape) -> None:
        super().__init__()
        self.num_experts, self.num_chosen, self.factor = shape.num_experts, shape.num_chosen, shape.capacity_factor
        self.gate = nn.Parameter(torch.empty(shape.num_experts, shape.width, shape.hidden_width))
        self.up = nn.Parameter(torch.empty(shape.num_experts, shape.width, shape.hidden_width))
        self.down = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_width, shape.width))

    def forward(self, y_BTD: torch.Tensor, places_BTk: torch.Tensor, weights_BTk: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) → (batch, sequence, width): zero for a token whose choices were all dropped."""
        num_tokens, width = y_BTD.shape[1:]
        room = capacity(num_tokens, self.num_experts, self.num_chosen, self.factor)
        num_places = self.num_experts * room
        places_BR = places_BTk.flatten(1)
        copies_BRD = y_BTD.repeat_interleave(self.num_chosen, dim=1)
        held_BPD = y_BTD.new_zeros(y_BTD.shape[0], num_places + 1, width)
        held_BPD = held_BPD.scatter(1, places_BR.unsqueeze(-1).expand(-1, -1, width), copies_BRD)
        held_EXD = held_BPD[:, :num_places].unflatten(1, (self.num_experts, room)).transpose(0, 1).flatten(1, 2)
        hidden_EXH = F.silu(torch.bmm(held_EXD, self.gate)) * torch.bmm(held_EXD, self.up)
        done_EXD = torch.bmm(hidden_EXH, self.down)
        done_BPD = done_EXD.unflatten(1, (-1, room)).transpose(0, 1).flatten(1, 2)
        # The dropped read the last place; their weight is zero.
        index_BR = places_BR.clamp(max=num_places - 1)
        back_BRD = done_BPD.gather(1, index_BR.unsqueeze(-1).expand(-1, -1, width))
        return (back_BRD.unflatten(1, (num_tokens, -1)) * weights_BTk.unsqueeze(-1)).sum(2)


def capacity(num_tokens: int, num_experts: int, num_chosen: int, factor: float) -> int:
    """Return the number of tokens (places) that one expert takes from one sequence: C in the module's docstring."""
    return min(num_tokens, math.ceil(factor * num_chosen * num_tokens / num_experts))
