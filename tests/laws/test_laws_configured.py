"""Law `configured`: what q and k turn by is held against the config, field by field."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sqrtdk import check
from sqrtdk.audit.records import LawAnswer
from sqrtdk.laws.rotations import declared_rotation
from tests.hf.small import build, inputs_of, needs, small_config

HEADS, HEAD, WIDTH = 2, 16, 32
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LAWS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0, 4.0],
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 128,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}


def frequencies(base: float = 1e4, width: int = HEAD) -> Tensor:
    return base ** (-torch.arange(0, width, 2) / width)


class Attention(nn.Module):
    """Turns q by one table and k by another, halves or neighbours."""

    def __init__(self, of_q: Tensor, of_k: Tensor | None = None, neighbours: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.of_q, self.of_k, self.neighbours = of_q, of_q if of_k is None else of_k, neighbours

    def turn(self, x: Tensor, by: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2])[:, None] * by
        turning, rest = x[..., : 2 * len(by)], x[..., 2 * len(by) :]
        if self.neighbours:
            a, b = turning[..., ::2], turning[..., 1::2]
        else:
            a, b = turning.chunk(2, -1)
        one, two = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        turned = torch.stack((one, two), -1).flatten(-2) if self.neighbours else torch.cat((one, two), -1)
        return torch.cat((turned, rest), -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = self.turn(q, self.of_q), self.turn(k, self.of_k)
        weights = (q @ k.mT * HEAD**-0.5).softmax(-1)
        result: Tensor = self.o((weights @ v).transpose(1, 2).flatten(2))
        return result


class Model(nn.Module):
    """Layers with a config."""

    def __init__(self, config: Any, *layers: Attention) -> None:
        super().__init__()
        self.config, self.layers = config, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def config_of(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"max_position_embeddings": 512, **fields})


def answers(model: nn.Module, inputs: Any) -> list[LawAnswer]:
    return [answer for answer in check(model.eval(), inputs, laws="configured").laws if answer.law == "configured"]


def broken(model: nn.Module, inputs: Any = None, length: int = 16) -> list[str]:
    inputs = torch.randn(1, length, WIDTH) if inputs is None else inputs
    found = [answer.finding for answer in answers(model, inputs)]
    assert all(finding is None or finding.severity == "fail" for finding in found)
    return [finding.message for finding in found if finding is not None]


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("field", ["rope_theta", "rotary_emb_base"])
def test_a_base_that_is_not_the_configs(field: str, neighbours: bool) -> None:
    config = config_of(**{field: 500000.0})
    assert broken(Model(config, Attention(frequencies(5e5), neighbours=neighbours))) == []
    wrong = Model(config, Attention(frequencies(1e4), neighbours=neighbours))
    assert broken(wrong) == [f"rotates with base 10000, config.{field} = 500000"]


def test_the_base_of_k_alone() -> None:
    model = Model(config_of(rope_theta=1e4), Attention(frequencies(1e4), frequencies(2e4)))
    assert broken(model) == ["rotates with base 20000, config.rope_theta = 10000"]


def test_the_base_in_a_block_and_the_first_layer_where_it_shows() -> None:
    model = Model(config_of(rope_parameters={"rope_theta": 1e6}), *(Attention(frequencies(b)) for b in (1e6, 1e4, 1e4)))
    (answer,) = [answer for answer in answers(model, torch.randn(1, 16, WIDTH)) if answer.finding is not None]
    assert answer.reason == "rotates with base 10000, config.rope_parameters.rope_theta = 1000000"
    assert answer.site == "layers.1"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"partial_rotary_factor": 0.5}, "config.partial_rotary_factor = 0.5"),
        ({"rotary_pct": 0.5}, "config.rotary_pct = 0.5"),
        ({"rotary_dim": 8}, "config.rotary_dim = 8"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "config.rope_parameters.partial_rotary_factor = 0.5"),
    ],
)
def test_a_share_of_channels_that_is_not_the_configs(fields: dict[str, Any], told: str) -> None:
    assert broken(Model(config_of(**fields), Attention(frequencies(width=8)))) == []
    wrong = Model(config_of(**fields), Attention(frequencies()))
    assert broken(wrong) == [f"rotates 16 of 16 channels, {told}"]
    (finding,) = (answer.finding for answer in answers(wrong, torch.randn(1, 16, WIDTH)) if answer.finding is not None)
    assert (finding.value, finding.threshold) == (16.0, 8.0)  # "found 16, expected 8"


def test_an_odd_share_of_channels_turns_a_pair_more() -> None:
    """int(16 * 0.334) = 5: three pairs, whose exponents are 2i/5."""
    config = config_of(partial_rotary_factor=0.334, rope_theta=1e4)
    assert broken(Model(config, Attention(frequencies(1e4, 5)))) == []
    assert len(broken(Model(config, Attention(frequencies(2e4, 5))))) == 1


def test_pairs_of_the_whole_head_of_which_a_part_turns() -> None:
    table = torch.cat((frequencies()[:4], torch.zeros(4)))
    model = Model(config_of(partial_rotary_factor=0.5, rope_theta=1e4), Attention(table))
    assert broken(model) == [
        "rotates 4 pairs, of channels 8 apart, of 16 channels, config.partial_rotary_factor = 0.5",
    ]


def test_a_part_of_the_head_with_the_frequencies_of_the_whole_is_no_wrong_base() -> None:
    """Both fields in one model: each is said once."""
    fields = {"partial_rotary_factor": 0.5, "rope_theta": 5e5}
    assert broken(Model(config_of(**fields), Attention(frequencies(5e5)))) == [
        "rotates 16 of 16 channels, config.partial_rotary_factor = 0.5"
    ]


@pytest.mark.parametrize("law", ["linear", "llama3", "yarn", "longrope"])
def test_a_law_that_did_not_arrive(law: str) -> None:
    block = LAWS[law] | {"rope_theta": 1e4}
    model = Model(config_of(rope_parameters=block), Attention(frequencies()))
    told = f"{law} with factor {block['factor']:g}" if "factor" in block else law
    assert broken(model) == [f"rotates with unscaled frequencies, the config says {told}"]


def test_a_law_of_the_older_field_and_positions_that_are_scaled_for_no_reason() -> None:
    scaled = Attention(frequencies() / 4)
    assert broken(Model(config_of(rope_theta=1e4, rope_scaling={"type": "linear", "factor": 4.0}), scaled)) == []
    (message,) = broken(Model(config_of(rope_theta=1e4), scaled))
    assert message == "rotates with base 10000 and positions times 0.25, config.rope_theta = 10000, no scaling"


def test_another_factor_of_a_law_is_told_by_the_pair_that_is_farthest_off() -> None:
    block = LAWS["llama3"] | {"rope_theta": 1e4}
    table = declared_rotation(config_of(rope_parameters=block | {"factor": 2.0}), None, None, HEAD).tables(
        HEAD, HEAD, 16, 512
    )
    assert table is not None
    (message,) = broken(Model(config_of(rope_parameters=block), Attention(table[0].float())))
    assert "by llama3 with factor 8 of config.rope_parameters.rope_theta = 10000" in message


def test_frequencies_that_short_inputs_do_not_tell_apart_are_not_asked() -> None:
    """The slowest pair turns by 1e-5 or by 2e-5 a position: 2^10 roundings of three rows are more."""
    table = frequencies(1e5)
    table[-1] *= 2
    config = config_of(rope_theta=1e5)
    assert broken(Model(config, Attention(table)), length=3) == []
    assert len(broken(Model(config, Attention(table)), length=64)) == 1


def test_bases_of_kinds_of_layers() -> None:
    block = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    config = config_of(layer_types=["sliding_attention", "full_attention"], rope_parameters=block)
    assert broken(Model(config, Attention(frequencies(1e4)), Attention(frequencies(1e6)))) == []
    (message,) = broken(Model(config, Attention(frequencies(1e5)), Attention(frequencies(1e6))))
    assert message == "rotates with base 100000, config.rope_parameters.rope_theta = 10000"


def states(model: nn.Module, inputs: Any) -> set[str]:
    return {answer.state for answer in answers(model, inputs)}


def test_what_is_not_stated_is_not_asked() -> None:
    x = torch.randn(1, 16, WIDTH)
    assert states(Model(config_of(), Attention(frequencies(123.0))), x) == {"not asked"}
    unknown = config_of(rope_scaling={"type": "of tomorrow", "factor": 2.0}, rope_theta=1e4)
    assert states(Model(unknown, Attention(frequencies(123.0))), x) == {"not asked"}
    assert states(nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True), x) == {"not asked"}


class Grid(Attention):
    """Half of the pairs turn by the row of an image, half by its column."""

    def turn(self, x: Tensor, by: Tensor) -> Tensor:
        place = torch.arange(x.shape[2])
        angle = torch.cat(((place % 4)[:, None] * by[::2], (place // 4)[:, None] * by[::2]), -1)
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def test_positions_of_several_axes_are_not_asked() -> None:
    assert states(Model(config_of(rope_theta=1e4), Grid(frequencies())), torch.randn(1, 16, WIDTH)) == {"not asked"}


@pytest.mark.parametrize("law", LAWS)
def test_tables_are_those_of_transformers(law: str) -> None:
    config = hf.LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, head_dim=HEAD, max_position_embeddings=256,
        rope_parameters=LAWS[law] | {"rope_theta": 1e4},
    )  # fmt: skip
    theirs, _ = ROPE_INIT_FUNCTIONS[law](config, torch.device("cpu"))
    tables = declared_rotation(config, None, None, HEAD).tables(HEAD, HEAD, 16, 256)
    assert tables is not None
    torch.testing.assert_close(tables[0], theirs.double(), rtol=1e-6, atol=1e-12)


TYPES = (
    "llama", "gemma3_text", "phi", "gpt_neox", "qwen2_vl", "deepseek_v3", "glm", "gptj", "cohere", "gpt_oss", "phi3",
    "llama4_text", "modernbert", "gemma4_text",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("model_type", TYPES)
def test_released_architectures_are_as_they_say_and_are_found_when_they_are_not(model_type: str) -> None:
    """The second half changes the table that the rotary module holds: every base becomes another."""
    needs(model_type)
    model = build(small_config(model_type), "eager", torch.float32)
    inputs = inputs_of(model)
    assert broken(model, inputs) == []
    assert "kept" in states(model, inputs)
    changed = 0
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                buffer.copy_(buffer**1.2)
                changed += 1
    if changed:
        assert any(message.startswith(("rotates with", "pair ")) for message in broken(model, inputs))


@pytest.mark.full
@pytest.mark.parametrize("law", ["linear", "llama3", "yarn", "dynamic"])
def test_llama_with_each_law(law: str) -> None:
    config = small_config("llama")
    config.rope_parameters = LAWS[law] | {"rope_theta": 5e5}
    model = build(config, "eager", torch.float32)
    inputs = inputs_of(model)
    assert broken(model, inputs) == []
    if law != "dynamic":
        model.model.rotary_emb.inv_freq.copy_(frequencies(5e5))  # type: ignore[union-attr,operator]
        (message,) = broken(model, inputs)
        assert message.startswith("rotates with unscaled frequencies, the config says " + law)
