"""What reaches `attention_forward`: every keyword argument is known or refused, and every mask says what it hides."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.0")  # create_bidirectional_mask

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import LOSS_MAPPING, fixed_cross_entropy
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.utils.generic import TransformersKwargs

import sqrtdk
from sqrtdk.errors import InvalidValueError, UnsupportedError
from sqrtdk.integrations.transformers import (
    IGNORED_ARGUMENTS,
    REFUSED_ARGUMENTS,
    _plain,
    _stored,
    attention_forward,
    attention_mask,
    register,
)
from sqrtdk.nn._attend import attend
from tests.hf.families import CACHE
from tests.tolerances import complaint

SPEC = importlib.util.find_spec("transformers")
assert SPEC is not None
assert SPEC.origin is not None
MODELS = Path(SPEC.origin).parent / "models"
OWN = set(attention_forward.__code__.co_varnames[: attention_forward.__code__.co_argcount])
SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FREE = nn.Module()
FREE.is_causal = False


@pytest.fixture(scope="module")
def sources() -> list[tuple[str, str]]:
    """The name of each family of transformers, and the text of a modeling file of it."""
    return [(path.parent.name, path.read_text("utf-8")) for path in MODELS.glob("*/modeling_*.py")]


def heads(*sizes: int) -> Tensor:
    return torch.randn(*(sizes or (2, 4, 5, 8)), dtype=torch.float64)


def called(**kwargs: Any) -> Tensor:
    q, k, v = heads(), heads(), heads()
    mask = kwargs.pop("attention_mask", None)
    return attention_forward(FREE, q, k, v, mask, **kwargs)[0]


def names_in(source: str) -> set[str]:
    """Keyword arguments of the calls of the interface, and parameters of the eager functions beside it."""
    names = set()
    for start in re.finditer(r"(= |def )(attention_interface|eager_attention_forward)\(", source):
        depth, stop = 1, start.end()
        while depth:  # to the bracket that closes it: parsing whole files takes a minute
            depth += {"(": 1, ")": -1}.get(source[stop], 0)
            stop += 1
        text = source[start.start(2) : stop]
        node = ast.parse(f"def {text}: ..." if start[1] == "def " else text).body[0]
        if isinstance(node, ast.FunctionDef):
            names |= {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            names |= {keyword.arg for keyword in node.value.keywords if keyword.arg is not None}
    return names


def test_every_argument_that_a_model_of_transformers_names_is_known(sources: list[tuple[str, str]]) -> None:
    """Those that models pass, those that eager knows, and those that any model may be given and pass down."""
    texts = [text for _, text in sources if "attention_interface" in text]
    assert len(texts) > 200
    named = set(TransformersKwargs.__annotations__).union(*map(names_in, texts))
    assert {"s_aux", "indices", "cu_seq_lens_q"} <= named
    assert named - OWN - set(IGNORED_ARGUMENTS) - set(REFUSED_ARGUMENTS) == set()
    assert not set(IGNORED_ARGUMENTS) & set(REFUSED_ARGUMENTS)
    assert not OWN & (set(IGNORED_ARGUMENTS) | set(REFUSED_ARGUMENTS))


def test_every_argument_of_a_loss_that_a_model_is_given_is_known() -> None:
    """A model hands what it is given beyond its own arguments to its loss, and to its layers as well."""
    losses = (
        fixed_cross_entropy,
        *(LOSS_MAPPING[name] for name in ("ForCausalLM", "ForMaskedLM", "ForTokenClassification")),
    )
    named = {p.name for loss in losses for p in inspect.signature(loss).parameters.values() if p.default is not p.empty}
    assert {"ignore_index", "num_items_in_batch", "shift_labels"} <= named
    assert named | {"labels"} <= set(IGNORED_ARGUMENTS)


@pytest.mark.parametrize("arguments", [{"ignore_index": 3}, {"shift_labels": "rolled"}])
def test_a_model_learns_with_the_arguments_of_its_loss(arguments: dict[str, Any]) -> None:
    register()
    ids = torch.arange(1, 9)[None]
    given = {name: ids.roll(-1, 1) if value == "rolled" else value for name, value in arguments.items()}
    losses = []
    for attn in ("eager", "sqrtdk"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation=attn)).double()
        losses.append(model(ids, labels=ids, **given).loss.float())
    torch.testing.assert_close(losses[1], losses[0])


def test_the_weights_are_returned_where_they_are_asked_for() -> None:
    register()
    ids = torch.arange(1, 9)[None]
    found = {}
    for attn in ("eager", "sqrtdk"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation=attn)).double()
        found[attn] = model(ids, output_attentions=True)
        assert not model(ids).attentions
    assert len(found["sqrtdk"].attentions) == 2
    for ours, eager in zip(found["sqrtdk"].attentions, found["eager"].attentions, strict=True):
        assert (
            complaint(ours.float(), eager, torch.float32, length=8, logit=1.0) is None
        )  # eager's softmax is in float32


def test_weights_of_keys_that_are_not_there_yet_are_zero() -> None:
    """The first pass with a static cache of eight places."""
    q, k = heads(1, 2, 3, 8), heads(1, 2, 8, 8)
    output, weights = attention_forward(FREE, q, k, k, None, is_causal=True, output_attentions=True)
    assert weights is not None
    assert weights.shape == (1, 2, 3, 8)
    wanted = (q @ k.mT / 8**0.5).masked_fill(~torch.ones(3, 8).tril().bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(weights, wanted)
    torch.testing.assert_close(output, (wanted @ k).transpose(1, 2))


@pytest.mark.parametrize("entries", [1, 7, 8, 9])
def test_a_mask_that_repeats_one_entry_is_held_against_its_copy(entries: int) -> None:
    """What a decoder's step of one token gets: no dimension of it has a stride."""
    one = torch.ones((), dtype=torch.bool).expand(2, 1, 1, entries)
    for mask in (one, one.contiguous(), torch.ones(2, 1, 1, 2 * entries, dtype=torch.bool)[..., ::2]):
        marked: Any = mask
        marked._sqrtdk_plain = (False, _stored(mask).clone())
        assert _plain(mask, 1, entries) in (False, None)
        hidden: Any = torch.zeros_like(mask)
        hidden._sqrtdk_plain = marked._sqrtdk_plain
        assert _plain(hidden, 1, entries) is None
        q, k = heads(2, 4, 1, 8), heads(2, 4, entries, 8)
        torch.testing.assert_close(attention_forward(FREE, q, k, k, mask)[0], sqrtdk.attention(q, k, k).transpose(1, 2))


@pytest.mark.parametrize("more", [{}, {"indices": torch.tensor([[[0, 1], [2, 1], [4, 5], [1, 5], [0, 3]]] * 2)}])
def test_a_causal_bias_is_a_mask(more: dict[str, Any]) -> None:
    q, k = heads(2, 4, 5, 8), heads(2, 4, 7, 8)
    for bias, shift in ((causal_upper_left(5, 7), 0), (causal_lower_right(5, 7), 2)):
        triangle = torch.ones(5, 7).tril(shift).bool()[None, None]
        found, wanted = (attention_forward(FREE, q, k, k, mask, **more)[0] for mask in (bias, triangle))
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0.0)


def test_models_that_ask_for_sdpa_by_name_were_read(sources: list[tuple[str, str]]) -> None:
    """Such a model does something else for "sqrtdk": each has a way to be right, and a new one has to be read.

    Releases of transformers have other models: those of the installed one are asked.
    """
    selected = {  # give `indices`
        "axk2", "deepseek_v32", "dots3_note", "glm_moe_dsa", "hy_v4", "hy_v4_vl", "mistral_large4"
    }  # fmt: skip
    blocks = {"minimax_m3_vl"}  # gives block_indices, refused
    floating = {"glm5_next"}  # gives a floating mask to all but sdpa
    masks = {"gemma4", "gemma4_unified"}  # cuts the mask, which is always there
    elsewhere = {"falcon"}  # does not take the interface
    asking = set()
    for family, text in sources:
        lines = text.splitlines()
        if any("_attn_implementation" in line and '"sdpa"' in line and "if" in line for line in lines) or any(
            "_attn_implementation ==" in line and '"sdpa"' in line for line in lines
        ):
            asking.add(family)
    assert asking - (selected | blocks | floating | masks | elsewhere) == set()
    assert elsewhere <= asking


@pytest.mark.parametrize("name", ["key_scaling", "sinks_of_another_kind", *REFUSED_ARGUMENTS])
def test_an_argument_that_would_change_something_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"the argument '{name}'") as caught:
        called(**{name: torch.ones(1)})
    assert "attn_implementation=" in caught.value.hint
    called(**{name: None})
    if name in REFUSED_ARGUMENTS:
        called(**{name: False})


@pytest.mark.parametrize("name", IGNORED_ARGUMENTS)
def test_an_argument_that_changes_nothing_is_taken(name: str) -> None:
    mask = torch.ones(2, 1, 5, 5).bool()
    torch.manual_seed(0)
    plain = called(attention_mask=mask)
    torch.manual_seed(0)
    assert torch.equal(called(attention_mask=mask, **{name: torch.ones(1)}), plain)


@pytest.mark.parametrize(
    ("argument", "refused", "taken"),
    [
        ("sliding_window", 2, 5),
        ("sliding_window", 4, None),
        ("position_ids", torch.tensor([[0, 1, 2, 0, 1]]), torch.arange(3, 8)[None]),
        ("position_ids", torch.tensor([[0, 0, 1, 2, 3]]), torch.tensor([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]])),
    ],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_what_a_mask_would_hold_is_refused_without_one(
    argument: str, refused: Any, taken: Any, is_causal: bool
) -> None:
    with pytest.raises(UnsupportedError, match=f"'{argument}'.* no mask"):
        called(is_causal=is_causal, **{argument: refused})
    called(is_causal=is_causal, **{argument: taken})
    called(attention_mask=torch.ones(2, 1, 5, 5).tril().bool(), **{argument: refused})


def test_sinks_of_rows_join_the_denominator() -> None:
    q, k, v, bias, sinks = heads(), heads(), heads(), heads(2, 4, 5, 5), heads(2, 4, 5, 1)
    found = attention_forward(FREE, q, k, v, None, sinks=sinks, position_bias=bias)[0]
    z = q @ k.mT / 8**0.5 + bias
    wanted = (torch.cat([z, sinks], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)
    assert complaint(found, wanted, torch.float64, length=6, logit=z.abs().max().item()) is None
    with pytest.raises(InvalidValueError, match="got both"):
        called(sinks=heads(2, 4, 5, 1), s_aux=heads(4))


@pytest.mark.parametrize("kind", ["none", "bool", "floating"])
def test_a_row_sees_the_keys_that_are_selected_for_it(kind: str) -> None:
    q, k, v = heads(1, 2, 3, 8), heads(1, 1, 4, 8), heads(1, 1, 4, 8)
    indices = torch.tensor([[[0, 1], [2, -1], [3, 7]]], dtype=torch.int32)
    selected = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]).bool()
    shown = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    floating = torch.zeros(1, 1, 3, 4, dtype=torch.float64).masked_fill(~shown, torch.finfo(torch.float64).min)
    mask = {"none": None, "bool": shown[None, None], "floating": floating}[kind]
    found = attention_forward(FREE, q, k, v, mask, indices=indices)[0]
    seen = selected if kind == "none" else selected & shown
    wanted = sqrtdk.attention(q, k, v, seen, enable_gqa=True, impl="dense")
    torch.testing.assert_close(found, wanted.transpose(1, 2), rtol=1e-12, atol=0.0)


def test_packed_sequences_need_a_mask_that_keeps_them_apart() -> None:
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    whole = torch.ones(2, 1, 5, 5).tril().bool()
    apart = whole.clone()
    apart[..., 2:, :2] = False
    floating = torch.zeros(2, 1, 5, 5, dtype=torch.float64)
    for mask in (None, whole, floating):
        with pytest.raises(UnsupportedError, match="2 sequences are packed"):
            called(attention_mask=mask, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=3, max_length_k=3)
    for mask in (apart, floating.masked_fill(~apart, torch.finfo(torch.float64).min)):
        called(attention_mask=mask, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    called(cu_seq_lens_q=ends[::2])


@pytest.mark.parametrize("through_the_batch", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_no_row_of_a_packed_sequence_sees_a_key_of_another(causal: bool, through_the_batch: bool) -> None:
    """Each pair of positions of two sequences in turn is the only one that the mask shows too much."""
    ends = torch.tensor([0, 2, 5, 7, 10] if through_the_batch else [0, 2, 5], dtype=torch.int32)
    of = torch.tensor([0, 0, 1, 1, 1])
    apart = (of[:, None] == of).expand(2, 1, 5, 5)
    apart = apart.tril() if causal else apart.clone()
    called(attention_mask=apart, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    for row, key in (of[:, None] != of).nonzero().tolist():
        leaking = apart.clone()
        leaking[1, 0, row, key] = True
        for names in (["cu_seq_lens_q"], ["cu_seq_lens_k"], ["cu_seq_lens_q", "cu_seq_lens_k"]):
            with pytest.raises(UnsupportedError, match="lets one see another"):
                called(attention_mask=leaking, **dict.fromkeys(names, ends))


def test_sequences_of_keys_are_their_own_and_all_have_to_fit() -> None:
    rows, keys = torch.tensor([0, 2, 5]), torch.tensor([0, 3, 5])
    rows_of, keys_of = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 1])
    mask = (rows_of[:, None] == keys_of)[None, None]
    called(attention_mask=mask, cu_seq_lens_q=rows, cu_seq_lens_k=keys)
    with pytest.raises(UnsupportedError, match="lets one see another"):
        called(attention_mask=mask, cu_seq_lens_q=rows, cu_seq_lens_k=rows)
    for name, wrong in (("q", [0, 2, 4]), ("k", [0, 3, 6]), ("q", [1, 2, 5]), ("k", [0, 6, 5])):
        given = {"cu_seq_lens_q": rows, "cu_seq_lens_k": keys} | {f"cu_seq_lens_{name}": torch.tensor(wrong)}
        with pytest.raises(InvalidValueError, match=f"cu_seq_lens_{name} runs from"):
            called(attention_mask=mask, **given)
    with pytest.raises(InvalidValueError, match=r"2 sequences of rows .* and 1 of keys"):
        called(attention_mask=mask, cu_seq_lens_q=rows, cu_seq_lens_k=keys[::2])


def test_no_mask_for_a_module_that_calls_itself_causal_is_refused() -> None:
    """Eager would show it the future, sdpa not: neither is what the other would be."""
    q = heads()
    with pytest.raises(UnsupportedError, match="Module calls itself causal and got no mask"):
        attention_forward(nn.Module(), q, q, q, None)
    future = attention_forward(nn.Module(), q, q, q, None, is_causal=False)[0]
    past = attention_forward(FREE, q, q, q, None, is_causal=True)[0]
    same = {"rtol": 1e-12, "atol": 0.0}
    torch.testing.assert_close(future, sqrtdk.attention(q, q, q).transpose(1, 2), **same)
    torch.testing.assert_close(past, sqrtdk.attention(q, q, q, is_causal=True).transpose(1, 2), **same)
    attention_forward(nn.Module(), q[:, :, :1], q, q, None)


@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_is_always_there_and_read_only_where_it_has_to_be(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    config = LlamaConfig(attn_implementation="sqrtdk")
    make = create_causal_mask if causal else create_bidirectional_mask
    rest = {CACHE: None} if causal else {}
    mask = make(config=config, inputs_embeds=torch.zeros(2, 5, 8), attention_mask=None, **rest)
    assert torch.equal(mask, torch.ones(2, 1, 5, 5).tril().bool() if causal else torch.ones(2, 1, 5, 5).bool())

    given = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        given.append((kwargs["attn_mask"], kwargs["is_causal"]))
        return attend(*args, **kwargs)

    monkeypatch.setattr("sqrtdk.integrations.transformers.attend", spy)
    told_otherwise = SimpleNamespace(is_causal=not causal)
    q = heads()
    changed = mask.clone()
    for one in (mask, changed):
        wanted = sqrtdk.attention(q, q, q, mask).transpose(1, 2)
        torch.testing.assert_close(attention_forward(told_otherwise, q, q, q, one)[0], wanted, rtol=1e-12, atol=0.0)
    assert given[0] == (None, causal)
    assert given[1][0] is changed
    for kept_version in (False, True):  # written in place, also where the version stays: no longer what the mark says
        alone = make(config=config, inputs_embeds=torch.zeros(1, 5, 8), attention_mask=None, **rest)
        (alone.data if kept_version else alone)[..., 4, 0] = False
        attention_forward(told_otherwise, q, q, q, alone)
        assert given[-1][0] is alone


@pytest.mark.parametrize("length", [5, pytest.param(16, marks=pytest.mark.full)])
def test_a_mask_that_a_compiled_function_writes_is_read(length: int) -> None:
    """The graph sees neither the mark nor a version."""
    register()
    config = LlamaConfig(attn_implementation="sqrtdk")
    q, k, v = heads(2, 4, length, 8), heads(2, 4, length, 8), heads(2, 4, length, 8)

    def written(mask: Tensor) -> Tensor:
        mask[..., 1:, 0] = False
        return attention_forward(FREE, q, k, v, mask, scaling=8**-0.5)[0]

    embedded = torch.zeros(1, length, 8)
    mask = create_causal_mask(config=config, inputs_embeds=embedded, attention_mask=None, **{CACHE: None})
    shown = mask.clone()
    shown[..., 1:, 0] = False
    found = torch.compile(written, backend="aot_eager")(mask)
    wanted = sqrtdk.attention(q, k, v, shown, scale=8**-0.5).transpose(1, 2)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0.0)


def test_a_mask_of_padding_is_transformers_own() -> None:
    padding = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()
    mask = attention_mask(2, 4, 4, attention_mask=padding)
    assert torch.equal(mask, torch.ones(4, 4).tril().bool() & padding[:, None, None])
