"""What the optimizer of graphs is judged by: blocks of known models, programs that people write wastefully, models.

``BLOCKS`` and ``WASTE`` map a name to a function that returns (module in evaluation mode, batch). Wasteful programs
name the public code that computes so (own code here, of the same computation), or say "own".
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.zoo import load_model

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]
BLOCKS: dict[str, Callable[[], Made]] = {}
WASTE: dict[str, Callable[[], Made]] = {}
SOURCES: dict[str, str] = {}


def block(name: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def declare(make: Callable[[], Made]) -> Callable[[], Made]:
        BLOCKS[name] = make
        return make

    return declare


def waste(name: str, source: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def declare(make: Callable[[], Made]) -> Callable[[], Made]:
        WASTE[name], SOURCES[name] = make, source
        return make

    return declare


def ready(module: nn.Module) -> nn.Module:
    """In evaluation mode, with statistics of batch norms that are not trivial."""
    torch.manual_seed(1)
    for item in module.modules():
        if isinstance(item, nn.BatchNorm2d):
            nn.init.normal_(item.running_mean, std=0.2)
            nn.init.uniform_(item.running_var, 0.5, 2.0)
            nn.init.uniform_(item.weight, 0.5, 1.5)
            nn.init.normal_(item.bias, std=0.2)
    return module.eval()


# --- blocks -------------------------------------------------------------------------------------


def convolution(inputs: int, outputs: int, kernel: int, padding: int = 0, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=padding, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class ResNeXtBlock(nn.Module):
    """256 channels, 32 groups of 4 (Xie et al. 2017, table 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            convolution(256, 128, 1),
            convolution(128, 128, 3, 1, groups=32),
            nn.Conv2d(128, 256, 1, bias=False),
            nn.BatchNorm2d(256),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x))


@block("ResNeXt-50 block")
def resnext() -> Made:
    return ready(ResNeXtBlock()), (torch.randn(1, 256, 56, 56),)


class InceptionA(nn.Module):
    """The first mixed block (Szegedy et al. 2016, figure 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.one = convolution(192, 64, 1)
        self.five = nn.Sequential(convolution(192, 48, 1), convolution(48, 64, 5, 2))
        self.three = nn.Sequential(convolution(192, 64, 1), convolution(64, 96, 3, 1), convolution(96, 96, 3, 1))
        self.pool = convolution(192, 32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.pool(F.avg_pool2d(x, 3, 1, 1))
        return torch.cat([self.one(x), self.five(x), self.three(x), pooled], 1)


@block("Inception-v3 block")
def inception() -> Made:
    return ready(InceptionA()), (torch.randn(1, 192, 35, 35),)


class Fire(nn.Module):
    """SqueezeNet's module (Iandola et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.one, self.three = (
            nn.Conv2d(256, 32, 1),
            nn.Conv2d(32, 128, 1),
            nn.Conv2d(32, 128, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)


@block("SqueezeNet fire")
def fire() -> Made:
    return ready(Fire()), (torch.randn(1, 256, 27, 27),)


class NasRNN(nn.Module):
    """The cell that Zoph and Le (2017) found, over five steps: eight products of the input, eight of the state."""

    def __init__(self, size: int = 512, steps: int = 5) -> None:
        super().__init__()
        self.steps = steps
        self.inputs = nn.ParameterList(torch.randn(size, size) / math.sqrt(size) for _ in range(8))
        self.states = nn.ParameterList(torch.randn(size, size) / math.sqrt(size) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[0])
        for step in range(self.steps):
            gates = [torch.mm(x[step], w) + torch.mm(state, v) for w, v in zip(self.inputs, self.states, strict=True)]
            first = torch.tanh(torch.sigmoid(gates[0]) + torch.relu(gates[3]))
            second = torch.sigmoid(torch.sigmoid(gates[1]) * torch.tanh(gates[2]))
            third = torch.tanh(torch.tanh(gates[4]) * torch.sigmoid(gates[5]))
            fourth = torch.tanh(torch.sigmoid(gates[6]) + torch.tanh(gates[7]))
            state = torch.tanh((first * second) + (third * fourth))
        return state


@block("NasRNN cell")
def nasrnn() -> Made:
    return ready(NasRNN()), (torch.randn(5, 1, 512),)


class Attention(nn.Module):
    """Separate projections, scores by hand."""

    def __init__(self, size: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.out = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, size = x.shape
        q, k, v = (
            layer(x).view(batch, tokens, self.heads, size // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(size // self.heads)
        if self.causal:
            scores = scores + torch.full((tokens, tokens), float("-inf")).triu(1)
        mixed = torch.matmul(torch.softmax(scores, -1), v)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, size))


class Gelu(nn.Module):
    """By tanh, written out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class BertLayer(nn.Module):
    """Post-norm encoder layer of BERT-base (Devlin et al. 2019)."""

    def __init__(self, size: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.attention = Attention(size, heads, causal=False)
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x + self.attention(x))
        return self.second(x + self.down(F.gelu(self.up(x))))


@block("BERT-base layer")
def bert() -> Made:
    return ready(BertLayer()), (torch.randn(1, 128, 768),)


class GptLayer(nn.Module):
    """Pre-norm decoder layer of GPT-2 (Radford et al. 2019), its GELU written out as there."""

    def __init__(self, size: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.attention = Attention(size, heads, causal=True)
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.up, self.down, self.gelu = nn.Linear(size, 4 * size), nn.Linear(4 * size, size), Gelu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(self.gelu(self.up(self.second(x))))


@block("GPT-2 layer")
def gpt2() -> Made:
    return ready(GptLayer()), (torch.randn(1, 256, 768),)


# --- wasteful programs --------------------------------------------------------------------------


@waste("GELU written out", "karpathy/minGPT mingpt/model.py, NewGELU")
def written_gelu() -> Made:
    return Gelu().eval(), (torch.randn(8, 128, 3072),)


class LoraLinear(nn.Module):
    def __init__(self, size: int = 768, rank: int = 64) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(size, size) / 28), nn.Parameter(torch.randn(size))
        self.a, self.b = nn.Parameter(torch.randn(rank, size) / 28), nn.Parameter(torch.randn(size, rank) / 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = F.linear(x, self.weight, self.bias)
        return result + (self.dropout(x) @ self.a.transpose(0, 1) @ self.b.transpose(0, 1)) * 2.0


@waste("LoRA beside its weight, one token", "microsoft/LoRA loralib/layers.py, Linear.forward")
def lora() -> Made:
    return LoraLinear().eval(), (torch.randn(1, 1, 768),)


class Norm(nn.Module):
    def __init__(self, size: int = 1024) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


@waste("RMS norm written out", "ajayspatil7/zephyra zephyra/layers/normalization.py, RMSNorm")
def rms_norm() -> Made:
    return Norm().eval(), (torch.randn(8, 256, 1024),)


class RepVgg(nn.Module):
    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.three = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.one = nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels))
        self.same = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.three(x) + self.one(x) + self.same(x))


@waste("RepVGG block as it is trained", "DingXiaoH/RepVGG repvgg.py, RepVGGBlock.forward")
def repvgg() -> Made:
    return ready(RepVgg()), (torch.randn(1, 64, 56, 56),)


class LinearAttention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.matmul(torch.matmul(q, k.transpose(-1, -2)), v)


@waste("attention without softmax", "smallscientist1/AttentionEngineFork doc/linearAttention/Readme.md")
def linear_attention() -> Made:
    return LinearAttention().eval(), tuple(torch.randn(4, 512, 64) for _ in range(3))


class Consensus(nn.Module):
    """Every segment is classified, then the scores are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2048, 400)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).mean(dim=1)


@waste("classifier before the mean over segments", "yjxiong/tsn-pytorch models.py, TSN.forward with consensus avg")
def consensus() -> Made:
    return Consensus().eval(), (torch.randn(4, 8, 2048),)


class LowRank(nn.Module):
    """A factored layer, multiplied out in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.randn(1024, 32)), nn.Parameter(torch.randn(32, 1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.u @ self.v)


@waste("factors multiplied in every call", "own")
def low_rank() -> Made:
    return LowRank().eval(), (torch.randn(64, 1024),)


class Bottleneck(nn.Module):
    """Linear layers with nothing between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@waste("linear layers in a row", "own")
def deep_linear() -> Made:
    return Bottleneck().eval(), (torch.randn(128, 512),)


class Ensemble(nn.Module):
    """The mean of several heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(1024, 256) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.heads[0](x)
        for head in self.heads[1:]:
            total = total + head(x)
        return total / 5.0


@waste("mean of linear heads", "own")
def ensemble() -> Made:
    return Ensemble().eval(), (torch.randn(64, 1024),)


class Lstm(nn.Module):
    """A cell by hand: four gates, each with two products."""

    def __init__(self, size: int = 512) -> None:
        super().__init__()
        self.x = nn.ModuleList(nn.Linear(size, size) for _ in range(4))
        self.h = nn.ModuleList(nn.Linear(size, size) for _ in range(4))

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        i, f, g, o = (one(x) + two(h) for one, two in zip(self.x, self.h, strict=True))
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c)


@waste("LSTM cell gate by gate", "own")
def lstm() -> Made:
    return Lstm().eval(), tuple(torch.randn(1, 512) for _ in range(3))


class Softmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raised = torch.exp(x)
        return raised / raised.sum(dim=-1, keepdim=True)


@waste("softmax written out", "own")
def softmax() -> Made:
    return Softmax().eval(), (torch.randn(64, 128, 128),)


class Twice(nn.Module):
    """The same layer is called for each of two results."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.mean, self.spread = nn.Linear(512, 2048), nn.Linear(2048, 32), nn.Linear(2048, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.mean(torch.relu(self.trunk(x))), self.spread(torch.relu(self.trunk(x)))


@waste("one trunk computed for each head", "own")
def twice() -> Made:
    return Twice().eval(), (torch.randn(64, 512),)


class GraphConvolution(nn.Module):
    """A dense graph's neighbours first, then a weight that leaves few features."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024, 16) / 32)

    def forward(self, adjacency: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return adjacency @ x @ self.weight


@waste("graph convolution in the dear order", "own; the cheap one is tkipf/pygcn pygcn/layers.py")
def graph_convolution() -> Made:
    return GraphConvolution().eval(), (torch.randn(512, 512), torch.randn(512, 1024))


class LayerNormed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)


@waste("layer norm written out", "own")
def layer_norm() -> Made:
    return LayerNormed().eval(), (torch.randn(8, 256, 768),)


class PoolAfter(nn.Module):
    """Channels are projected before most of the image is averaged away."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(256, 128, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(self.project(x), 2)


@waste(
    "1x1 convolution before an average pool", "pytorch/vision torchvision/models/densenet.py, _Transition without norm"
)
def pool_after() -> Made:
    return PoolAfter().eval(), (torch.randn(1, 256, 56, 56),)


class BertNorm(nn.Module):
    def __init__(self, size: int = 768) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(size) + 0.5), nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        spread = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * ((x - mean) / torch.sqrt(spread + 1e-12)) + self.bias


@waste("BERT's layer norm", "huggingface/pytorch-pretrained-BERT pytorch_pretrained_bert/modeling.py, BertLayerNorm")
def bert_norm() -> Made:
    return BertNorm().eval(), (torch.randn(8, 256, 768),)


class VarianceNorm(BertNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


@waste("layer norm by variance", "swz30/Restormer basicsr/models/archs/restormer_arch.py, WithBias_LayerNorm")
def variance_norm() -> Made:
    return VarianceNorm(96).eval(), (torch.randn(1, 64 * 64, 96),)


class ErfGelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


@waste("GELU by erf", "huggingface/pytorch-pretrained-BERT pytorch_pretrained_bert/modeling.py, gelu")
def erf_gelu() -> Made:
    return ErfGelu().eval(), (torch.randn(4, 128, 3072),)


class Swish(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


@waste("swish written out", "lukemelas/EfficientNet-PyTorch efficientnet_pytorch/utils.py, Swish")
def swish() -> Made:
    return Swish().eval(), (torch.randn(1, 96, 112, 112),)


class WrittenAttention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.matmul(torch.softmax(torch.matmul(q / 8.0, k.transpose(2, 3)), dim=-1), v)


@waste(
    "attention written out",
    "jadore801120/attention-is-all-you-need-pytorch transformer/Modules.py, ScaledDotProductAttention",
)
def written_attention() -> Made:
    return WrittenAttention().eval(), tuple(torch.randn(1, 8, 512, 64) for _ in range(3))


# --- whole models -------------------------------------------------------------------------------

# Shipped models by name, with the sizes that they run at, one sample at a time.
MODELS: dict[str, dict[str, int]] = {
    "resnet18": {},
    "resnet50": {},
    "vgg16": {},
    "unet": {},
    "ddpm-cifar10": {},
    "bert-base": {"sequence_length": 128},
    "gpt2-small": {"sequence_length": 128},
    "t5-small": {"sequence_length": 128},
    "llama-lora-tiny": {},
}


def whole(name: str) -> Made:
    source = load_model(name, batch_size=1, **MODELS[name])
    return ready(source.model), tuple(source.inputs)
