"""What `check` of a JAX function costs next to that of its torch twin: CPU seconds, both in turn, round by round.

A decoder of 12 layers (width 512, 8 heads of 64, 64 tokens) written twice, with the same weights. Made anew each round:
the twin, and the JAX function, which `from_jax` traces and compares with JAX. The first round is not counted.

    python benchmarks/jax_check.py [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.frontends import from_jax

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 12, 512, 8, 64, 1000


class Layer(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.n1, self.n2 = nn.RMSNorm(WIDTH, 1e-6), nn.RMSNorm(WIDTH, 1e-6)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        h = self.n1(x)
        q, k, v = (part(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(self.n2(x))))


class Twin(nn.Module):
    """The decoder in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def norm(x: Any, gain: Any) -> Any:
    """RMSNorm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def layer(x: Any, p: Any) -> Any:
    """One layer in JAX."""
    h = norm(x, p["n1"])
    q, k, v = ((h @ p[name]).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["o"]
    return x + jax.nn.silu(norm(x, p["n2"]) @ p["up"]) @ p["down"]


def decoder(p: Any, ids: Any) -> Any:
    """The decoder in JAX."""
    x = p["embed"][ids]
    for each in p["layers"]:
        x = layer(x, each)
    return x


def parameters(twin: Twin) -> Any:
    """The twin's weights as the JAX code has them."""
    made = {"embed": jnp.asarray(twin.embed.weight.detach().numpy()), "layers": []}
    for each in twin.layers:
        weights = {name.partition(".")[0]: tensor.detach() for name, tensor in each.named_parameters()}
        made["layers"].append(
            {name: jnp.asarray((tensor.mT if tensor.dim() > 1 else tensor).numpy()) for name, tensor in weights.items()}
        )
    return made


def seconds(run: Any) -> tuple[float, Any]:
    """CPU seconds of a call, and its result."""
    before = time.process_time()
    result = run()
    return time.process_time() - before, result


def main() -> None:
    """Print medians and ratios."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=7)
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (2, LENGTH))
    rows = []
    for _ in range(options.parse_args().rounds + 1):
        twin = Twin().eval()
        tree = parameters(twin)
        torch_check, report = seconds(lambda twin=twin: sqrtdk.check(twin, (ids,)))
        made, module = seconds(lambda tree=tree: from_jax(decoder, tree, jnp.asarray(ids.numpy())))
        jax_check, other = seconds(lambda module=module: sqrtdk.check(module, (ids,)))
        assert len(report.calls) == len(other.calls) == LAYERS
        rows.append((torch_check, jax_check, made))
    names = ("check of the torch twin", "check of the JAX function", "from_jax")
    for name, column in zip(names, zip(*rows[1:], strict=True), strict=True):
        print(f"{name:28}{statistics.median(column):8.2f} s  ({min(column):.2f} to {max(column):.2f})")
    ratio = statistics.median(two / one for one, two, _ in rows[1:])
    print(f"check of the JAX function is {ratio:.2f} times that of its twin")


if __name__ == "__main__":
    main()
