"""Small models in plain PyTorch, each with a switch for what is wrong in it; and their inputs, a batch of three.

`wrong` is one of: "future" (no causal mask), "batch" (a row of each sample sees those of the others), "padding" (the
mask is taken and not used), "documents" (packed rows under a plainly causal mask), None.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 3, 12, 32, 4, 50


def ids(length: int = LENGTH, batch: int = BATCH) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(5))


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(6))


def padded(length: int = LENGTH, hidden: int = 4, batch: int = BATCH) -> Tensor:
    """A mask of ones but for the last positions of the last sample."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length - hidden :] = 0
    return mask


class Attention(nn.Module):
    """Of hidden states to others, or to themselves; `visible` (B, 1, L, S) is True where a row sees a key."""

    def __init__(self, written_out: bool = False, over_batch: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.written_out, self.over_batch = written_out, over_batch
        with torch.no_grad():
            self.q.weight.mul_(3)
            self.k.weight.mul_(3)

    def forward(self, x: Tensor, other: Tensor, visible: Tensor | None) -> Tensor:
        turned = self.over_batch and x.shape == other.shape
        if turned:
            x, other, visible = x.transpose(0, 1), other.transpose(0, 1), None
        elif self.over_batch:
            other = other.roll(1, 0)
        heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(x), self.k(other), self.v(other)))
        q, k, v = heads
        if self.written_out:
            logits = q @ k.mT * q.shape[-1] ** -0.5
            logits = logits if visible is None else logits.masked_fill(~visible, -1e9)
            out = logits.softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        out = self.o(out.transpose(1, 2).flatten(2))
        return out.transpose(0, 1) if turned else out


class Decoder(nn.Module):
    """Ids in, logits out, causal; packed rows where position ids restart."""

    def __init__(self, wrong: str | None = None, written_out: bool = False) -> None:
        super().__init__()
        self.wrong, self.is_causal = wrong, True
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Attention(written_out, wrong == "batch") for _ in range(2))
        for layer in self.layers:
            layer.is_causal = True
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        batch, length = input_ids.shape
        visible = torch.ones(batch, 1, length, length, dtype=torch.bool)
        if self.wrong != "future":
            visible = visible.tril()
        if attention_mask is not None and self.wrong != "padding":
            visible = visible & attention_mask[:, None, None].bool() | torch.eye(length, dtype=torch.bool)
        positions = torch.arange(length).expand(batch, length) if position_ids is None else position_ids
        if position_ids is not None and self.wrong != "documents":
            document = (positions == 0).cumsum(-1)
            visible = visible & (document[:, None, :, None] == document[:, None, None, :])
        x = self.embed(input_ids) + self.place(positions)
        for layer in self.layers:
            x = x + layer(x, x, visible)
        return self.head(x)


class Encoder(nn.Module):
    """Ids in, a vector a token and one of each sample out."""

    def __init__(self, wrong: str | None = None, written_out: bool = False) -> None:
        super().__init__()
        self.wrong = wrong
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Attention(written_out, wrong == "batch") for _ in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        visible = attention_mask[:, None, None].bool() if self.wrong != "padding" else None
        for layer in self.layers:
            x = x + layer(x, x, visible)
        return {"tokens": x, "pooled": x[:, 0]}


class EncoderDecoder(nn.Module):
    """Ids in and decoder ids in, logits of the decoder's tokens out."""

    def __init__(self, wrong: str | None = None, written_out: bool = False) -> None:
        super().__init__()
        self.wrong = wrong
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.encoder, self.own, self.across = (Attention(written_out, wrong == "batch") for _ in range(3))
        self.own.is_causal = True

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        seen = attention_mask[:, None, None].bool() if self.wrong != "padding" else None
        length = decoder_input_ids.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool).tril() if self.wrong != "future" else None
        memory, x = self.embed(input_ids), self.embed(decoder_input_ids)
        memory = memory + self.encoder(memory, memory, seen)
        x = x + self.own(x, x, earlier)
        return self.head(x + self.across(x, memory, seen))


class Images(nn.Module):
    """Pixels in, a logit a class out."""

    def __init__(self, wrong: str | None = None, written_out: bool = False) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, WIDTH, 4, 4), nn.Linear(WIDTH, 7)
        self.layers = nn.ModuleList(Attention(written_out, wrong == "batch") for _ in range(2))

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).mT
        for layer in self.layers:
            x = x + layer(x, x, None)
        return self.head(x.mean(1))


class Audio(nn.Module):
    """Features (B, n, E) and their lengths in, features out."""

    def __init__(self, wrong: str | None = None, written_out: bool = False) -> None:
        super().__init__()
        self.wrong = wrong
        self.layers = nn.ModuleList(Attention(written_out, wrong == "batch") for _ in range(2))

    def forward(self, features: Tensor, attention_mask: Tensor) -> Tensor:
        visible = attention_mask[:, None, None].bool() if self.wrong != "padding" else None
        x = features
        for layer in self.layers:
            x = x + layer(x, x, visible)
        return x


class Cross(nn.Module):
    """Hidden states in, and those of an encoder with their mask."""

    def __init__(self, wrong: str | None = None, written_out: bool = False) -> None:
        super().__init__()
        self.wrong, self.attention = wrong, Attention(written_out, wrong == "batch")

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, encoder_attention_mask: Tensor) -> Tensor:
        visible = encoder_attention_mask[:, None, None].bool() if self.wrong != "padding" else None
        return hidden_states + self.attention(hidden_states, encoder_hidden_states, visible)


class TorchEncoder(nn.Module):
    """`nn.TransformerEncoder` over ids, causal or with a padding mask."""

    def __init__(self, wrong: str | None = None, causal: bool = False) -> None:
        super().__init__()
        self.wrong, self.is_causal = wrong, causal
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=wrong != "batch")
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for part in self.encoder.layers:
            part.self_attn.is_causal = causal

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        length = input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = None if attention_mask is None else attention_mask == 0
        return self.head(
            self.encoder(
                self.embed(input_ids),
                mask=mask if self.is_causal and self.wrong not in ("future", "batch") else None,
                src_key_padding_mask=hidden if self.wrong not in ("padding", "batch") else None,
            )
        )


INPUTS = {
    "decoder": lambda: {"input_ids": ids(), "attention_mask": padded()},
    "encoder": lambda: {"input_ids": ids(), "attention_mask": padded()},
    "encoder-decoder": lambda: {"input_ids": ids(), "attention_mask": padded(), "decoder_input_ids": ids(9)},
    "images": lambda: {"pixel_values": noise(BATCH, 3, 16, 16)},
    "audio": lambda: {"features": noise(BATCH, LENGTH, WIDTH), "attention_mask": padded()},
    "cross": lambda: {
        "hidden_states": noise(BATCH, 7, WIDTH),
        "encoder_hidden_states": noise(BATCH, LENGTH, WIDTH),
        "encoder_attention_mask": padded(),
    },
}
MODELS = {
    "decoder": Decoder, "encoder": Encoder, "encoder-decoder": EncoderDecoder, "images": Images, "audio": Audio,
    "cross": Cross,
}  # fmt: skip
CAN_BE = {  # what can be wrong with each kind, and the law that sees it
    "decoder": ("future", "batch", "padding"),
    "encoder": ("batch", "padding"),
    "encoder-decoder": ("future", "batch", "padding"),
    "images": ("batch",),
    "audio": ("batch", "padding"),
    "cross": ("batch", "padding"),
}
LAW_OF = {"future": "causal", "batch": "samples", "padding": "padding", "documents": "documents"}


def packed(first: int = 5, length: int = LENGTH) -> Tensor:
    """Position ids of two documents in each row."""
    return torch.cat((torch.arange(first), torch.arange(length - first)))[None].repeat(BATCH, 1)
