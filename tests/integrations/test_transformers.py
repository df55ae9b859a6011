"""`attn_implementation="sqrtdk"` gives what eager gives, on real models with random weights."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="4.53")  # masking_utils

import transformers as hf
from torch import Tensor, nn

from sqrtdk.errors import InvalidValueError, UnsupportedError
from sqrtdk.integrations.transformers import attention_forward, register
from tests.hf.families import CACHE, FAMILIES, GROUPED

# Grouped heads, softcap, sliding window and a mask, learned sinks, cosine scale, bias, cross attention, a tower, MLA.
DECODERS = ("gpt2", "llama", "mistral", "gemma2", "gemma3", "qwen3", "granite", "opt", "deepseek_v3")
ENCODERS = ("bert", "roberta")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def gpt_oss() -> hf.PretrainedConfig:
    sizes = GROUPED | {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
    return hf.GptOssConfig(**sizes)


def models(config: hf.PretrainedConfig) -> tuple[nn.Module, nn.Module]:
    """The same weights, eager and ours."""
    torch.manual_seed(0)
    ours = hf.AutoModel.from_config(copy.deepcopy(config), attn_implementation="sqrtdk").eval()
    eager = hf.AutoModel.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in ours.parameters():  # larger than an initialisation: the logits must matter
            parameter.mul_(3.0) if parameter.ndim > 1 else None
        for name, parameter in ours.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    eager.load_state_dict(ours.state_dict())
    return eager, ours


def ids(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, 160, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS, "gpt_oss"])
def test_the_hidden_states_are_those_of_eager(name: str, padded: bool) -> None:
    """Causal and padding masks, scale, softcap, sinks, windows: none is lost on the way."""
    eager, ours = models(gpt_oss() if name == "gpt_oss" else FAMILIES[name]())
    mask = torch.ones(2, 9, dtype=torch.long)
    if padded:
        mask[1, :3] = 0
    with torch.no_grad():
        wanted = eager(ids(), attention_mask=mask).last_hidden_state
        found = ours(ids(), attention_mask=mask).last_hidden_state
    seen = mask.bool()
    torch.testing.assert_close(found[seen], wanted[seen], **TOLERANCE)
    assert ours.config._attn_implementation == "sqrtdk"


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_gradients_are_those_of_eager(name: str) -> None:
    eager, ours = models(gpt_oss() if name == "gpt_oss" else FAMILIES[name]())
    direction = torch.randn(2, 9, 64)
    for model in (eager, ours):
        (model(ids()).last_hidden_state * direction).sum().backward()
    wanted = dict(eager.named_parameters())
    compared = 0
    for key, parameter in ours.named_parameters():
        if parameter.grad is not None and wanted[key].grad is not None:
            scale = wanted[key].grad.abs().max()
            assert (parameter.grad - wanted[key].grad).abs().max() <= 1e-4 * scale + 1e-6, key
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_steps_with_a_cache_are_one_pass(name: str) -> None:
    _, ours = models(gpt_oss() if name == "gpt_oss" else FAMILIES[name]())
    with torch.no_grad():
        whole = ours(ids(1), use_cache=False).last_hidden_state
        cache = None
        steps = []
        for part in ids(1).split([4, 3, 1, 1], 1):
            done = ours(part, **{CACHE: cache}, use_cache=True)
            cache = done[CACHE]
            steps.append(done.last_hidden_state)
    torch.testing.assert_close(torch.cat(steps, 1), whole, **TOLERANCE)


@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_encoder_decoder_models(name: str) -> None:
    eager, ours = models(FAMILIES[name]())
    if name == "whisper":
        config = ours.config
        first = {"input_features": torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions)}
    else:
        first = {"input_ids": ids()}
    with torch.no_grad():
        wanted, found = (m(**first, decoder_input_ids=ids(2, 5)).last_hidden_state for m in (eager, ours))
    torch.testing.assert_close(found, wanted, **TOLERANCE)


def test_dropout_is_applied_in_training_only() -> None:
    config = FAMILIES["llama"]()
    config.attention_dropout = 0.5
    _, ours = models(config)
    with torch.no_grad():
        ours.eval()
        assert torch.equal(ours(ids()).last_hidden_state, ours(ids()).last_hidden_state)
        ours.train()
        assert not torch.equal(ours(ids()).last_hidden_state, ours(ids()).last_hidden_state)


def test_names_of_transformers_are_not_replaced() -> None:
    with pytest.raises(InvalidValueError, match="'sdpa' is transformers' own"):
        register("sdpa")


def test_a_paged_cache_is_refused() -> None:
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(UnsupportedError, match="paged cache"):
        attention_forward(nn.Module(), x, x, x, None, cache=object())
