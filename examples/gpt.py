"""A small GPT over bytes: pre-norm decoder, rotary positions, GELU feed-forward.

- Bytes: a vocabulary of 256 needs no tokenizer and no file beside the text.
- Rotary positions: no table of learned positions, so no longest context is built into the model.
- Untied head: with 256 symbols, tying it to the embedding would save next to nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
HEAD_WIDTH = 64


class Shape(NamedTuple):
    """Number of blocks, and width of the residual stream (a multiple of ``HEAD_WIDTH``)."""

    depth: int
    width: int


#: Named by their number of parameters, 12 * depth * width ** 2 and a little more.
SIZES = {
    "1m": Shape(5, 128),
    "10m": Shape(6, 384),
    "25m": Shape(8, 512),
    "125m": Shape(18, 768),
    "350m": Shape(28, 1024),
    "1.3b": Shape(26, 2048),
    "2.7b": Shape(34, 2560),
    "6.7b": Shape(33, 4096),
    "13b": Shape(41, 5120),
}


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, length, head width)."""
    length, width = x.shape[-2:]
    # Angles in fp32 whatever the precision: a 16-bit position would be off after a few hundred.
    position = torch.arange(length, device=x.device, dtype=torch.float32)
    frequency = 10000 ** -torch.arange(0, 1, 2 / width, device=x.device, dtype=torch.float32)
    angle = torch.outer(position, frequency)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, length, 3 * width) -> three of (batch, heads, length, head width)
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """Four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention, then feed-forward, each added to the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """Bytes in, (batch, length, 256) logits of the next byte out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.Sequential(*(Block(shape.width) for _ in range(shape.depth)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self._initialize(shape.depth)

    def _initialize(self, depth: int) -> None:
        """GPT-2's: small normal weights, smaller where a layer adds to the residual stream."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                adds = name.endswith("out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if adds else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(text))))

    @torch.no_grad()
    def generate(self, text: Tensor, count: int, context: int, top_k: int) -> Tensor:
        """Appends ``count`` bytes to (batch, length) ``text``, each drawn from the ``top_k``
        likeliest; sees at most the last ``context`` bytes."""
        for _ in range(count):
            logits = self(text[:, -context:])[:, -1].float()
            best, symbols = logits.topk(top_k)
            choice = torch.multinomial(best.softmax(dim=-1), num_samples=1)
            text = torch.cat((text, symbols.gather(1, choice)), dim=1)
        return text
