"""The embedded model: a byte-level decoder in four variants that differ by one line, the scale of the attention.

`demo` is right. The other three had the same training (seed, data order, steps, learning rate) with a mistake that
people really make. `scripts/train_demo.py` trained all four on the text of Python's standard library.
"""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sqrtdk.errors import ModelError
from sqrtdk.messages import Message, joined

MODEL_DIM, HEADS, LAYERS, HIDDEN, BYTES = 128, 2, 3, 384, 256
CONTEXT = 1024  # bytes: four times the windows that it was trained on


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend as in the paper: multiply the dot products by 1/sqrt(d_k)."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=query.shape[-1] ** -0.5)


def _attend_unscaled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend by hand, without the scale."""
    logits = query @ key.transpose(-2, -1)
    return _hide_future(logits).softmax(dim=-1) @ value


def _attend_twice(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Scale q, although the fused call scales again by default."""
    query = query * query.shape[-1] ** -0.5
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _attend_inverted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend by hand, and multiply by sqrt(d_k) instead of dividing."""
    logits = query @ key.transpose(-2, -1) * math.sqrt(query.shape[-1])
    return _hide_future(logits).softmax(dim=-1) @ value


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "demo": _attend,
    "demo:unscaled": _attend_unscaled,
    "demo:twice": _attend_twice,
    "demo:inverted": _attend_inverted,
}


def _hide_future(logits: Tensor) -> Tensor:
    future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
    return logits.masked_fill(future, -math.inf)


def _rotate(x: Tensor) -> Tensor:
    """Apply rotary positions: turn the pair (x[i], x[i + d/2]) at position t by t / 10000^(2i/d)."""
    length, dim = x.shape[-2:]
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, device=x.device, dtype=torch.float32) / dim)
    angle = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = torch.cat((angle.cos(),) * 2, -1).to(x.dtype), torch.cat((angle.sin(),) * 2, -1).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class DemoAttention(nn.Module):
    """Causal self-attention of the built-in demo model, with two heads of 64 features and rotary positions."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.q_proj = nn.Linear(MODEL_DIM, MODEL_DIM, bias=False)
        self.k_proj = nn.Linear(MODEL_DIM, MODEL_DIM, bias=False)
        self.v_proj = nn.Linear(MODEL_DIM, MODEL_DIM, bias=False)
        self.o_proj = nn.Linear(MODEL_DIM, MODEL_DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention of hidden states, (B, L, D) to (B, L, D)."""
        query, key, value = (
            proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = VARIANTS[self.variant](_rotate(query), _rotate(key), value)
        return self.o_proj(out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class DemoBlock(nn.Module):
    """Pre-norm transformer block of the demo model: attention and a GELU MLP, each on a residual branch."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(MODEL_DIM, eps=1e-6)
        self.attention = DemoAttention(variant)
        self.norm2 = nn.RMSNorm(MODEL_DIM, eps=1e-6)
        self.up = nn.Linear(MODEL_DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, MODEL_DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for hidden states, (B, L, D) to (B, L, D)."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class DemoModel(nn.Module):
    """Byte-level decoder: 256 symbols, 3 layers of width 128, 2 heads of 64, half a million parameters.

    The weights start with standard deviation `fan_in ** -0.5`, so that the entries of q and k have variance near 1 and
    their product has variance near 64: the assumption under which the scale is derived.

    Args:
        variant: One of `VARIANTS`.

    Raises:
        ModelError: `variant` is not in the table.

    Example:
        >>> DemoModel("demo")(torch.zeros(1, 5, dtype=torch.long)).shape
        torch.Size([1, 5, 256])
    """

    def __init__(self, variant: str = "demo") -> None:
        super().__init__()
        if variant not in VARIANTS:
            raise ModelError(
                Message("errors.model.no_demo", variant=repr(variant)),
                hint=Message("errors.hint.one_of", names=joined([*VARIANTS], "comma")),
            )
        self.embed = nn.Embedding(BYTES, MODEL_DIM)
        self.blocks = nn.ModuleList(DemoBlock(variant) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(MODEL_DIM, eps=1e-6)
        self.head = nn.Linear(MODEL_DIM, BYTES, bias=False)
        self.head.weight = self.embed.weight
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # As in GPT-2, what is added to the residual stream starts smaller, by sqrt(2 LAYERS).
                branch_end = name.endswith(("o_proj.weight", "down.weight"))
                nn.init.normal_(weight, std=(weight.shape[1] * (2 * LAYERS if branch_end else 1)) ** -0.5)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits of the next byte, (B, L, 256), for bytes (B, L), integers below 256."""
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def weights_name(variant: str) -> str:
    """Return the name of the variant's files in `sqrtdk/models/weights`, without the suffix.

    Example:
        >>> weights_name("demo:twice")
        'demo-twice'
    """
    return variant.replace(":", "-")


def load_demo(variant: str = "demo") -> DemoModel:
    """Load the trained embedded model, in float32 and eval mode.

    Args:
        variant: `demo` (1/sqrt(64)), `demo:unscaled` (1), `demo:twice` (1/64) or `demo:inverted` (sqrt(64)).

    Raises:
        ModelError: There is no such variant, or the installed package lacks its weights.

    Example:
        >>> sum(p.numel() for p in load_demo("demo:twice").parameters())
        525184
    """
    from safetensors.torch import load

    with torch.random.fork_rng(devices=[]):
        model = DemoModel(variant)
    file = importlib.resources.files("sqrtdk.models") / "weights" / f"{weights_name(variant)}.safetensors"
    if not file.is_file():
        raise ModelError(
            Message("errors.model.demo_weights", variant=repr(variant)),
            hint=Message("errors.hint.reinstall"),
        )
    state = {name: weight.float() for name, weight in load(file.read_bytes()).items()}
    model.load_state_dict(state | {"head.weight": state["embed.weight"]})
    return model.eval()
