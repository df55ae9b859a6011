"""Small attentions in plain PyTorch, one for each way to lay out the projections of q and k."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


def randomised(model: nn.Module, size: float = 3.0, seed: int = 1) -> nn.Module:
    """Random weights that make large logits, and gains that differ from channel to channel; float64."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim > 1:
                parameter.copy_(noise * (size / parameter.shape[-1] ** 0.5))
            else:
                parameter.add_(0.3 * noise)
    return model


class Attention(nn.Module):
    """Attention of four heads whose q and k pass through `between`, and whose logits through `after`."""

    def __init__(
        self,
        between: Callable[[Attention, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        after: Callable[[Attention, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.between, self.after = between, after
        self.of_values: Callable[[Tensor], Tensor] = lambda v: v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, 8)).transpose(1, 2) for project in (self.q, self.k, self.v))
        if self.between is not None:
            q, k = self.between(self, q, k)
        logits = q @ k.mT * 8**-0.5
        if self.after is not None:
            logits = self.after(self, logits)
        return (logits.softmax(-1) @ self.of_values(v)).transpose(1, 2).flatten(2)


class WithGain(Attention):
    """Norms over each head with gains that are parameters of the attention itself."""

    def __init__(self, norm: Callable[[Tensor], Tensor] | None = None, offset: float = 0.0) -> None:
        norm = norm or (lambda x: functional.rms_norm(x, (8,), eps=1e-6))
        super().__init__(lambda own, q, k: (norm(q) * (offset + own.q_gain), norm(k) * (offset + own.k_gain)))
        self.q_gain, self.k_gain = (nn.Parameter(torch.ones(8)) for _ in range(2))


class WithScale(Attention):
    """A learned scale for each head."""

    def __init__(self) -> None:
        super().__init__(after=lambda own, logits: logits * own.head_scale)
        self.head_scale = nn.Parameter(torch.ones(4, 1, 1))


def states(seed: int = 2, features: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 6, features, generator=generator, dtype=torch.float64)


class Transposed(nn.Module):
    """q, k and v of one weight of (inputs, features), as GPT-2's Conv1D has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(32, 96)), nn.Parameter(torch.zeros(96))

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.addmm(self.bias, x.flatten(0, 1), self.weight).view(*x.shape[:2], 96)
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in joined.split(32, -1))
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Latent(nn.Module):
    """Multi-head latent attention: keys of 8 channels of each head's own, and 4 that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down = nn.Linear(32, 4 * 12, bias=False), nn.Linear(32, 20, bias=False)
        self.up = nn.Linear(16, 4 * 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 12)).transpose(1, 2)
        latent, shared = self.down(x).split([16, 4], -1)
        own, v = self.up(latent).unflatten(-1, (4, 16)).transpose(1, 2).split([8, 8], -1)
        k = torch.cat([own, shared.unsqueeze(1).expand(-1, 4, -1, -1)], -1)
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
