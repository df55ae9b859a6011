"""An attention whose scale, softcap, window, mask, sinks and groups can be changed without the model's code.

A model of transformers calls it by name, as one of its attention implementations. A module of one's own calls
`torch.nn.functional.scaled_dot_product_attention`, which is replaced while a copy runs. The changes of an attention
stand on its module:

| change     | value                                                                     |
|------------|---------------------------------------------------------------------------|
| `scale`    | factor on the product                                                     |
| `softcap`  | c of c tanh(z / c); None for none                                         |
| `window`   | keys that a row sees, itself counted; None for every earlier key          |
| `causal`   | whether no row sees a later key                                           |
| `later`    | later keys that a row sees                                                |
| `tiled`    | whether query head h reads key head h mod H, not h div (Hq / H)           |
| `sinks`    | whether a learned sink takes part                                         |
| `cache`    | how k and v are rounded, a function                                       |
| `products` | how q and the weights are rounded, a function; None if they are not       |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sqrtdk.models.extras import attention_registers

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

CHANGED_ATTENTION = "sqrtdk_edited"  # name of our attention among transformers' own
CHANGES_HERE = "_sqrtdk_changes"  # attribute of an attention module in a copy
SEEN = "_sqrtdk_seen"


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What an attention module was called with.

    Attributes:
        name: Module path.
        heads: Query heads.
        groups: Key heads.
        head_dim: Width of q and k, E.
        scale: Factor on the product.
        softcap: The c of c tanh(z / c); None without.
        window: Keys that a row sees at most, itself counted; None where a row sees every earlier key.
        sinks: Whether it has a learned sink logit.
        causal: Whether no row sees a later key.
    """

    name: str
    heads: int
    groups: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None
    sinks: bool
    causal: bool


def use_in_transformers(module: nn.Module) -> None:
    """Let a model of transformers call this attention, with eager's masks; another module stays as it is."""
    configs = [getattr(part, "config", None) for part in module.modules()]
    ours: list[Any] = [config for config in configs if hasattr(config, "_attn_implementation")]
    if not ours:
        return
    functions, masks = attention_registers()
    from transformers.masking_utils import eager_mask

    functions.register(CHANGED_ATTENTION, _called_by_transformers)
    masks.register(CHANGED_ATTENTION, eager_mask)
    for config in ours:
        config._attn_implementation = CHANGED_ATTENTION


@contextlib.contextmanager
def attending(module: nn.Module) -> Iterator[None]:
    """Replace torch's attention while a module of one's own runs; a model of transformers calls ours itself."""
    if hasattr(getattr(module, "config", None), "_attn_implementation"):
        yield
        return
    running: list[nn.Module] = []
    hooks = []
    for part in module.modules():
        hooks.append(part.register_forward_pre_hook(lambda part, _inputs: running.append(part)))
        hooks.append(part.register_forward_hook(lambda _part, _inputs, _output: _dropped(running)))
    try:
        with _Replaced(running):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _dropped(running: list[nn.Module]) -> None:
    running.pop()


class _Replaced(TorchFunctionMode):
    """Calls `attend` for torch's attention."""

    def __init__(self, running: list[nn.Module]) -> None:
        super().__init__()
        self._running = running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention or not self._running:
            return func(*args, **(kwargs or {}))
        return _called_for_torch(self._running[-1], *args, **(kwargs or {}))


def _called_for_torch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        least = torch.finfo(query.dtype).min
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, least)
    return changed_attention(module, query, key, value, attn_mask, scale)[0]


def _called_by_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, Tensor]:
    output, weights = changed_attention(
        module, query, key, value, attention_mask, scaling, softcap, s_aux, position_bias
    )
    return output.transpose(1, 2).contiguous(), weights


def changed_attention(
    module: nn.Module,
    query: Float[Tensor, "B Hq L E"],
    key: Float[Tensor, "B H S E"],
    value: Float[Tensor, "B H S Ev"],
    mask: Float[Tensor, "..."] | None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " Hq"] | None = None,
    bias: Float[Tensor, "..."] | None = None,
) -> tuple[Float[Tensor, "B Hq L Ev"], Float[Tensor, "B Hq L S"]]:
    """Return an attention's output and weights with the changes that stand on its module.

    Args:
        module: The attention.
        query: q.
        key: k.
        value: v.
        mask: What is added to the logits: 0 where a key is visible, the least number of the dtype where not.
        scale: Factor on the product; None for 1/sqrt(E).
        softcap: See `AttentionFacts`.
        sinks: A logit a head that takes part in the softmax and has no value.
        bias: Added to the logits.
    """
    changes = module.__dict__.get(CHANGES_HERE, {})
    heads, groups, rows, keys = query.shape[1], key.shape[1], query.shape[2], key.shape[2]
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    if (seen := module.__dict__.get(SEEN)) is not None and module not in seen:
        visible = _visible(mask, rows, keys, query.device)
        seen[module] = {
            "heads": heads, "groups": groups, "head_dim": query.shape[-1], "scale": scale, "softcap": softcap,
            "window": _window_of(visible), "sinks": sinks is not None, "causal": not bool(visible.triu(1).any()),
        }  # fmt: skip
    scale, softcap = changes.get("scale", scale), changes.get("softcap", softcap)
    rounded: Callable[[Tensor], Tensor] | None = changes.get("cache")
    if rounded is not None:
        key, value = rounded(key), rounded(value)
    products: Callable[[Tensor], Tensor] | None = changes.get("products")
    if products is not None:
        query = products(query)
    repeat = partial(Tensor.repeat_interleave, repeats=heads // groups, dim=1)
    if changes.get("tiled"):
        repeat = lambda part: part.repeat(1, heads // groups, 1, 1)  # type: ignore[assignment]  # noqa: E731
    key, value = repeat(key), repeat(value)
    logits = query @ key.mT * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if changes.keys() & {"window", "causal", "later"}:
        later = changes.get("later", 0) if changes.get("causal", True) else keys
        logits = logits.masked_fill(~_band(rows, keys, changes.get("window"), later, query.device), -torch.inf)
    elif mask is not None:
        logits = logits + mask[..., :keys]
    if bias is not None:
        logits = logits + bias
    if sinks is not None and changes.get("sinks", True):
        sink = sinks.reshape(1, -1, 1, 1).expand(len(logits), heads, rows, 1).to(logits.dtype)
        weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    if products is not None:
        weights = products(weights)
    return weights.to(value.dtype) @ value, weights


def _band(rows: int, keys: int, window: int | None, later: int, device: torch.device) -> Bool[Tensor, "L S"]:
    """Return which keys a row sees: `later` later ones at most, and `window` earlier ones, itself counted."""
    behind = torch.arange(rows, device=device)[:, None] + (keys - rows) - torch.arange(keys, device=device)
    visible = behind >= -later
    return visible if window is None else visible & (behind.abs() < window)


def _visible(mask: Tensor | None, rows: int, keys: int, device: torch.device) -> Bool[Tensor, "L S"]:
    if mask is None:
        return torch.ones(rows, keys, dtype=torch.bool, device=device)
    whole = mask[(0,) * (mask.dim() - 2)][:, :keys].expand(rows, keys)
    return whole > torch.finfo(whole.dtype).min / 2


def _window_of(visible: Bool[Tensor, "L S"]) -> int | None:
    """Return how many keys the last row sees, if they are the last ones and not all."""
    seen = int(visible[-1].sum())
    return seen if seen < visible.shape[-1] and visible[-1, -seen:].all() else None
