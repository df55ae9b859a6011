"""Made inputs are asked by their first tokens: at less cost, with the same answers, and not where these differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from sqrtdk import check
from sqrtdk.audit.first_tokens import LENGTHS
from sqrtdk.laws import ask, table
from sqrtdk.laws.decoding import cut_short
from sqrtdk.laws.rows import runs_of
from sqrtdk.laws.subject import Subject
from tests.hf.small import build, needs, small_config
from tests.laws.planted_hf import plant

WHOLE = 128  # tokens of made inputs
MOST_FORWARDS = 5  # tokens that the laws run, in units of the whole inputs


def made(name: str = "llama", **fields: Any) -> Any:
    needs(name)
    config = small_config(name)
    for field, value in fields.items():
        setattr(config, field, value)
    return build(config, "eager", torch.float32)


def runs(model: nn.Module, laws: str = "all", **options: Any) -> list[tuple[int, ...]]:
    """The shapes of the ids of each run that the laws make."""
    shapes: list[tuple[int, ...]] = []
    counts = []
    handle = model.register_forward_pre_hook(
        lambda _, args, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    for names in ("none", laws):
        check(model, laws=names, **options)
        counts.append(len(shapes))
    handle.remove()
    return shapes[2 * counts[0] :]


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt2", "t5"))])
def test_what_the_laws_cost(name: str) -> None:
    shapes = runs(made(name))
    assert sum(rows * tokens for rows, tokens in shapes) <= MOST_FORWARDS * WHOLE
    assert [tokens for _, tokens in shapes].count(WHOLE) == 1  # a cut; `finite` reads what the audit ran
    (fewer,) = {tokens for rows, tokens in shapes if rows > 1}
    assert fewer in LENGTHS
    assert {(2, fewer), (3, fewer)} <= set(shapes)  # two cuts; three samples, or a mask and its content


def test_inputs_of_the_user_stay_whole() -> None:
    model, ids = made(), torch.randint(3, 100, (1, WHOLE))
    for options in ({"inputs": {"input_ids": ids}}, {"seq_len": WHOLE}):
        assert {tokens for _, tokens in runs(model, "samples,causal", **options)} == {WHOLE}


@pytest.mark.full
def test_a_number_of_tokens_between_the_two_lengths() -> None:
    model = made()
    config = model.config
    config.max_length, config.num_local_experts, config.max_window_layers = 20, 64, 28
    assert set(LENGTHS) & {tokens for _, tokens in runs(model, "samples,causal")}
    longer = {**config.rope_parameters, "original_max_position_embeddings": 64}
    for field, value in (("sliding_window", 64), ("expert_capacity", 200), ("rope_parameters", longer)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(config, field, value, raising=False)
            assert {tokens for _, tokens in runs(model, "samples")} == {WHOLE}, field


def test_a_window_that_the_first_tokens_do_not_reach() -> None:
    """It is in the code alone: a row sees 64 keys."""
    model = made()

    def windowed(_: nn.Module, args: Any, inputs: dict[str, Any]) -> Any:
        length = inputs["hidden_states"].shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril().triu(-63)
        return args, {**inputs, "attention_mask": torch.where(seen, 0.0, -1e30)[None, None]}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(windowed, with_kwargs=True)
    assert [tokens for _, tokens in runs(model, "samples,modes")].count(WHOLE) > 3


def late_leak(model: nn.Module) -> None:
    """Positions from 64 on see those behind them, after the attentions: the first tokens do not show it."""

    def mixed(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        return torch.cat((output[:, :64], output[:, 64:] + output[:, 64:].mean(1, keepdim=True)), 1)

    model.model.norm.register_forward_hook(lambda *args: mixed(*args) if args[2].shape[1] > 64 else None)


def late_mask(model: nn.Module) -> None:
    """A row behind the first tokens sees a later key."""

    def seeing(_: nn.Module, args: Any, inputs: dict[str, Any]) -> Any:
        mask = torch.full((WHOLE, WHOLE), -1e30).triu(1)
        mask[64, 100] = 0
        return args, {**inputs, "attention_mask": mask[None, None]}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(seeing, with_kwargs=True)


def halved_alone(model: nn.Module) -> None:
    model.model.norm.register_forward_hook(lambda _, args, output: output / output.shape[0])


def counting(model: nn.Module) -> None:
    """Each run adds to a number that the output follows."""
    model.calls = 0

    def counted(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        model.calls += 1
        return output * 1.1**model.calls

    model.model.norm.register_forward_hook(counted)


def late_dropout(model: nn.Module) -> None:
    """Draws anew in each run, for more than the first tokens."""

    def dropped(_: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return nn.functional.dropout(output, 0.1, training=True) if output.shape[1] > 64 else None

    model.model.norm.register_forward_hook(dropped)


def late_step(model: nn.Module) -> None:
    """A step of one token behind more than the first is turned as if it stood at 64."""

    def turned(_: nn.Module, args: Any, inputs: dict[str, Any]) -> Any:
        (x, positions) = (*args, *inputs.values())
        return (x, positions.clamp(max=64) if x.shape[1] == 1 else positions), {}

    model.model.rotary_emb.register_forward_pre_hook(turned, with_kwargs=True)


PLANTED = {
    "future": lambda model: plant(model, "future"),
    "batch": lambda model: plant(model, "batch"),
    "padding": lambda model: plant(model, "padding"),
    "late leak": late_leak,
    "late mask": late_mask,
    "alone": halved_alone,
    "counting": counting,
    "late dropout": late_dropout,
    "late step": late_step,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrong", ["nothing", *PLANTED])
def test_the_answers_are_those_of_the_whole_inputs(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    for whole in (False, True):
        model = made()
        if wrong != "nothing":
            PLANTED[wrong](model)
        if whole:
            monkeypatch.setattr(table, "first_tokens", lambda subject: None)
        reports.append(ask(model))
    assert reports[0].answers == reports[1].answers
    assert bool(reports[0].broken) == (wrong not in ("nothing", "counting", "late dropout"))


def test_steps_run_behind_the_cache_of_the_audit() -> None:
    """The cache of all tokens is cut where no later token moves an earlier output; otherwise a prefill makes one."""
    prefill = WHOLE - 3
    assert prefill not in {tokens for _, tokens in runs(made(), "causal,cache")}
    assert prefill in {tokens for _, tokens in runs(made(), "cache")}


def held(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the layers."""
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return list(zip(cache.key_cache, cache.value_cache, strict=True))


def test_a_cache_is_cut_in_a_copy() -> None:
    cache = DynamicCache()
    keys = torch.randn(1, 2, 8, 4)
    for layer in range(2):
        cache.update(keys, keys + 1, layer)
    cut = cut_short(cache, 8, 5)
    assert all(torch.equal(x, keys[:, :, :5]) and torch.equal(y, keys[:, :, :5] + 1) for x, y in held(cut))
    assert len(held(cut)) == 2
    assert (cut.get_seq_length(), cache.get_seq_length()) == (5, 8)
    assert cut_short(cache, 9, 5) is None  # it does not hold the tokens
    assert cut_short((keys, keys), 8, 5) is None


def test_a_cache_with_a_window_is_not_cut() -> None:
    keys = torch.randn(1, 2, 8, 4)
    config = small_config("mistral")
    config.sliding_window = 4
    windowed = DynamicCache(config=config)
    windowed.update(keys, keys, 0)
    assert type(windowed.layers[0]).__name__ == "DynamicSlidingWindowLayer"
    assert cut_short(windowed, 8, 5) is None


@pytest.mark.parametrize("gathered", [False, True])
def test_a_run_ends_behind_the_attentions_that_a_law_asks(gathered: bool) -> None:
    """Not where a hook puts weights back behind the modules around them, as accelerate's and FSDP's do."""
    model, counts = made(), {"begun": 0, "ended": 0}
    if gathered:
        model.model._hf_hook = object()

    def count(name: str) -> Any:
        return lambda *_: counts.update({name: counts[name] + 1})

    model.register_forward_pre_hook(count("begun"))
    model.lm_head.register_forward_hook(count("ended"))
    report = ask(model, laws="place,heads")
    assert {answer.state for answer in report.answers} == {"kept"}
    assert counts["begun"] - counts["ended"] == (0 if gathered else 3)  # split, merge, heads


class Tokens(nn.Module):
    """Embeds ids; `beside` adds an output without a row for each sample, of one row or of none."""

    def __init__(self, beside: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.beside, self.seen = nn.Embedding(30, 8), beside, []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        self.seen.append(len(input_ids))
        y = self.embed(input_ids) * attention_mask[..., None]
        beside = {"one row": y.mean((0, 1))[None], "none": y.mean()}
        return (y, beside[self.beside]) if self.beside else (y,)


@pytest.mark.parametrize(
    ("beside", "apart", "seen"),
    [("", True, [3]), ("", False, [1] * 3), ("one row", True, [3, 1, 1, 1]), ("none", True, [3, 1, 1, 1])],
)
def test_rows_of_one_run_give_what_separate_runs_give(beside: str, apart: bool, seen: list[int]) -> None:
    model = Tokens(beside).eval()
    ids, ones = torch.arange(6)[None], torch.ones(1, 6)
    subject = Subject(model, {"input_ids": ids, "attention_mask": ones}, (), rows_apart=apart)
    changes = [{}, {"input_ids": ids + 1}, {"attention_mask": ones * (ids < 3)}]
    wanted = [subject.run(one) for one in changes]
    assert subject.base
    model.seen.clear()
    found = runs_of(subject, changes)
    assert model.seen == seen
    assert apart is False or beside or subject.over(subject.inputs | changes[1]).base is found[1]  # it is not run again
    assert model.seen == seen
    assert all(torch.equal(one[name], other[name]) for one, other in zip(wanted, found, strict=True) for name in one)
