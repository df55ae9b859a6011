"""Rows without a key, and other numbers that are put back: what a model sets to zero or replaces is no cause."""

import math

import torch
from torch import nn

from sqrtdk import check
from sqrtdk.audit.records import has_nonfinite
from sqrtdk.messages import mentions
from tests.attentions.each import each
from tests.audit.nonfinite_models import (
    HEADS,
    INF,
    NAN,
    WIDTH,
    Block,
    Reader,
    cleaned,
    fused,
    inputs,
    of_nonfinite,
    softened,
    written_out,
)  # fmt: skip
from tests.support.sentences import facts

UNDEFINED = "rules.nonfinite.undefined", {"op": "div"}


def blind(rows):
    """Facts of the sentence on rows of each head, of two samples of 12 tokens, that see no key."""
    return "rules.nonfinite.blind", {"blind": rows * HEADS, "rows": 2 * 12 * HEADS}


def overflow(op, dtype, size=""):
    """Facts of the sentence on a step that overflows."""
    return f"rules.nonfinite.overflow{size}", {"op": op, "dtype": dtype}


@each("attend", [softened, written_out])
def test_rows_without_a_key_are_critical_where_they_become_nan(attend):
    report = check(Reader(attend), inputs(padding=3))
    first, second = of_nonfinite(report)
    assert (first.severity, first.site, first.value) == ("critical", "blocks.0", 3 * HEADS)
    assert facts(first.message) == blind(3)
    reached = {"number": 3, "total": 3, "sites": "(blocks.0-2)"}
    assert facts(second.message) == ("rules.nonfinite.reaches.some_and_output", reached)
    assert "mask_audit" not in {finding.rule for finding in report.findings}
    assert all(map(has_nonfinite, (judged.call for judged in report.calls)))


@each("attend", [cleaned, fused])
def test_rows_without_a_key_that_give_zero_are_a_note(attend):
    report = check(Reader(attend), inputs(padding=3))
    assert {(finding.rule, finding.severity) for finding in report.findings} == {("mask_audit", "note")}
    assert report.exit_code == 0


def put_back(then, soften=torch.softmax, *, in_place=False):
    """Sets rows without a key to 0 behind the softmax, as the fix says; `then` comes behind."""

    def attend(q, k, v, hidden):
        logits = (q @ k.mT / math.sqrt(WIDTH // HEADS)).masked_fill(hidden, -INF)
        weights = soften(logits, -1)
        blind = hidden.all(-1, keepdim=True)
        weights = weights.masked_fill_(blind, 0.0) if in_place else torch.where(blind, 0.0, weights)
        return then(weights @ v)

    return attend


def own_softmax(logits, dim):
    weights = (logits - logits.amax(dim, keepdim=True)).exp()
    return weights / weights.sum(dim, keepdim=True)


@each("in_place", [False, True])
@each("soften", [torch.softmax, own_softmax])
def test_rows_without_a_key_that_the_code_sets_to_zero_are_no_cause(soften, in_place):
    quiet = check(Reader(put_back(lambda y: y, soften, in_place=in_place)), inputs(padding=3))
    assert of_nonfinite(quiet) == []
    report = check(Reader(put_back(lambda y: y / (y - y), soften, in_place=in_place)), inputs(padding=3))
    first, second = of_nonfinite(report)
    assert facts(first.message) == UNDEFINED
    assert (first.fix.id, second.fix.id) == ("rules.nonfinite.fix_undefined", "rules.nonfinite.fix_reaches")
    assert (first.severity, first.site) == ("critical", "blocks.0")
    assert not any(mentions(finding.message, "rules.nonfinite.blind") for finding in report.findings)


class PutBack(nn.Module):
    """Numbers that are not finite, put back before `attend`, a reader of vectors, and `then` behind it."""

    def __init__(self, first, attend, then):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.first, self.then = nn.Linear(WIDTH, WIDTH), Block(attend), first, then

    def forward(self, x, hidden):
        return self.then(self.block(self.first(self, x), hidden))


def missing_as_token(model, x):
    return torch.where(x.isnan().any(-1, keepdim=True), 0.5, model.embed(x))


def ratio(model, x):
    y = (x.abs() * 1000).exp()
    return (y / y.sum(-1, keepdim=True)).nan_to_num()


def kept(y):
    return y


def vectors(*, missing=False, blind=False):
    x = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(1))
    x[0, 3] = NAN if missing else x[0, 3]
    hidden = ~torch.ones(12, 12).bool().tril()
    hidden[0] |= blind
    return x, hidden


@each(
    "first, missing, attend, then, message",
    [
        (missing_as_token, True, softened, kept, blind(2)),
        (missing_as_token, True, cleaned, lambda y: (y - y) / (y - y), UNDEFINED),
        (ratio, False, softened, kept, blind(2)),
        (
            lambda model, x: x,
            False,
            cleaned,
            lambda y: (y.abs() * 1000).exp(),
            overflow("exp", "float32", "_of_unknown_size"),
        ),
        (lambda model, x: x, False, cleaned, lambda y: y.half() * 3e4 * 3e4, overflow("mul", "float16")),
        (lambda model, x: x, False, cleaned, lambda y: (y * 1e30 * 1e30) - INF, overflow("mul", "float32")),
    ],
)
def test_of_numbers_that_are_put_back_none_is_the_cause(first, missing, attend, then, message):
    report = check(PutBack(first, attend, then).eval(), vectors(missing=missing, blind=True))
    found, reached = of_nonfinite(report)
    id, values = facts(found.message)
    assert id == message[0]
    assert message[1].items() <= values.items()
    assert reached.message.id.endswith("output")


def test_an_input_that_is_put_back_beside_infinities_on_purpose_is_no_finding():
    model = PutBack(missing_as_token, cleaned, lambda y: y.masked_fill(y > 0, INF))
    assert of_nonfinite(check(model.eval(), vectors(missing=True, blind=True))) == []


def test_an_infinite_weight_is_the_cause_of_the_nan_that_it_leads_to():
    model = PutBack(lambda model, x: (y := model.embed(x)) - y, softened, kept).eval()
    model.embed.weight.data[0, 0] = INF
    held = "rules.nonfinite.held", {"what": ("rules.nonfinite.parameter", {"name": "embed.weight"})}
    assert facts(of_nonfinite(check(model, vectors()))[0].message) == held


def test_rows_set_to_zero_that_a_norm_divides_are_named_at_the_norm():
    """The rows without a key are NaN in the end, of a later division: the fix is there."""
    attend = put_back(lambda y: y / y.norm(dim=-1, keepdim=True))
    first, _ = of_nonfinite(check(Reader(attend), inputs(padding=3)))
    assert facts(first.message) == UNDEFINED


def test_a_weight_behind_rows_that_are_set_to_zero_is_the_cause():
    model = Reader(put_back(lambda y: y))
    model.head.weight.data[7, 0] = NAN
    first, _ = of_nonfinite(check(model, inputs(padding=3)))
    assert facts(first.message)[1] == {"what": ("rules.nonfinite.parameter", {"name": "head.weight"})}
    assert len(of_nonfinite(check(model, inputs(padding=3)))) == 2


def test_rows_without_a_key_are_the_cause_where_only_a_copy_is_set_to_zero():
    def attend(q, k, v, hidden):
        logits = (q @ k.mT / math.sqrt(WIDTH // HEADS)).masked_fill(hidden, -INF)
        weights = logits.softmax(-1)
        weights.nan_to_num(0.0).amax()  # for a plot
        return weights @ v

    first, _ = of_nonfinite(check(Reader(attend), inputs(padding=3)))
    assert facts(first.message) == blind(3)
