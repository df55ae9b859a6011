"""What to change in B: the fix of a cause, and that no fix of the catalogue is out of reach.

`causes/test_cause_records.py` asks for the fix of every planted cause.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sqrtdk.compare import fixes
from sqrtdk.compare.causes import CAUSES, MODULE_CAUSE_ROWS, suspect
from sqrtdk.compare.fixes import fix_of, worded
from sqrtdk.compare.inside.build import program_of
from sqrtdk.compare.inside.call_numbers import observe
from sqrtdk.compare.inside.explain import explain_segment, mends
from sqrtdk.compare.inside.pair import precision_of
from sqrtdk.compare.inside.program import Formula
from sqrtdk.compare.inside.segments import joined_segments, segments
from sqrtdk.compare.inside.suspect import BothParts, CauseRow, PartDifference, Sides, formula_pairs
from sqrtdk.compare.records import Cause
from sqrtdk.messages import Message, catalogue_text, placeholders
from sqrtdk.messages._catalogue import topic
from tests.compare.test_segments import kept

OF_TRIALS = {"norm_eps", "activation"}  # causes outside attention that are tried against a port, or named by a key
COMPUTED = {"causal", "form", "infinite", "interleaved", "repeated", "set", "drop", "written"}


def cause(name: str, a: object, b: object, key: str = "", /, codes: tuple[str, ...] = (), **values: object) -> Cause:
    text = Message(f"causes.{name}.{key}", **values) if key else "as a stranger's record says it"  # type: ignore[arg-type]
    return Cause(name, a, b, 1.0, text, "", codes=codes)  # type: ignore[arg-type]


K = {"a": "", "b": "", "parts": "k"}
FIXES = {
    "scale": (cause("scale", 0.125, 1.0), "make 0.125 the only factor on q @ k.mT"),
    "softcap": (cause("softcap", 50.0, None), "50 * torch.tanh(z / 50)"),
    "no softcap": (cause("softcap", None, 50.0), "attn_logit_softcapping=None"),
    "causal": (cause("mask_offset", 0, Message("causes.value.none"), codes=("causal",)), "is_causal=True"),
    "one ahead": (cause("mask_offset", -1, 0), "tril(1)"),
    "lower right": (cause("mask_alignment", "lower right", "", codes=("lower_right",)), "tril(S - L)"),
    "groups": (cause("group_order", "0 0 1 1", "0 1 0 1", "other", codes=("interleaved",), **K), "interleave"),
    "tiles": (cause("group_order", "0 1 0 1", "0 0 1 1", "other", codes=("repeated",), **K), "1, n, 1, 1"),
    "own heads": (
        cause("group_order", "0 1 2", "2 1 0", "other", a="0 1 2", b="2 1 0", parts="k"),
        "heads 0 1 2 of k: x[:, order]",
    ),
    "inverted": (cause("mask", "", "", codes=("inverts",)), "pass ~mask"),
    "norm": (cause("qk_norm", "RMS", None, "missing", a="RMS", parts="q"), "nn.RMSNorm"),
    "no parts in a record": (cause("qk_norm", "RMS", None), None),
    "input": (cause("input", None, None, "other"), None),
    "unknown": (cause("unknown", None, None), None),
}


@pytest.mark.parametrize(("one", "words"), FIXES.values(), ids=FIXES.keys())
def test_a_fix_names_the_call(one: Cause, words: str | None) -> None:
    fix = fix_of(one)
    assert fix is words is None or (fix is not None and words is not None and words in fix)


@pytest.mark.parametrize("of", ["gguf", "port"])
def test_a_fix_names_no_config_of_transformers_where_b_has_none(of: str) -> None:
    for key in (key for key in topic("fixes") if key.endswith(f"_{of}")):
        text = catalogue_text(f"fixes.{key}").en
        assert not re.search("config|rope_theta|_word_embeddings", text)
        assert key.rpartition("_")[0] in topic("fixes") or key.partition(".")[0] in OF_TRIALS
    assert "config" in str(fix_of(cause("softcap", 50.0, None)))
    assert "config" not in str(fix_of(replace(cause("softcap", 50.0, None), written=f"{of} gemma2")))


TORCH_ONLY = re.compile(
    r"torch|\bnn\.|\bF\.|\.view\(|\.mT|\.chunk\(|\.to\(|\.bool\(|GELU|load_state_dict|masked_fill|repeat_interleave"
    r"|is_causal|attn_mask|apply_rotary|position_ids|transformers|scaled_dot_product|config|tokenizer|strict="
)


@pytest.mark.parametrize("of", ["port", "gguf llama"])
@pytest.mark.parametrize("key", [key for key in topic("fixes") if not re.search("_(gguf|port)$", key)])
def test_no_word_of_torch_is_advised_where_b_has_no_torch(key: str, of: str) -> None:
    names = dict.fromkeys(placeholders(catalogue_text(f"fixes.{key}").en), "x")
    names |= dict.fromkeys(("a", "b", "parts", "ratio", "own", "theirs"), "x")
    fix = Message(f"fixes.{key}", **dict.fromkeys(placeholders(catalogue_text(f"fixes.{key}").en), "x"))
    advised = worded(fix, key.partition(".")[0], of, names)
    assert not TORCH_ONLY.search(advised)
    assert not TORCH_ONLY.search(catalogue_text(advised.id).zh)


def test_no_fix_is_out_of_reach() -> None:
    sentences, known = topic("causes"), topic("fixes")
    assert set(fixes._SAME_FIX.values()) <= known.keys()
    assert set(fixes._SAME_FIX) <= sentences.keys()
    ids = {id for row in MODULE_CAUSE_ROWS for id in ((row.fix,) if isinstance(row.fix, str) else row.fix) if id}
    outside = {id.removeprefix("fixes.") for id in ids}
    assert outside <= known.keys()
    own = {re.sub("_(gguf|port)$", "", key) for key in known} - set(fixes._SAME_FIX.values()) - outside
    assert {key for key in own if key not in sentences and key.rpartition(".")[2] not in COMPUTED} == set()
    assert {key.partition(".")[0] for key in own | set(fixes._SAME_FIX.values())} == {*CAUSES, *OF_TRIALS}


def _only_to_half(both: BothParts[Formula]) -> PartDifference | None:
    """A suspicion that is right for A: its scale becomes B's. Put into B, it makes another scale than A's."""
    a, b = both.a.scale, both.b.scale
    wanted = b if b < a else 3 * a
    return None if a == b else PartDifference(float(a), float(b), edit=lambda own: replace(own, scale=wanted))


@pytest.mark.parametrize("helps", [True, False])
def test_a_fix_is_said_only_where_it_helps_b(helps: bool) -> None:
    a, b = kept("eager"), kept("eager", scale=0.1)
    seen, programs = observe(b), [program_of(call, observe(call)) for call in (a, b)]
    sides = Sides(*programs, head_dim=a.query.values.shape[-1], model_dim=None, heads=4, self_attention=True)
    whole = joined_segments(segments(b, seen, sides.a, (precision_of(a), precision_of(b)), None), sides.a)
    row = CauseRow("scale", formula_pairs, "scale", (), _only_to_half, "causes.scale.other")
    causes = CAUSES if helps else {"scale": suspect(row)}
    found = explain_segment(whole, sides, causes)
    assert [cause.name for cause in found.causes] == ["scale"]
    assert mends(whole, sides, causes, found.causes) is helps
    one = replace(found.causes[0], mends=helps)
    assert (fix_of(one) is not None) is helps
