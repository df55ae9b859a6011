"""What `check` runs: both implementations, the ones that are left out, the inputs it takes, and its exit code."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from sqrtdk._check import _worst_first, check
from sqrtdk.audit.model_run import ModelRun
from sqrtdk.audit.records import Finding, ModelInfo
from sqrtdk.audit.rules import eager_vs_sdpa
from sqrtdk.errors import InvalidTypeError, InvalidValueError, ModelError, UnsupportedError
from sqrtdk.report.check.fold import fold_findings, values

hf = pytest.importorskip("transformers")
from tests.attentions.each import each  # noqa: E402
from tests.hf.families import EAGER_ONLY, FAMILIES  # noqa: E402  (imports transformers)
from tests.tolerances import allowed  # noqa: E402


def build(name, attn=None, **changes):
    config = FAMILIES[name]()
    for field, value in changes.items():
        setattr(config, field, value)
    options = {} if attn is None else {"attn_implementation": attn}
    return getattr(hf, config.architectures[0])._from_config(config, **options).eval()


# --- attn="both" ---


@each("static", [False, True])
def test_both_holds_both_runs_eager_first(static):
    model = build("llama", "eager")
    report = check(model, attn="both", seq_len=24, static=static)
    assert [(judged.call.kind, judged.call.site[:14]) for judged in report.calls] == [
        ("eager", "model.layers.0"),
        ("eager", "model.layers.1"),
        ("sdpa", "model.layers.0"),
        ("sdpa", "model.layers.1"),
    ]
    assert {judged.verdict for judged in report.calls} == {"exact"}
    assert report.not_measured == ()
    assert report.environment["attn"] == "eager, sdpa"
    assert model.config._attn_implementation == "eager"


@each("attn, forwards", [(None, 4), ("eager", 2), ("both", 6)])
def test_how_often_the_model_runs(attn, forwards):
    """Judged, with a larger scale attribute, and once each with q enlarged; the comparison is made once."""
    model, count = build("llama", "sdpa"), []
    handle = model.register_forward_hook(lambda *_: count.append(1))
    check(model, attn=attn, seq_len=24)
    handle.remove()
    assert len(count) == forwards


def test_both_leaves_a_convolutional_backbone_alone():
    config = FAMILIES["detr"]()
    model = hf.DetrForObjectDetection._from_config(config, attn_implementation={"": "sdpa", "backbone_config": "eager"})
    report = check(model, attn="both")
    assert [judged.call.kind for judged in report.calls] == ["eager"] * 6 + ["sdpa"] * 6
    assert report.not_measured == ()
    assert model.config._attn_implementation == "sdpa"


def test_both_of_a_directory_is_built_twice_with_the_same_weights(tmp_path):
    config = FAMILIES["falcon"]()
    config.save_pretrained(tmp_path)  # Falcon fixes its attention when it is built
    report = check(str(tmp_path), attn="both", seq_len=24)
    assert [judged.call.kind for judged in report.calls] == ["eager", "eager", "sdpa", "sdpa"]
    eager, sdpa = report.calls[0].call, report.calls[2].call
    assert eager.stats is not None
    assert sdpa.stats is not None
    room = allowed(torch.float32, length=eager.head_dim, logit=max(sdpa.stats.max_abs_logit), magnitude=1.0)
    assert eager.stats.max_logit == pytest.approx(sdpa.stats.max_logit, abs=room)


@pytest.mark.skipif("gemma2" not in EAGER_ONLY, reason=f"transformers {hf.__version__} lets Gemma 2 have SDPA")
@pytest.mark.parametrize("by_name", [False, True])
def test_both_where_only_one_is_supported_says_so(tmp_path, by_name):
    FAMILIES["gemma2"]().save_pretrained(tmp_path)
    report = check(str(tmp_path) if by_name else build("gemma2"), attn="both", seq_len=24)
    assert [judged.call.kind for judged in report.calls] == ["eager", "eager"]
    (entry,) = report.not_measured
    assert "does not support sdpa attention" in entry.reason


def test_both_where_nothing_can_be_chosen_runs_once():
    for model, inputs in (("demo", None), (nn.TransformerEncoderLayer(64, 4, 96), torch.randn(1, 24, 64))):
        report = check(model, inputs, attn="both", **({"seq_len": 24} if inputs is None else {}))
        sites = [judged.call.site for judged in report.calls]
        assert len(sites) == len(set(sites))
        (entry,) = report.not_measured
        assert "offers no choice of attention" in entry.reason


def test_a_finding_of_one_implementation_says_which(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    right = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def unscaled(*args, scaling=None, **kwargs):
        return right(*args, scaling=1.0, **kwargs)

    model = build("llama", "eager")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", unscaled)
    report = check(model, attn="both", seq_len=24)
    assert [judged.mistake for judged in report.calls] == [None, None, "missing", "missing"]
    ledger = [f for f in report.findings if f.rule == "declared_vs_actual"]
    assert [f.site for f in ledger] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all(f.message.endswith("(only with sdpa attention)") for f in ledger)
    assert len([f for f in report.findings if f.rule == "eager_vs_sdpa"]) == 1
    assert check(model, attn="eager", seq_len=24).exit_code == 0


def test_the_same_finding_of_both_implementations_is_there_once():
    model = build("llama", "sdpa")
    for layer in model.model.layers:
        layer.self_attn.scaling = 4.0  # inverted
    report = check(model, attn="both", seq_len=24)
    assert {judged.mistake for judged in report.calls} == {"inverted"}
    keys = [(f.rule, f.site, f.severity) for f in report.findings]
    assert len(keys) == len(set(keys))
    assert not any("only with" in f.message for f in report.findings)


def run_of(attn, *findings):
    return ModelRun(attn, ModelInfo("m", "M", 1), "dynamic", {"attn": attn}, (), (), (), findings)


def test_the_first_of_equal_findings_is_kept():
    first = Finding("max_logit", "warn", "a", 120.0, 100.0, "120", "clip", "s")
    second = dataclasses.replace(first, value=110.0, message="110")
    other = dataclasses.replace(first, site="b")
    assert _worst_first([run_of("own", first, second, other)]) == (first, other)
    assert _worst_first([run_of("eager", first), run_of("sdpa", second)]) == (first,)


def test_an_implementation_that_a_module_cannot_run_is_an_error():
    if "gemma2" in EAGER_ONLY:
        with pytest.raises(UnsupportedError, match="does not support sdpa"):
            check(build("gemma2"), attn="sdpa", seq_len=24)
    model = build("falcon", "sdpa")
    with pytest.raises(UnsupportedError, match="when it is built"):
        check(model, attn="eager", seq_len=24)
    assert model.config._attn_implementation == "sdpa"
    report = check(nn.TransformerEncoderLayer(64, 4, 96), torch.randn(1, 24, 64), attn="eager")
    assert "offers no choice" in report.not_measured[0].reason


# --- what is left out unasked ---


def test_a_large_model_is_compared_only_when_asked(monkeypatch):
    model = build("llama", "sdpa")
    monkeypatch.setattr(eager_vs_sdpa, "LARGE_MODEL", sum(p.numel() for p in model.parameters()))
    assert check(model, seq_len=24).not_measured == ()
    monkeypatch.setattr(eager_vs_sdpa, "LARGE_MODEL", eager_vs_sdpa.LARGE_MODEL - 1)
    (entry,) = check(model, seq_len=24).not_measured
    assert "--attn both" in entry.reason
    assert "parameters" in entry.reason
    assert check(model, seq_len=24, attn="both").not_measured == ()
    assert check(model, seq_len=24, attn="sdpa").not_measured == ()


def test_an_offloaded_model_is_compared_only_when_asked(tmp_path):
    pytest.importorskip("accelerate")
    from accelerate import disk_offload

    model = build("llama", "sdpa")
    ids = torch.randint(3, 160, (2, 24))
    whole = check(model, ids)
    model.hf_device_map = {"": "disk"}  # as transformers leaves it
    disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in model.parameters())
    report = check(model, ids)
    assert report.mode == "dynamic"
    for one, two in zip(report.calls, whole.calls, strict=True):
        assert (one.verdict, one.call.scale, one.call.stats) == (two.verdict, two.call.scale, two.call.stats)
    (entry,) = report.not_measured
    assert "offloaded" in entry.reason
    assert "--attn both" in entry.reason
    both = check(model, ids, attn="both")
    assert both.not_measured == ()
    assert len(both.calls) == 4


# --- exit code ---


def test_fail_on_never_gives_zero():
    report = check("demo:unscaled", seq_len=24, fail_on="never")
    assert report.exit_code == 0
    assert any(f.severity == "fail" for f in report.findings)
    assert dataclasses.replace(report, fail_on="fail").exit_code == 1


# --- inputs ---


@each("given", ["tensor", "tuple", "list", "dict", "mapping"])
def test_inputs_in_every_form(given):
    model, ids = build("llama"), torch.randint(3, 160, (2, 24))
    mapping = hf.BatchEncoding({"input_ids": ids})
    inputs = {"tensor": ids, "tuple": (ids,), "list": [ids], "dict": {"input_ids": ids}, "mapping": mapping}[given]
    report = check(model, inputs)
    assert [judged.call.batch for judged in report.calls] == [2, 2]
    assert [judged.call.query_len for judged in check(model, inputs, static=True).calls] == [24, 24]


def test_inputs_for_a_model_given_by_name(tmp_path, monkeypatch):
    ids = torch.randint(3, 160, (2, 24))
    assert {judged.call.batch for judged in check("demo", ids).calls} == {2}
    (tmp_path / "somebodys_factory.py").write_text(
        "from torch import nn\ndef make():\n    return nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    report = check("somebodys_factory:make", torch.randn(1, 24, 64))
    assert [judged.verdict for judged in report.calls] == ["exact"]


def test_no_inputs_and_nothing_to_make_them_from():
    with pytest.raises(InvalidValueError, match="no inputs were given, and TransformerEncoderLayer has no") as caught:
        check(nn.TransformerEncoderLayer(64, 4, 96))
    assert "forward(src" in caught.value.hint


@each(
    "inputs, said",
    [
        (torch.randn(1, 24, 63), "src (1, 24, 63)"),
        ((torch.randn(1, 24, 63), None), "0 (1, 24, 63)"),
        ({"source": torch.randn(1, 24, 64)}, "source (1, 24, 64)"),
        ((), "no tensors"),
        ({}, "no tensors"),
    ],
)
@each("static", [False, True])
def test_wrong_inputs_are_one_clear_error(inputs, said, static):
    with pytest.raises(ModelError) as caught:
        check(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), inputs, static=static)
    assert said.removeprefix("src ") in caught.value.hint
    assert "forward takes src" in caught.value.hint
    assert "\n" not in str(caught.value)


def test_inputs_of_another_dtype():
    with pytest.raises(ModelError, match="dtype"):
        check(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), torch.randint(3, (1, 24, 64)))


@each("inputs", ["text", 3, {1, 2}])
def test_inputs_of_another_type(inputs):
    with pytest.raises(InvalidTypeError, match="inputs are a"):
        check(nn.TransformerEncoderLayer(64, 4, 96), inputs)


# --- one finding a site, folded for people by the report ---


class Layers(nn.Module):
    """Three unscaled attentions with weights that grow by layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 192) for _ in range(3))
        self.attn = nn.ModuleList(Unscaled() for _ in range(3))
        with torch.no_grad():
            for layer, linear in enumerate(self.layers):
                linear.weight.mul_((10.0, 16.0, 12.0)[layer])

    def forward(self, x):
        for linear, attn in zip(self.layers, self.attn, strict=True):
            x = x + nn.functional.layer_norm(attn(linear(x)), (64,))
        return x


class Unscaled(nn.Module):
    is_causal = True

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in x.chunk(3, -1))
        return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_findings_are_one_a_site_and_fold_for_people():
    report = check(Layers(), torch.randn(1, 24, 64))
    by_rule = {}
    for finding in report.findings:
        by_rule.setdefault((finding.rule, finding.severity), []).append(finding)
    folded = {(fold.first.rule, fold.first.severity): fold for fold in fold_findings(report.findings)}
    assert folded.keys() == by_rule.keys()  # every kind of finding is one line
    for key in (("scale_ledger", "fail"), ("mask_audit", "critical")):
        assert len(by_rule[key]) == 3
        assert folded[key].site == "attn.0-2"
    logits = [finding for (rule, _), found in by_rule.items() if rule == "max_logit" for finding in found]
    assert {finding.site for finding in logits} == {f"attn.{layer}" for layer in range(3)}
    assert [f.value for f in logits] == sorted((f.value for f in logits), reverse=True)
    for (rule, _), fold in folded.items():
        if rule == "max_logit":
            assert fold.first.value == max(finding.value for finding in fold.findings)
            assert not math.isnan(float(values(fold).en.partition(" to ")[0].replace(",", "")))
