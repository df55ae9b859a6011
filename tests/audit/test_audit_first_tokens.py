"""Runs that confirm take the first tokens of made inputs: at less cost, and the report is that of the whole inputs."""

import math

import pytest
import torch

from sqrtdk._check import check
from sqrtdk.audit import model_run
from sqrtdk.audit.first_tokens import LENGTHS

hf = pytest.importorskip("transformers")
from tests.attentions.each import each  # noqa: E402
from tests.audit.test_audit_registered import registered  # noqa: E402
from tests.hf.families import FAMILIES  # noqa: E402  (imports transformers)

WHOLE = 128  # tokens of made inputs


def llama(name="sdpa", **fields):
    torch.manual_seed(0)
    config = FAMILIES["llama"]()
    for field, value in fields.items():
        setattr(config, field, value)
    return hf.LlamaForCausalLM._from_config(config, attn_implementation=name).eval()


def attending(wrong):
    """An attention function of somebody's, with one thing wrong."""

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        groups, length = query.shape[1] // key.shape[1], key.shape[-2]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if wrong in ("scaling", "length"):  # the module's attribute is not read
            scaling = query.shape[-1] ** -0.5
        if wrong in ("length", "both"):  # right at the length of made inputs alone
            scaling *= math.log(length) / math.log(WHOLE)
        logits = query @ key.transpose(-1, -2) * scaling
        if attention_mask is not None and wrong != "mask":
            logits = logits + attention_mask[..., :length]
        weights = logits.softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    return attend


def audited(model):
    """The report, and the number of tokens of each run."""
    lengths = []
    handle = model.register_forward_pre_hook(
        lambda _, args, inputs: lengths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    report = check(model, laws="none")
    handle.remove()
    return report, lengths


FINDS = {None: [], "scaling": ["responsiveness"], "length": ["responsiveness"], "both": [], "mask": ["eager_vs_sdpa"]}


@pytest.mark.full
@each("wrong", FINDS)
def test_the_report_is_that_of_the_whole_inputs(wrong, monkeypatch):
    name = f"somebodys_first_{wrong}"
    with registered(name, attending(wrong)):
        report, lengths = audited(llama(name))
        with monkeypatch.context() as patched:
            patched.setattr(model_run, "first_inputs", lambda *_: None)
            whole, of_whole = audited(llama(name))
    assert (report.findings, report.not_measured) == (whole.findings, whole.not_measured)
    assert set(of_whole) == {WHOLE}
    rules = {finding.rule for finding in report.findings if finding.rule in ("responsiveness", "eager_vs_sdpa")}
    assert sorted(rules) == FINDS[wrong]
    # What the first tokens do not settle is asked of all.
    asked_again = {None: 0, "scaling": 1, "length": 3, "both": 3, "mask": 2}
    assert lengths.count(WHOLE) == 1 + asked_again[wrong]
    assert set(lengths) <= {WHOLE, *LENGTHS}


@each(
    "fields, options",
    [({"sliding_window": 64}, {}), ({"chunk_size": 64}, {}), ({}, {"attn": "both"}), ({}, {"seq_len": WHOLE})],
)
def test_where_all_tokens_are_taken(fields, options):
    """A number of tokens in the config, both implementations by name, and a length of the user's own."""
    model, lengths = llama(**fields), []
    model.register_forward_pre_hook(
        lambda _, args, inputs: lengths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    check(model, laws="none", **options)
    compared = lengths[-2:] if options.get("attn") != "both" else lengths[2:4]
    assert set(compared) == {WHOLE}
