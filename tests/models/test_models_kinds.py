"""Inputs of rarer kinds: patches, spectrograms, time series, episodes, and ids that say which tokens see each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from sqrtdk._check import check
from sqrtdk.errors import ModelError
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.run import call
from tests.hf.families import LLAMA

TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = TOWER | {"vocab_size": 40, "max_position_embeddings": 16}
IMAGE = TOWER | {"image_size": 16, "patch_size": 8}
IDS = {"input_ids": (2, 9), "attention_mask": (2, 9)}


def paligemma() -> Any:
    return hf.PaliGemmaConfig(
        text_config=LLAMA | {"model_type": "gemma", "head_dim": 16, "num_key_value_heads": 2},
        vision_config=IMAGE | {"model_type": "siglip_vision_model", "projection_dim": 64},
        image_token_index=159,
    )


CONFIGS = {
    "vilt": lambda: hf.ViltConfig(**TEXT, image_size=16, patch_size=8),
    "siglip2": lambda: hf.Siglip2Config(
        text_config=TEXT, vision_config=TOWER | {"patch_size": 8, "num_patches": 16}
    ),
    "clap": lambda: hf.ClapConfig(
        text_config=TEXT,
        audio_config={
            "patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 4], "hidden_size": 32,
            "spec_size": 64, "num_mel_bins": 16, "window_size": 4, "patch_size": 4, "patch_stride": [4, 4],
        },
    ),
    "flava": lambda: hf.FlavaConfig(
        text_config=TEXT, image_config=IMAGE, multimodal_config=TOWER, hidden_size=32
    ),
    "patchtst": lambda: hf.PatchTSTConfig(
        d_model=32, num_attention_heads=2, num_hidden_layers=1, context_length=64, num_input_channels=3
    ),
    "timesfm": lambda: hf.TimesFmConfig(
        hidden_size=32, intermediate_size=32, num_attention_heads=2, head_dim=16, num_hidden_layers=1, context_length=64
    ),
    "timesfm2_5": lambda: hf.TimesFm2_5Config(
        hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        num_hidden_layers=1, context_length=64,
    ),
    "perceiver": lambda: hf.PerceiverConfig(
        d_model=32, d_latents=32, num_latents=8, num_blocks=1, num_self_attends_per_block=1,
        num_self_attention_heads=2, num_cross_attention_heads=2,
    ),
    "decision_transformer": lambda: hf.DecisionTransformerConfig(
        hidden_size=32, n_layer=1, n_head=2, state_dim=5, act_dim=2
    ),
    "paligemma": paligemma,
}  # fmt: skip
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "vilt": IDS | {"pixel_values": (2, 3, 16, 16), "pixel_mask": (2, 16, 16)},
    "siglip2": IDS | {"pixel_values": (2, 16, 192), "pixel_attention_mask": (2, 16), "spatial_shapes": (2, 2)},
    "clap": IDS | {"input_features": (2, 1, 256, 16)},
    "flava": IDS | {"pixel_values": (2, 3, 16, 16)},
    "patchtst": {"past_values": (2, 64, 3)},
    "timesfm": {"past_values": (2, 64), "past_values_padding": (2, 64), "freq": (2, 1)},
    "timesfm2_5": {"past_values": (2, 64)},
    "perceiver": {"inputs": (2, 9, 32)},
    "decision_transformer": {
        "states": (2, 9, 5),
        "actions": (2, 9, 2),
        "rewards": (2, 9, 1),
        "returns_to_go": (2, 9, 1),
        "timesteps": (2, 9),
    },
    "paligemma": IDS | {"token_type_ids": (2, 9)},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_kinds_and_shapes_and_the_model_runs(tmp_path: Path, name: str) -> None:
    CONFIGS[name]().save_pretrained(tmp_path)
    loaded = resolve_model(str(tmp_path), LoadOptions(batch=2, seq_len=9))
    assert {key: tuple(value.shape) for key, value in loaded.inputs.items()} == SHAPES[name]
    call(loaded.module, loaded.inputs)


def test_a_prompt_has_token_types_where_images_have_tokens(tmp_path: Path) -> None:
    """Without them PaliGemma's eager attention is causal and its sdpa sees all; its processor gives zeros for text."""
    paligemma().save_pretrained(tmp_path)
    report = check(str(tmp_path), seq_len=9)
    assert not resolve_model(str(tmp_path)).inputs["token_type_ids"].any()
    assert [finding.rule for finding in report.findings if finding.severity != "note"] == []


def test_an_image_tower_outside_of_vision_config_runs(tmp_path: Path) -> None:
    CONFIGS["flava"]().save_pretrained(tmp_path)
    sites = {judged.call.site.partition(".")[0] for judged in check(str(tmp_path), seq_len=9).calls}
    assert sites == {"text_model", "image_model", "multimodal_model"}


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (lambda: hf.InformerConfig(prediction_length=4), "past_values, past_time_features"),
    ],
)
def test_what_cannot_be_made_is_asked_for_by_name(tmp_path: Path, config: Any, names: str) -> None:
    config().save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        check(str(tmp_path))
    assert "--input FILE.safetensors" in caught.value.hint
    assert names in caught.value.hint


class Decides(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * input.sum().item()


def test_a_model_that_decides_by_values_is_told_to_run_without_static() -> None:
    with pytest.raises(ModelError) as caught:
        call(Decides(4, 4, device="meta"), (torch.ones(2, 4, device="meta"),))
    assert "run without --static" in caught.value.hint
    with pytest.raises(ModelError) as caught:
        call(Decides(4, 4), (torch.ones(2, 5),))
    assert "--static" not in caught.value.hint
