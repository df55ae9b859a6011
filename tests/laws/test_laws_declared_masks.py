"""Law `configured` of masks: the window and the direction of each layer, held against module and config."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sqrtdk import check, laws
from sqrtdk.audit.records import LawAnswer
from tests.hf.small import build, inputs_of, needs, small_config

HEADS, WIDTH, WINDOW = 2, 16, 4


class Attention(nn.Module):
    """Rows see every key, those up to their own, or the last WINDOW of these."""

    def __init__(self, sees: str) -> None:
        super().__init__()
        self.qkv, self.sees = nn.Linear(WIDTH, 3 * WIDTH), sees

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mask = None
        if self.sees == "window":
            rows = torch.arange(x.shape[1], device=x.device)
            apart = rows[:, None] - rows
            mask = (apart >= 0) & (apart < WINDOW)
        return x + F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.sees == "causal").transpose(
            1, 2
        ).flatten(2)


class Model(nn.Module):
    """Layers with a config."""

    def __init__(self, config: Any, *sees: str) -> None:
        super().__init__()
        self.config, self.layers = config, nn.ModuleList(map(Attention, sees))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def config_of(*kinds: str) -> SimpleNamespace:
    return SimpleNamespace(layer_types=[f"{kind}_attention" for kind in kinds], sliding_window=WINDOW)


def of_masks(model: nn.Module, length: int = 12, device: str = "cpu") -> dict[str, LawAnswer]:
    report = check(model.eval(), torch.randn(1, length, WIDTH, device=device), laws="configured")
    return {answer.about: answer for answer in report.laws}


def test_a_window_in_each_layer_that_the_config_says_has_one() -> None:
    answers = of_masks(Model(config_of("sliding", "full"), "window", "causal"))
    assert answers["window"].state == "kept"


def test_a_window_in_a_layer_of_full_attention() -> None:
    answer = of_masks(Model(config_of("sliding", "full"), "window", "window"))["window"]
    assert (answer.state, answer.site) == ("broken", "layers.1")
    assert answer.reason == (
        "rows see up to 4 keys, their own included, though config.sliding_window = 4 is of other layers"
    )
    assert answer.finding is not None
    assert answer.finding.severity == "fail"


def test_a_window_that_did_not_arrive_is_the_rules_finding_and_breaks_the_law() -> None:
    model, x = Model(config_of("sliding", "full"), "causal", "causal"), torch.randn(1, 12, WIDTH)
    report = check(model.eval(), x, laws="configured")
    (answer,) = [answer for answer in report.laws if answer.about == "window"]
    assert (answer.state, answer.site, answer.finding) == ("broken", "layers.0", None)
    assert [finding.message for finding in report.findings if finding.severity == "fail"] == [answer.reason]
    asked = laws.ask(model, x, laws="configured")
    assert [(finding.rule, finding.site) for finding in asked.findings] == [("sliding_window", "layers.0")]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_layer_that_runs_causally_in_a_bidirectional_model(device: str) -> None:
    config = SimpleNamespace(is_causal=False)
    assert of_masks(Model(config, "all", "all").to(device), device=device)["direction"].state == "kept"
    answer = of_masks(Model(config, "all", "causal").to(device), device=device)["direction"]
    assert (answer.state, answer.site) == ("broken", "layers.1")
    assert answer.reason == "attention runs causally, though config.is_causal = False"


def test_a_layer_without_the_mask_of_a_causal_config_on_meta() -> None:
    """With values the law `causal` asks it of the outputs."""
    config = SimpleNamespace(is_decoder=True)
    assert of_masks(Model(config, "causal", "causal").to("meta"), device="meta")["direction"].state == "kept"
    answer = of_masks(Model(config, "causal", "all").to("meta"), device="meta")["direction"]
    assert (answer.state, answer.site, answer.finding) == ("broken", "layers.1", None)


def test_what_nothing_declares_is_not_asked_on_meta() -> None:
    (answer,) = of_masks(Model(None, "causal").to("meta"), device="meta").values()
    assert (answer.state, answer.reason) == ("not asked", "without values nothing can be changed")


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["gemma3_text", "mistral", "gpt_oss", "modernbert", "cohere2", "gpt_neo"])
def test_released_architectures_have_the_windows_that_they_say(model_type: str) -> None:
    needs(model_type)
    config = small_config(model_type)
    for name in ("sliding_window", "window_size", "local_attention"):
        if getattr(config, name, None):
            setattr(config, name, 4)
    model = build(config, "eager", torch.float32)
    answers = [answer for answer in check(model, inputs_of(model), laws="configured").laws if answer.about == "window"]
    assert [answer.state for answer in answers] == ["kept"]
