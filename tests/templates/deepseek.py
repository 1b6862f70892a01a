"""A small decoder with attention through low ranks and shared experts: what DeepSeek-V2 adds to the zoo's Mixtral."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.zoo import MixtralShape
from meshwright.zoo.llama import GatedMLP, RotaryDecoder, rotary_tables, rotate
from meshwright.zoo.mixtral import Experts, Router


class LatentAttention(nn.Module):
    def __init__(self, width, heads, latent):
        super().__init__()
        self.heads, self.latent = heads, latent
        keyed, valued = latent.content_dim + latent.rotary_dim, latent.content_dim + latent.value_dim
        self.query_down = nn.Linear(width, latent.query_rank, bias=False)
        self.query_norm = nn.RMSNorm(latent.query_rank, eps=1e-5)
        self.query_up = nn.Linear(latent.query_rank, heads * keyed, bias=False)
        self.key_value_down = nn.Linear(width, latent.kv_rank + latent.rotary_dim, bias=False)
        self.key_value_norm = nn.RMSNorm(latent.kv_rank, eps=1e-5)
        self.key_value_up = nn.Linear(latent.kv_rank, heads * valued, bias=False)
        self.projection = nn.Linear(heads * latent.value_dim, width, bias=False)

    def forward(self, x_BTD, cos_TK, sin_TK):
        latent = self.latent
        keyed, valued = latent.content_dim + latent.rotary_dim, latent.content_dim + latent.value_dim
        query = self.query_up(self.query_norm(self.query_down(x_BTD))).unflatten(-1, (-1, keyed)).transpose(1, 2)
        plain, turned = query.split((latent.content_dim, latent.rotary_dim), -1)
        low, shared = self.key_value_down(x_BTD).split((latent.kv_rank, latent.rotary_dim), -1)
        high = self.key_value_up(self.key_value_norm(low)).unflatten(-1, (-1, valued)).transpose(1, 2)
        key, value = high.split((latent.content_dim, latent.value_dim), -1)
        shared = rotate(shared.unsqueeze(1), cos_TK, sin_TK).expand(-1, self.heads, -1, -1)
        query = torch.cat((plain, rotate(turned, cos_TK, sin_TK)), -1)
        mixed = F.scaled_dot_product_attention(query, torch.cat((key, shared), -1), value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, shape, latent, *, is_dense, dense_width, num_shared):
        super().__init__()
        self.is_dense = is_dense
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = LatentAttention(shape.width, shape.num_heads, latent)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-5)
        if is_dense:
            self.mlp = GatedMLP(replace(shape, hidden_width=dense_width))
        else:
            self.router, self.experts = Router(shape), Experts(shape)
            self.shared = GatedMLP(replace(shape, hidden_width=num_shared * shape.hidden_width))

    def forward(self, x_BTD, balance_B, cos_TK, sin_TK):
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TK, sin_TK)
        y_BTD = self.mlp_norm(x_BTD)
        if self.is_dense:
            return x_BTD + self.mlp(y_BTD), balance_B
        places_BTk, weights_BTk, layer_balance_B = self.router(y_BTD)
        mixed_BTD = self.experts(y_BTD, places_BTk, weights_BTk) + self.shared(y_BTD)
        return x_BTD + mixed_BTD, balance_B + layer_balance_B


class DeepSeek(RotaryDecoder):
    """The first block has a plain perceptron."""

    def __init__(self, shape: MixtralShape, latent, *, dense_width, num_shared):
        kinds = iter(range(shape.num_layers))
        super().__init__(
            shape,
            lambda: Block(shape, latent, is_dense=next(kinds) == 0, dense_width=dense_width, num_shared=num_shared),
        )
        self.rotary_dim = latent.rotary_dim

    def forward(self, tokens_BT):
        cos_TK, sin_TK = rotary_tables(tokens_BT.shape[1], self.rotary_dim, self.rope_base, tokens_BT.device)
        x_BTD = self.embedding(tokens_BT)
        balance_B = x_BTD.new_zeros(tokens_BT.shape[0])
        for block in self.blocks:
            x_BTD, balance_B = block(x_BTD, balance_B, cos_TK, sin_TK)
        return self.head(self.norm(x_BTD)), balance_B / len(self.blocks)
