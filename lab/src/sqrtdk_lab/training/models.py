"""The models: a byte-level decoder, and an encoder and a decoder with cross attention, both pre-norm.

Their attention is `sqrtdk.nn.MultiHeadAttention` with the score, scale and initialisation of the run. The decoder has
rotary positions, the other model learned ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sqrtdk.nn import MultiHeadAttention
from sqrtdk.positions import rope
from sqrtdk.scales import ScaleRule, learned, sqrt_dk
from sqrtdk.scores import FoldedScore, LearnedGain, PairScore, cosine, keras_additive
from sqrtdk.stats.request import AuxOutput, AuxRequest
from sqrtdk_lab.training.settings import BYTES, LETTERS, START, SYMBOLS, TrainingSettings, letters_in

TRAINING_STATISTICS = AuxRequest(max_logit=True, min_logit=True, variance=True, entropy_nats=True, keys=True)
AuxOutputs = list[AuxOutput]


class StoredProducts(nn.Module):
    """The dot product, rounded to bfloat16 as soon as it is computed; its gradient is rounded too."""

    width = None

    @property
    def default_scale(self) -> ScaleRule:
        """1/sqrt(d_k)."""
        return sqrt_dk()

    def prepare(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return both unchanged, in float32."""
        return query.float(), key.float()

    def pairs(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the products (..., H, R, S)."""
        return (query @ key.mT).bfloat16().float()


# Plain numbers if possible, so that torch's kernel runs the call directly.
SCALE_BY_NAME: dict[str, Callable[[TrainingSettings], float | ScaleRule]] = {
    "none": lambda settings: 1.0,
    "sqrt_dk": lambda settings: settings.head_dim**-0.5,
    "dk": lambda settings: 1.0 / settings.head_dim,
    "power": lambda settings: settings.factor * settings.head_dim**-settings.exponent,
    "learned": lambda settings: learned(settings.heads),
}
SCORE_BY_NAME: dict[str, Callable[[int, int], FoldedScore | PairScore | None]] = {
    "dot": lambda heads, dim: None,
    "additive": lambda heads, dim: keras_additive(nn.Parameter(torch.empty(heads, dim))),
    "cosine": lambda heads, dim: cosine(gain=LearnedGain(heads)),
}


class Attention(nn.Module):
    """Pre-norm attention on a residual branch, over its own input or a memory."""

    def __init__(self, settings: TrainingSettings, *, causal: bool = False, rotary: bool = False) -> None:
        super().__init__()
        heads, dim = settings.heads, settings.head_dim
        self.causal = causal
        self.norm = nn.RMSNorm(settings.width, eps=1e-6)
        self.heads = MultiHeadAttention(
            settings.width,
            heads,
            bias=False,
            batch_first=True,
            head_dim=dim,
            value_head_dim=settings.width // heads,
            score=StoredProducts() if settings.logits == "stored" else SCORE_BY_NAME[settings.score](heads, dim),
            scale=SCALE_BY_NAME[settings.scale](settings),
            position=rope if rotary else None,
        )

    def forward(self, x: Tensor, memory: Tensor | None = None, record: AuxOutputs | None = None) -> Tensor:
        """Return hidden states (B, L, D); the statistics of the logits are appended to `record`."""
        inside = self.norm(x)
        memory = inside if memory is None else memory
        wanted = None if record is None else TRAINING_STATISTICS
        out, _, *aux = self.heads(inside, memory, memory, is_causal=self.causal, need_weights=False, return_aux=wanted)
        if record is not None:
            record.extend(aux)
        return x + out  # type: ignore[no-any-return]


class Network(nn.Module):
    """Pre-norm network with one hidden layer on a residual branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states (B, L, D)."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Self-attention, optional cross attention, and a network."""

    def __init__(
        self, settings: TrainingSettings, *, causal: bool = False, rotary: bool = False, cross: bool = False
    ) -> None:
        super().__init__()
        self.attention = Attention(settings, causal=causal, rotary=rotary)
        self.cross = Attention(settings) if cross else None
        self.network = Network(settings.width)

    def forward(self, x: Tensor, memory: Tensor | None = None, record: AuxOutputs | None = None) -> Tensor:
        """Return hidden states (B, L, D); `memory` (B, S, D) is for the cross attention."""
        x = self.attention(x, record=record)
        if self.cross is not None:
            x = self.cross(x, memory, record)
        return self.network(x)  # type: ignore[no-any-return]


def weights_of(attention: MultiHeadAttention) -> tuple[Tensor, Tensor]:
    """Return the weights of q and of k, (h d_k, d_model) each, as views of the parameter."""
    assert attention.in_proj_weight is not None, "queries and keys have one width here"
    rows = attention.num_heads * attention.head_dim
    return attention.in_proj_weight[:rows], attention.in_proj_weight[rows : 2 * rows]


@torch.no_grad()
def start(model: nn.Module, settings: TrainingSettings, generator: torch.Generator) -> None:
    """Draw new weights of standard deviation fan_in^-1/2, then apply `init` and `tied` to those of q and k."""
    for weight in model.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)
    for part in model.modules():
        if isinstance(part, MultiHeadAttention):
            query, key = weights_of(part)
            if settings.init == "folded":
                query.mul_(settings.head_dim**-0.5)
            elif settings.init == "0.02":
                for small in (query, key):
                    small.mul_(0.02 * settings.width**0.5)
            if settings.tied:
                tie(part)


def tie(attention: MultiHeadAttention) -> None:
    """Give every head the first head's weights of q and k, and average their gradients, so that they stay equal."""
    assert attention.in_proj_weight is not None
    weight, heads = attention.in_proj_weight, attention.num_heads
    rows = 2 * heads * attention.head_dim

    def shared(values: Tensor, reduced: Callable[[Tensor], Tensor]) -> Tensor:
        parts = values[:rows].view(2, heads, -1, values.shape[1])
        same = reduced(parts).unsqueeze(1).expand_as(parts).flatten(0, 2)
        return torch.cat([same, values[rows:]])

    weight.copy_(shared(weight, lambda parts: parts[:, 0]))
    weight.register_hook(  # type: ignore[no-untyped-call]
        lambda gradient: shared(gradient, lambda parts: parts.mean(1))
    )


class Decoder(nn.Module):
    """Maps bytes to the logits of the next byte; input embedding and output projection share their weights.

    Example:
        >>> import torch
        >>> settings = TrainingSettings("decoder", head_dim=512, rate=1e-3, seed=0)
        >>> Decoder(settings)(torch.zeros(1, 5, dtype=torch.long)).shape
        torch.Size([1, 5, 256])
    """

    def __init__(self, settings: TrainingSettings) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, settings.width)
        self.layers = nn.ModuleList(Layer(settings, causal=True, rotary=True) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.width, eps=1e-6)

    def forward(self, text: Tensor, record: AuxOutputs | None = None) -> Tensor:
        """Map bytes (B, L) to logits (B, L, 256)."""
        x = self.embed(text)
        for layer in self.layers:
            x = layer(x, record=record)
        return nn.functional.linear(self.norm(x), self.embed.weight)


class EncoderDecoder(nn.Module):
    """Maps a source and the target so far to the logits of the target's letters.

    Example:
        >>> import torch
        >>> settings = TrainingSettings("encoder_decoder", head_dim=16, rate=1e-3, seed=0)
        >>> source, target = torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
        >>> EncoderDecoder(settings)(source, target).shape
        torch.Size([2, 9, 16])
    """

    def __init__(self, settings: TrainingSettings) -> None:
        super().__init__()
        width = settings.width
        self.embed = nn.Embedding(SYMBOLS, width)
        self.source_places = nn.Embedding(settings.length, width)
        self.target_places = nn.Embedding(letters_in(settings.length), width)
        self.encoder = nn.ModuleList(Layer(settings) for _ in range(settings.layers))
        self.memory_norm = nn.RMSNorm(width, eps=1e-6)
        self.decoder = nn.ModuleList(Layer(settings, causal=True, cross=True) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, LETTERS, bias=False)

    def forward(self, source: Tensor, target: Tensor, record: AuxOutputs | None = None) -> Tensor:
        """Map source (B, S) and target (B, T) to logits (B, T, letters); each letter sees the target's earlier
        letters."""
        memory = self.embed(source) + self.source_places.weight
        for layer in self.encoder:
            memory = layer(memory, record=record)
        memory = self.memory_norm(memory)
        read = nn.functional.pad(target[:, :-1], (1, 0), value=START)
        x = self.embed(read) + self.target_places.weight
        for layer in self.decoder:
            x = layer(x, memory, record)
        return self.head(self.norm(x))  # type: ignore[no-any-return]
