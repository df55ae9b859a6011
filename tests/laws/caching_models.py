"""Small causal models with a cache, in plain PyTorch, each with a switch for what is wrong in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, VOCABULARY = 32, 2, 40
SIZE = WIDTH // HEADS


def ids(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def noise(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate the halves of (B, H, n, E) by positions of (B, n) or (n,)."""
    frequencies = 100.0 ** -(torch.arange(0, SIZE, 2) / SIZE)
    angle = positions[..., None] * frequencies
    angle = angle if angle.dim() == 2 else angle[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Projections(nn.Module):
    """q, k and v of (B, H, n, E), and the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        with torch.no_grad():
            self.q_proj.weight.mul_(3)
            self.k_proj.weight.mul_(3)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [
            part(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        ]

    def back(self, y: Tensor) -> Tensor:
        return self.o_proj(y.transpose(1, 2).flatten(2))


def lower_right(rows: int, keys: int) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


class Layer(Projections):
    """Wrong are: "corner" (upper left), "again" (cached keys are turned at each step), "order" (new keys go before old
    ones), "q alone", "q twice" (rotations), None."""

    def __init__(self, wrong: str | None) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, x: Tensor, positions: Tensor, shown: Tensor | None, past: Any) -> tuple[Tensor, Any]:
        q, k, v = self.heads(x)
        q = turned(q, positions)
        q = turned(q, positions) if self.wrong == "q twice" else q
        k = k if self.wrong == "q alone" else turned(k, positions)
        if past is not None:
            old = turned(past[0], torch.arange(past[0].shape[2])) if self.wrong == "again" else past[0]
            new = (k, v)
            k, v = torch.cat((old, k), 2), torch.cat((past[1], v), 2)
            if self.wrong == "order":
                k, v = torch.cat((new[0], old), 2), torch.cat((new[1], past[1]), 2)
        rows, keys = q.shape[2], k.shape[2]
        visible = torch.ones(rows, keys, dtype=torch.bool).tril() if self.wrong == "corner" else lower_right(rows, keys)
        if shown is not None:
            own = lower_right(rows, keys).triu(keys - rows)
            visible = visible & shown[:, None, None] | own
        return self.back(F.scaled_dot_product_attention(q, k, v, attn_mask=visible)), (k, v)


class Decoder(nn.Module):
    """Ids in, logits and cached keys out; wrong are also: "offset" (each step begins at position 0), "short mask" (a
    step hides padding among its own tokens alone), "lengths" (the mask is read as a number of tokens at the beginning),
    "counted" (learned positions count padding, and are not those that are given)."""

    def __init__(self, wrong: str | None = None, learned: bool = False) -> None:
        super().__init__()
        self.wrong, self.is_causal = wrong, True
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.place = nn.Embedding(40, WIDTH) if learned else None
        self.layers = nn.ModuleList(Layer(wrong) for _ in range(2))

    def positions(self, rows: int, cached: int, given: Tensor | None) -> Tensor:
        if given is not None and self.wrong != "counted":
            return given
        return torch.arange(rows) if self.wrong == "offset" else torch.arange(cached, cached + rows)

    def shown(self, mask: Tensor | None, rows: int) -> Tensor | None:
        if mask is None:
            return None
        if self.wrong == "lengths":
            return torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)
        shown = mask.bool()
        if self.wrong == "short mask":
            shown = torch.cat((torch.ones_like(shown[:, rows:]), shown[:, -rows:]), 1)
        return shown

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> dict[str, Any]:
        rows = input_ids.shape[1]
        cached = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        positions, x, present = self.positions(rows, cached, position_ids), self.embed(input_ids), []
        if self.place is not None:
            x = x + self.place(positions)
        for number, layer in enumerate(self.layers):
            past = None if past_key_values is None else past_key_values[number]
            y, kept = layer(x, positions, self.shown(attention_mask, rows), past)
            x = x + y
            present.append(kept)
        return {"logits": self.head(x), "past_key_values": tuple(present)} if use_cache else {"logits": self.head(x)}


class Store:
    """Keys and values that are added to in place."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def add(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.key = key if self.key is None else torch.cat((self.key, key), 2)
        self.value = value if self.value is None or self.key is key else torch.cat((self.value, value), 2)
        return self.key, self.value


class Stored(Projections):
    """Features in and out; it fills the object that it gets. `counts` cached keys for the positions of new ones."""

    def __init__(self, counts: bool = True) -> None:
        super().__init__()
        self.counts, self.is_causal = counts, True

    def forward(self, x: Tensor, kv_cache: Store) -> Tensor:
        q, k, v = self.heads(x)
        before = 0 if kv_cache.key is None or not self.counts else kv_cache.key.shape[2]
        positions = torch.arange(before, before + x.shape[1])
        k, v = kv_cache.add(turned(k, positions), v)
        visible = lower_right(q.shape[2], k.shape[2])
        return self.back(F.scaled_dot_product_attention(turned(q, positions), k, v, attn_mask=visible))


class Returned(Projections):
    """Features in; features, keys and values out, a tuple of three. `corner`: the mask begins at the first key."""

    def __init__(self, corner: bool = False) -> None:
        super().__init__()
        self.corner, self.is_causal = corner, True

    def forward(self, x: Tensor, past_key: Tensor | None = None, past_value: Tensor | None = None) -> Any:
        q, k, v = self.heads(x)
        if past_key is not None and past_value is not None:
            k, v = torch.cat((past_key, k), 2), torch.cat((past_value, v), 2)
        if self.corner:
            return self.back(F.scaled_dot_product_attention(q, k, v, is_causal=True)), k, v
        visible = lower_right(q.shape[2], k.shape[2])
        return self.back(F.scaled_dot_product_attention(q, k, v, attn_mask=visible)), k, v


class Behind(Projections):
    """New rows behind keys that are given, and not returned, (B, n, H, E) if `flat`.

    Wrong are: "corner", "offset", "again" (given keys are turned twice), None; `unturned` keys are given as they were
    projected.
    """

    def __init__(self, wrong: str | None = None, flat: bool = False, unturned: bool = False) -> None:
        super().__init__()
        self.wrong, self.flat, self.unturned = wrong, flat, unturned

    def forward(self, x: Tensor, past_key: Tensor, past_value: Tensor) -> Tensor:
        if self.flat:
            past_key, past_value = past_key.transpose(1, 2), past_value.transpose(1, 2)
        q, k, v = self.heads(x)
        cached, rows = past_key.shape[2], x.shape[1]
        positions = torch.arange(rows) if self.wrong == "offset" else torch.arange(cached, cached + rows)
        q, k = turned(q, positions), turned(k, positions)
        if self.unturned:
            past_key = turned(past_key, torch.arange(cached))
            past_key = turned(past_key, torch.arange(cached)) if self.wrong == "again" else past_key
        k, v = torch.cat((past_key, k), 2), torch.cat((past_value, v), 2)
        if self.wrong == "corner":
            return self.back(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.back(F.scaled_dot_product_attention(q, k, v, attn_mask=lower_right(rows, cached + rows)))


class Slots(Projections):
    """Keys are written into 20 slots; `hides` those after the last row."""

    def __init__(self, hides: bool) -> None:
        super().__init__()
        self.hides = hides
        self.register_buffer("slots", torch.zeros(2, 2, HEADS, 20, SIZE))

    def forward(self, x: Tensor, cache_position: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        keys, values = self.slots.clone()
        keys[:, :, cache_position], values[:, :, cache_position] = k, v
        slots = torch.arange(20)
        visible = slots <= cache_position[:, None]
        if not self.hides:
            visible = visible | (slots > cache_position[-1])
        return self.back(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible))
