"""Attentions that did not run are named, and no other: fused paths, wrappers and functions do run their parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk._check import check
from sqrtdk.messages import Message
from sqrtdk.models.attentions import silent_attentions


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class AttentionWithNorm(nn.Module):
    """Named as an attention, but the attention is its child's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dense = Attention(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.inner(x))


class Layer(nn.Module):
    def __init__(self, kind: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.self_attn, self.cross_attn = kind(), kind()

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.self_attn(x)
        return x if memory is None else self.cross_attn(x + memory)


class Forwarded(nn.Module):
    """Calls the methods of attentions below, so that the calls are its own and only their parts are called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer.cross_attn.forward(self.layer.self_attn.forward(x))


class AttentionCore(nn.Module):
    """No projections: it would have nothing to attend with."""


class Functional(nn.Module):
    """Hands the weights of a child to torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.core = nn.MultiheadAttention(32, 2), AttentionCore()

    def forward(self, x: Tensor) -> Tensor:
        a = self.attn
        weights = (a.in_proj_weight, a.in_proj_bias, None, None, False, 0.0, a.out_proj.weight, a.out_proj.bias)
        return functional.multi_head_attention_forward(x, x, x, 32, 2, *weights, training=False)[0]


class LazyAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.LazyLinear(96), nn.LazyLinear(32)


def x() -> Tensor:
    return torch.randn(2, 6, 32)


def idle(model: nn.Module, *inputs: Tensor, **options: Any) -> list[str]:
    return [entry.site for entry in check(model, inputs, **options).not_measured if entry.code == "idle"]


@pytest.mark.parametrize("static", [False, True])
def test_what_did_not_run_is_named(static: bool) -> None:
    layers = nn.Sequential(Layer(), Layer(AttentionWithNorm))
    assert idle(layers, x(), static=static) == ["0.cross_attn", "1.cross_attn.inner"]
    assert idle(Layer(), x(), x(), static=static) == []


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 48, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


RAN = {
    "the fused layer": lambda: (encoder(), x()),
    "the fused layer with its norm first": lambda: (encoder(norm_first=True), x()),
    "nn.MultiheadAttention": lambda: (nn.MultiheadAttention(32, 2, batch_first=True), x(), x(), x()),
    "nn.Transformer": lambda: (nn.Transformer(32, 2, 1, 1, 48, batch_first=True), x(), x()),
    "a wrapper": lambda: (AttentionWithNorm(), x()),
    "methods of the attention": lambda: (Forwarded(), x()),
    "a function of the child's weights": lambda: (Functional(), x()),
    "compiled": lambda: (torch.compile(nn.Sequential(AttentionWithNorm()), backend="eager"), x()),
}


@pytest.mark.parametrize("name", RAN)
def test_what_ran_is_not_named(name: str) -> None:
    assert idle(*RAN[name]()) == []


def test_a_lazy_module_has_projections_of_no_shape_yet() -> None:
    model = nn.ModuleDict({"lazy": LazyAttention(), "core": AttentionCore()})
    assert list(silent_attentions(model, (), ())) == [("lazy", "idle")]


def test_both_implementations_name_it_once(tmp_path: Path) -> None:
    tower = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.LlavaConfig(
        text_config=tower | {"model_type": "llama", "vocab_size": 160},
        vision_config=tower | {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8},
        image_token_index=159,
    )
    config.save_pretrained(tmp_path)
    report = check(str(tmp_path), attn="both", seq_len=9)
    # older releases of transformers have one module more in the path
    named = [(entry.site.replace(".vision_model.", "."), entry.reason) for entry in report.not_measured]
    assert named == [
        (f"vision_tower.encoder.layers.{layer}.self_attn", Message("trace.silent.idle")) for layer in range(2)
    ]
    assert "no pixel_values" in " ".join(report.environment["notes"])


def test_a_decoder_without_a_memory_names_its_cross_attention() -> None:
    tower = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = hf.BertModel(hf.BertConfig(**tower, vocab_size=160, is_decoder=True, add_cross_attention=True))
    report = check(model, seq_len=9)
    assert [entry.site for entry in report.not_measured] == ["encoder.layer.0.crossattention.self"]


def test_a_hybrid_with_layers_of_another_kind_has_none() -> None:
    config = hf.Lfm2Config(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    report = check(hf.Lfm2ForCausalLM(config), seq_len=9)
    assert len(report.calls) == 1
    assert report.not_measured == ()
