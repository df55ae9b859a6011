"""`diff` on what the models return: outputs that differ though the attentions agree, and where that begins."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

import sqrtdk
from sqrtdk.compare.diff import diff
from sqrtdk.messages import recorded
from sqrtdk.messages import said as said_in
from sqrtdk.modules.structures import tensors_of
from sqrtdk.report.diff.html import to_html
from sqrtdk.report.diff.json import to_json
from sqrtdk.report.diff.terminal import diff_summary_line
from tests.compare.chinese import paragraphs
from tests.compare.decoders import (
    IDS,
    VOCABULARY,
    WIDTH,
    Decoder,
    adapted,
    changed,
    decoder,
    doubled_head,
    first,
    lost_residual,
    lost_residual_first,
    other_activation,
    other_activation_first,
    other_embedding,
    other_norm,
    unscaled,
    untransposed,
    without_lines,
)

BEHIND = [
    (doubled_head, "head", "`head`: B's `weight` is 2 times A's"),
    (adapted, "layers.1.attend.out", "`layers.1.attend.out`: Linear in A, LowRank in B"),
    (other_activation, "layers.1.mlp.1", "`layers.1.mlp.1`: GELU in A, ReLU in B"),
    (other_norm, "norm", "`norm`: `eps` is 1e-05 in A, 0.01 in B"),
    (
        lost_residual,
        "layers.1",
        "`layers.1`, between `layers.1.attend` and `layers.1.norm2`: `kept` is 1 in A, 0 in B",
    ),
    (
        untransposed,
        "layers.1.attend",
        "`layers.1.attend`, between the attention and `layers.1.attend.out`: `transposed` is True in A, False in B",
    ),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("change", "module", "words"), BEHIND)
def test_attentions_agree_and_outputs_do_not(change: Callable[[Decoder], None], module: str, words: str) -> None:
    report = diff(decoder(), changed(change), IDS)
    assert [pair.same for pair in report.pairs] == [True, True]
    assert (report.same, report.exit_code) == (False, 1)
    assert first(report) == (module, module)
    (logits,) = report.outputs
    assert logits.same is False
    assert (logits.difference or 0) > (logits.allowed or 0)
    assert report.paragraphs[0].startswith("The attentions agree; outputs differ")
    said = without_lines(report.paragraphs[0])
    assert said.endswith(f". The first difference is in {words}. Nothing else differs.")
    assert report.paragraphs[1].startswith("For the same q, k and v the attentions differ by at most ")
    assert report.forwards == (3, 2)  # A once more, with B's part


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * WIDTH**0.5


class Written(Decoder):
    """Multiplies in its code, where the other's embedding does."""

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids) * WIDTH**0.5
        for layer in self.layers:
            x = layer(x)
        return self.returned(self.head(self.norm(x)), x)


def test_a_factor_in_the_code_behind_a_module_is_no_difference() -> None:
    one, other = decoder(), Written().eval()
    embedding = ScaledEmbedding(VOCABULARY, WIDTH)
    embedding.weight = one.embed.weight
    one.embed = embedding
    other.load_state_dict(one.state_dict())
    assert diff(one, other, IDS).same
    other_activation(other)
    report = diff(one, other, IDS)
    assert [(cause.name, cause.site_b) for cause in report.module_causes] == [("activation", "layers.1.mlp.1")]


def test_outputs_that_agree_are_told_apart_from_equal_ones() -> None:
    assert diff(decoder(), decoder(), IDS).paragraphs[-2] == "The models return equal numbers."
    report = diff("demo", "demo", dtype_a="bf16", seq_len=16)
    (logits,) = report.outputs
    told = re.fullmatch(r"What the models return differs by (.+)%; rounding allows (.+)%\.", report.paragraphs[-2])
    assert (report.same, told is not None) == (True, True)
    assert told is not None
    assert [float(number) / 100 for number in told.groups()] == pytest.approx(
        [logits.difference, logits.allowed], rel=1e-2
    )
    changed_first = diff(decoder(), changed(other_activation_first), IDS)
    assert "What the models return differs" not in " ".join(changed_first.paragraphs)


BEFORE = [
    (other_embedding, "embed", "`embed`"),
    (other_activation_first, "layers.0.mlp.1", "`layers.0.mlp.1`"),
    (lost_residual_first, "layers.0", "`layers.0`, between `layers.0.attend` and `layers.0.norm2`"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("change", "module", "place"), BEFORE)
def test_an_input_that_differs_says_where(change: Callable[[Decoder], None], module: str, place: str) -> None:
    report = diff(decoder(), changed(change), IDS)
    (cause,) = [cause for pair in report.pairs for cause in pair.causes]
    assert cause.name == "input"
    assert f"gets another input, which first differs in {place} (off by " in cause.text
    assert first(report) == (module, module)
    assert without_lines(report.paragraphs[0]).startswith(f"The first difference is in {place}: ")
    assert " It reaches the attention" in report.paragraphs[0]
    said = without_lines(paragraphs(report)[0])
    assert said.startswith("首个差异在 ")
    assert not re.search(r"\b[a-z]{3}", re.sub("`[^`]*`|layers[.a-z0-9]*", "", said))


def test_what_follows_from_an_attention_has_no_module() -> None:
    report = diff(decoder(), changed(unscaled), IDS)
    assert [cause.name for pair in report.pairs for cause in pair.causes] == ["scale"]
    assert (report.same, report.first_module) == (False, None)
    assert report.paragraphs[1].endswith(". The attentions explain all of it.")


@pytest.mark.parametrize(("change", "module"), [(doubled_head, "head"), (other_activation_first, "layers.0.mlp.1")])
def test_a_difference_beside_that_of_an_attention(change: Callable[[Decoder], None], module: str) -> None:
    report = diff(decoder(), changed(unscaled, change), IDS)
    assert [cause.name for pair in report.pairs for cause in pair.causes] == ["scale"]
    assert first(report) == (module, module)
    said = without_lines(report.paragraphs[1])
    assert f" The attentions explain a part. Another difference is in `{module}`: " in said


class Port(nn.Module):
    """The same model under other names, in a tree of another shape, which returns other things."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"tok": model.embed, "h": model.layers, "ln_f": model.norm})
        self.unembed = model.head

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body["tok"](tokens)
        for layer in self.body["h"]:  # type: ignore[attr-defined]
            x = layer(x)
        return self.unembed(self.body["ln_f"](x)), x


def test_a_port_of_other_names_is_aligned_by_its_tree() -> None:
    assert diff(decoder(), Port(decoder()), IDS).same is True
    report = diff(decoder(), Port(changed(doubled_head)), IDS)
    assert first(report) == ("head", "unembed")
    assert first(diff(decoder(), Port(changed(other_norm)), IDS)) == ("norm", "body.ln_f")


def test_a_wrapper_is_left_out_of_the_paths() -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Any:
            return self.model(ids)

    report = diff(decoder(), Wrapper(changed(adapted)), IDS)
    assert first(report) == ("layers.1.attend.out", "model.layers.1.attend.out")


@torch.no_grad()
def not_a_number(model: Decoder) -> None:
    model.head.weight[2] = float("nan")


def test_nan_is_never_the_same() -> None:
    report = diff(decoder(), changed(not_a_number), IDS)
    assert (report.same, first(report)) == (False, ("head", "head"))
    assert "one side has a number where the other has none. The first difference is in `head`" in report.paragraphs[0]
    both = diff(changed(not_a_number), changed(not_a_number), IDS)
    assert (both.same, [one.same for one in both.outputs]) == (None, [None])
    assert "NaN on both sides and were not judged: `0`" in both.paragraphs[0]


@torch.no_grad()
def infinite(model: Decoder) -> None:
    model.head = nn.Linear(WIDTH, VOCABULARY)
    model.head.weight.copy_(torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(2)))
    model.head.bias.zero_()[0] = -torch.inf


def test_logits_that_are_hidden_on_both_sides_hide_nothing_else() -> None:
    assert diff(changed(infinite), changed(infinite), IDS).same is True
    assert first(diff(changed(infinite), changed(infinite, doubled_head), IDS)) == ("head", "head")


@torch.no_grad()
def one_weight(model: Decoder) -> None:
    model.head.weight[4, 3] += 2e-4


def test_one_entry_of_many_is_enough() -> None:
    report = diff(decoder(), changed(one_weight), IDS)
    assert first(report) == ("head", "head")


@dataclasses.dataclass
class Ends:
    logits: Tensor
    states: tuple[Tensor, ...]


class Cache:
    def __init__(self, x: Tensor) -> None:
        self.key_cache, self.value_cache = [x, x], [x, x]


RETURNED = [
    (lambda y, x: {"logits": y, "hidden": [x, None], "ids": IDS}, ["logits", "hidden.0"]),
    (lambda y, x: Ends(y, (x, x)), ["logits", "states.0", "states.1"]),
    (lambda y, x: (y, Cache(x)), ["0", "1.0.key", "1.1.key", "1.0.value", "1.1.value"]),
    (lambda y, x: (None, y), ["1"]),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("returned", "names"), RETURNED)
def test_every_tensor_of_what_is_returned_is_compared(returned: Callable[..., Any], names: list[str]) -> None:
    assert list(tensors_of(returned(torch.ones(2), torch.ones(3)))) == names
    same = diff(decoder(returned=returned), decoder(returned=returned), IDS)
    assert ([one.name for one in same.outputs], same.same) == (names, True)
    report = diff(decoder(returned=returned), changed(doubled_head, returned=returned), IDS)
    assert [one.name for one in report.outputs if one.same is False] == names[:1]


def test_encoder_and_decoder() -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes)).eval()
    inputs = {"input_ids": IDS + 1, "decoder_input_ids": IDS[:, :4] + 1}
    same = diff(model, copy.deepcopy(model), inputs, attn_a="eager", attn_b="sdpa")
    assert (same.same, len(same.outputs)) == (True, 6)  # logits, caches, the encoder's states
    port = copy.deepcopy(model)
    with torch.no_grad():
        port.encoder.final_layer_norm.weight.mul_(1.1)
    report = diff(model, port, inputs)
    assert first(report) == ("encoder.final_layer_norm", "encoder.final_layer_norm")


def test_half_precision_is_compared_within_its_rounding() -> None:
    half = [changed(*changes).bfloat16() for changes in ((), (doubled_head,))]
    assert diff(decoder(), half[0], IDS).same is True
    assert first(diff(half[0], half[1], IDS)) == ("head", "head")


def test_a_trace_file_has_no_outputs_and_the_headline_says_so(tmp_path: Path) -> None:
    sqrtdk.record(decoder(), IDS, path=tmp_path / "a.safetensors")
    report = diff(decoder(), tmp_path / "a.safetensors", IDS)
    assert (report.same, report.outputs, report.first_module) == (True, (), None)
    assert report.paragraphs[0] == "The models' outputs were not compared: B is a trace file."
    assert "Same; outputs not compared." in diff_summary_line(report)
    assert "未比较输出" in diff_summary_line(report, "zh")


def test_the_report_says_it_in_json_and_on_the_page() -> None:
    report = diff(decoder(), changed(doubled_head), IDS)
    document = json.loads(to_json(report))
    schema = json.loads((Path(__file__).parents[2] / "docs" / "diff.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    assert document["first_module"] == {"a": "head", "b": "head", "place": None}  # no code tells of a weight
    (logits,) = document["outputs"]
    assert logits["difference"] == pytest.approx(1.0)
    assert list(logits) == ["name", "same", "difference", "allowed"]
    assert "outputs differ by 100%. The first difference is in <code>head</code>" in to_html(report)
    said = "注意力一致；输出相差 100%。首个差异在 `head`：B 的 `weight` 是 A 的 2 倍。此外没有其他差异。"
    assert paragraphs(report)[0] == said
    assert document["paragraphs"] == [*report.paragraphs]
    read = [
        recorded(text, **message)
        for text, message in zip(document["paragraphs"], document["paragraph_messages"], strict=True)
    ]
    assert [said_in(text, "zh") for text in read] == paragraphs(report)


def test_both_models_are_left_without_hooks() -> None:
    a, b = decoder(), changed(doubled_head)
    diff(a, b, IDS)
    assert not any(part._forward_hooks or part._forward_pre_hooks for model in (a, b) for part in model.modules())


class Sinking(nn.Module):
    """Attention with a sink, in the softmax or as `sigmoid(lse - sink)` on what leaves it: the same numbers."""

    def __init__(self, way: str, out: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.qkv, self.out, self.way = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), way
        self.sink = nn.Parameter(torch.tensor([0.5, -1.0]))
        with torch.no_grad():
            self.out.weight.mul_(out)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        logits, sink = q @ k.mT * 8**-0.5, self.sink[:, None, None]
        if self.way == "softmax":
            column = sink.expand(len(q), 2, q.shape[2], 1)
            heads = torch.cat([logits, column], -1).softmax(-1)[..., :-1] @ v
        else:
            heads = logits.softmax(-1) @ v
            lse = logits.logsumexp(-1, keepdim=True)
            if self.way == "sigmoid":
                heads = heads * torch.sigmoid(lse - sink)
            if self.way == "exponent":
                heads = heads * torch.exp(lse - torch.logaddexp(lse, sink))
        return self.out(heads.transpose(1, 2).flatten(2))


STATES = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("way", ["sigmoid", "exponent"])
@pytest.mark.parametrize("swapped", [False, True])
def test_what_cancels_before_it_leaves_the_module_is_no_difference(way: str, swapped: bool) -> None:
    sides = [Sinking("softmax"), Sinking(way)]
    report = diff(*(sides[::-1] if swapped else sides), STATES)
    (pair,) = report.pairs
    assert (report.same, pair.same, pair.causes, pair.cancelling) == (True, True, (), ("sinks",))
    assert "The stage sinks differs at (root) and makes no difference" in report.paragraphs[1]


def test_a_sink_that_is_lost_and_an_output_that_says_nothing() -> None:
    report = diff(Sinking("softmax"), Sinking("none"), STATES)
    assert [cause.name for cause in report.pairs[0].causes] == ["sinks"]
    silent = diff(Sinking("softmax", 0.0), Sinking("none", 0.0), STATES)
    assert [cause.name for cause in silent.pairs[0].causes] == ["sinks"]
    assert silent.same is False
