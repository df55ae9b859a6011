"""Models whose numbers stop being finite: where that begins, why, and what it reaches."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sqrtdk import check
from sqrtdk.audit.records import has_nonfinite
from sqrtdk.report.check.headline import headline
from sqrtdk.report.terminal import to_text
from sqrtdk.tracing.tape.nonfinite import find_origin
from tests.attentions.each import each

NAN, INF = math.nan, math.inf
HEADS, WIDTH = 4, 32


def softened(q, k, v, hidden):
    return (q @ k.mT / math.sqrt(WIDTH // HEADS)).masked_fill(hidden, -INF).softmax(-1) @ v


def written_out(q, k, v, hidden):
    logits = (q @ k.mT / math.sqrt(WIDTH // HEADS)).masked_fill(hidden, -INF)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def cleaned(q, k, v, hidden):
    return (q @ k.mT / math.sqrt(WIDTH // HEADS)).masked_fill(hidden, -INF).softmax(-1).nan_to_num(0.0) @ v


def fused(q, k, v, hidden):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)


def multiplied(q, k, v, hidden):
    """Zero times infinity: every key that is not hidden gets a NaN."""
    return (q @ k.mT / math.sqrt(WIDTH // HEADS) + hidden.to(q.dtype) * -INF).softmax(-1) @ v


class Block(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.attend = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), attend

    def forward(self, x, hidden):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(self.attend(q, k, v, hidden).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


class Reader(nn.Module):
    """Ids and a padding mask in, a prediction for each token out."""

    def __init__(self, attend=softened, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(layers))
        self.register_buffer("gain", torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 50)
        self.eval()

    def forward(self, ids, attention_mask):
        hidden = ~attention_mask.bool()[:, None, None, :] | ~torch.ones(ids.shape[1], ids.shape[1]).bool().tril()
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, hidden)
        return {"logits": self.head(x * self.gain)}


def inputs(padding=0):
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :padding] = 0
    return {"ids": torch.arange(24).view(2, 12), "attention_mask": mask}


def of_nonfinite(report):
    return [finding for finding in report.findings if finding.rule == "nonfinite"]


@each(
    "weight, place, reached",
    [
        ("embedding.weight", 5 * WIDTH, 3),
        ("blocks.0.norm.bias", 3, 3),
        ("blocks.1.qkv.weight", 0, 2),
        ("blocks.1.qkv.bias", 2 * WIDTH, 2),  # of v: the logits stay finite
        ("blocks.2.down.weight", 1, 0),
        ("head.weight", 7, 0),
    ],
)
@each("value", [NAN, INF, -INF])
def test_a_sick_weight_is_where_it_begins(weight, place, reached, value):
    model = Reader()
    model.get_parameter(weight).data.view(-1)[place] = value
    report = check(model, inputs())
    first, second = of_nonfinite(report)
    assert (first.severity, first.site, first.message) == (
        "critical", weight.rpartition(".")[0], f"parameter {weight} holds NaN or infinity",
    )  # fmt: skip
    assert [has_nonfinite(judged.call) for judged in report.calls] == [i >= 3 - reached for i in range(3)]
    assert second.value == reached
    assert second.message.endswith("the model's output")
    assert headline(report).en.startswith(f"Not finite from {first.site} on: parameter {weight} holds")
    assert "textbook" not in headline(report).en
    assert report.exit_code == 1


def test_of_several_sick_weights_the_one_that_runs_first_is_named():
    model = Reader()
    model.blocks[0].down.weight.data[0, 0] = NAN
    model.blocks[0].up.weight.data[0, 0] = NAN  # runs before, and stands before in no list but this run's
    model.blocks[0].out.weight.data[0, 0] = NAN
    first, _ = of_nonfinite(check(model, inputs()))
    assert first.message == "3 parameters hold NaN or infinity, first blocks.0.out.weight"


@each("attend", [softened, written_out])
def test_rows_without_a_key_are_critical_where_they_become_nan(attend):
    report = check(Reader(attend), inputs(padding=3))
    first, second = of_nonfinite(report)
    assert (first.severity, first.site, first.value) == ("critical", "blocks.0", 3 * HEADS)
    assert first.message == f"{3 * HEADS} of {2 * 12 * HEADS} rows see no key, and become NaN"
    assert second.message == "NaN or infinity reaches 3 of 3 attentions (blocks.0-2) and the model's output"
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
    assert first.message == "div of finite numbers gives NaN"
    assert "0 / 0" in first.fix
    assert (first.severity, first.site, second.fix[:21]) == ("critical", "blocks.0", "fix the cause named a")
    assert not any("become NaN" in finding.message for finding in report.findings)


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


BLIND = f"{2 * HEADS} of {2 * 12 * HEADS} rows see no key, and become NaN"


@each(
    "first, missing, attend, then, message",
    [
        (missing_as_token, True, softened, kept, BLIND),
        (missing_as_token, True, cleaned, lambda y: (y - y) / (y - y), "div of finite numbers gives NaN"),
        (ratio, False, softened, kept, BLIND),
        (lambda model, x: x, False, cleaned, lambda y: (y.abs() * 1000).exp(), "exp overflows float32"),
        (lambda model, x: x, False, cleaned, lambda y: y.half() * 3e4 * 3e4, "mul overflows float16"),
        (lambda model, x: x, False, cleaned, lambda y: (y * 1e30 * 1e30) - INF, "mul overflows float32"),
    ],
)
def test_of_numbers_that_are_put_back_none_is_the_cause(first, missing, attend, then, message):
    report = check(PutBack(first, attend, then).eval(), vectors(missing=missing, blind=True))
    found, reached = of_nonfinite(report)
    assert found.message.startswith(message)
    assert reached.message.endswith("the model's output")


def test_an_input_that_is_put_back_beside_infinities_on_purpose_is_no_finding():
    model = PutBack(missing_as_token, cleaned, lambda y: y.masked_fill(y > 0, INF))
    assert of_nonfinite(check(model.eval(), vectors(missing=True, blind=True))) == []


def test_an_infinite_weight_is_the_cause_of_the_nan_that_it_leads_to():
    model = PutBack(lambda model, x: (y := model.embed(x)) - y, softened, kept).eval()
    model.embed.weight.data[0, 0] = INF
    assert of_nonfinite(check(model, vectors()))[0].message == "parameter embed.weight holds NaN or infinity"


def test_rows_set_to_zero_that_a_norm_divides_are_named_at_the_norm():
    """The rows without a key are NaN in the end, of a later division: the fix is there."""
    attend = put_back(lambda y: y / y.norm(dim=-1, keepdim=True))
    first, _ = of_nonfinite(check(Reader(attend), inputs(padding=3)))
    assert first.message == "div of finite numbers gives NaN"


def test_a_weight_behind_rows_that_are_set_to_zero_is_the_cause():
    model = Reader(put_back(lambda y: y))
    model.head.weight.data[7, 0] = NAN
    first, _ = of_nonfinite(check(model, inputs(padding=3)))
    assert first.message == "parameter head.weight holds NaN or infinity"
    assert len(of_nonfinite(check(model, inputs(padding=3)))) == 2


def test_rows_without_a_key_are_the_cause_where_only_a_copy_is_set_to_zero():
    def attend(q, k, v, hidden):
        logits = (q @ k.mT / math.sqrt(WIDTH // HEADS)).masked_fill(hidden, -INF)
        weights = logits.softmax(-1)
        weights.nan_to_num(0.0).amax()  # for a plot
        return weights @ v

    first, _ = of_nonfinite(check(Reader(attend), inputs(padding=3)))
    assert first.message == f"{3 * HEADS} of {2 * 12 * HEADS} rows see no key, and become NaN"


def test_another_product_in_a_model_with_rows_without_a_key_is_named_itself():
    first, _ = of_nonfinite(check(Reader(multiplied), inputs(padding=3)))
    assert first.message == "mul of infinite numbers gives NaN: inf - inf, or 0 * inf"


def test_a_product_that_overflows_float16_is_named_with_its_size():
    def unscaled_first(q, k, v, hidden):
        return ((q @ k.mT) * 8**-0.5).masked_fill(hidden, -INF).softmax(-1) @ v

    model = Reader(unscaled_first).half()
    model.blocks[1].qkv.weight.data[: 2 * WIDTH] *= 200
    projected = []
    handle = model.blocks[1].qkv.register_forward_hook(lambda module, args, output: projected.append(output.double()))
    with torch.no_grad():
        model(**inputs())
    handle.remove()
    q, k, _ = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projected[0].chunk(3, -1))
    size = float((q @ k.mT).abs().amax())
    first, _ = of_nonfinite(check(model, inputs()))
    assert size > 65504
    assert (first.site, first.threshold) == ("blocks.1", 65504.0)
    assert first.value == pytest.approx(size, rel=1e-6)
    assert first.message == f"q . k overflows float16: it reaches {first.value:.4g}, the largest is 65504"
    assert "test_audit_nonfinite.py:" in first.at


def test_another_step_that_overflows_float16_is_named_where_it_is():
    model = Reader().half()
    model.blocks[0].up.weight.data *= 300
    model.blocks[0].down.weight.data *= 3000
    first, second = of_nonfinite(check(model, inputs()))
    assert first.site == "blocks.0.down"
    assert first.message.startswith("addmm overflows float16: it reaches ")
    assert second.message.startswith("NaN or infinity reaches 2 of 3 attentions (blocks.1-2)")


def test_a_buffer_an_input_and_arithmetic_on_infinities():
    model = Reader()
    model.gain[2] = NAN
    assert of_nonfinite(check(model, inputs()))[0].message == "buffer gain holds NaN or infinity"
    first, _ = of_nonfinite(check(Reader(multiplied), inputs()))
    assert first.message == "mul of infinite numbers gives NaN: inf - inf, or 0 * inf"
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    x = torch.randn(1, 5, 16)
    x[0, 2] = NAN
    assert of_nonfinite(check(layer, x))[0].message == "input 0 holds NaN or infinity"


class Distances(nn.Module):
    """An attention, and distances between its tokens as `far` writes those that are beyond reach."""

    def __init__(self, far):
        super().__init__()
        self.attend, self.far = nn.TransformerEncoderLayer(16, 2, batch_first=True), far
        self.register_buffer("endless", torch.tensor(INF))

    def forward(self, x):
        y = self.attend(x)
        return {"hidden": y, "distances": self.far(self, torch.cdist(y, y), torch.ones(5, 5).triu(1).bool())}


@each(
    "far",
    [
        lambda model, y, hidden: y.masked_fill(hidden, INF),
        lambda model, y, hidden: torch.where(hidden, torch.full_like(y, INF), y),
        lambda model, y, hidden: torch.where(hidden, torch.tensor(INF), y),
        lambda model, y, hidden: torch.where(hidden, model.endless, y),
        lambda model, y, hidden: -(~hidden).to(y.dtype).log(),
    ],
)
def test_an_output_that_is_infinite_on_purpose_is_no_finding(far):
    report = check(Distances(far).eval(), torch.randn(2, 5, 16))
    assert of_nonfinite(report) == []
    assert report.exit_code == 0


@each(
    "far",
    [
        lambda model, y, hidden: (y * 1e30) * 1e30,
        lambda model, y, hidden: y.masked_fill(hidden, INF) - y.masked_fill(hidden, INF),
        lambda model, y, hidden: y.masked_fill(hidden, NAN),
    ],
)
def test_an_output_that_overflows_or_is_nan_stays_critical(far):
    report = check(Distances(far).eval(), torch.randn(2, 5, 16))
    assert {finding.severity for finding in of_nonfinite(report)} == {"critical"}
    assert report.exit_code == 1


class OldCache:
    """A cache as older releases of transformers keep it: a list of keys and one of values."""

    def __init__(self):
        self.key_cache, self.value_cache = [], []

    def update(self, keys, values, layer):
        self.key_cache.append(keys)
        self.value_cache.append(values)


class Cached(nn.Module):
    """An attention, and a cache of keys and values of which `sick` is not finite."""

    def __init__(self, make, sick):
        super().__init__()
        self.attend, self.make, self.sick = nn.TransformerEncoderLayer(16, 2, batch_first=True), make, sick

    def forward(self, x):
        y, cache = self.attend(x), self.make()
        kept = {"keys": y[:, None].clone(), "values": y[:, None].clone()}
        if self.sick is not None:
            kept[self.sick][0, 0, 1, 2] = (y.sum() - y.sum()) / 0
        cache.update(kept["keys"], kept["values"], 0)
        return {"hidden": y, "past_key_values": cache}


@each("make", [OldCache, "DynamicCache"])
@each("sick", [None, "keys", "values"])
def test_a_cache_that_is_returned_is_looked_at(make, sick):
    if make == "DynamicCache":
        make = pytest.importorskip("transformers").DynamicCache
    found = of_nonfinite(check(Cached(make, sick).eval(), torch.randn(1, 5, 16)))
    assert [one.severity for one in found] == ([] if sick is None else ["critical"] * 2)
    if sick is not None:
        assert found[1].message == "NaN or infinity reaches the model's output"


class Once(nn.Module):
    """A NaN in its first attention; from the second run on it raises `error`, before or after that attention."""

    def __init__(self, error, late):
        super().__init__()
        self.attend, self.error, self.late, self.runs = Reader(), error, late, 0
        self.attend.gain[0] = NAN

    def forward(self, ids, attention_mask):
        self.runs += 1
        if self.runs > 1 and not self.late:
            raise self.error
        output = self.attend(ids, attention_mask)
        if self.runs > 1:
            raise self.error
        return output


@each("error", [RuntimeError("only once"), ValueError("only once"), SystemExit(3)])
def test_a_model_whose_second_run_raises_is_reported_without_an_origin(error):
    report = check(Once(error, late=False), inputs())
    (finding,) = of_nonfinite(report)
    assert (finding.severity, finding.message) == ("critical", "NaN or infinity reaches the model's output")
    (missed,) = [one for one in report.not_measured if one.reason.startswith("nonfinite")]
    assert missed.reason.startswith(f"nonfinite: where it begins was not searched: Once raised {type(error).__name__}")
    assert report.exit_code == 1


def test_a_model_that_raises_after_its_first_nan_still_has_an_origin():
    report = check(Once(RuntimeError("only once"), late=True), inputs())
    assert of_nonfinite(report)[0].message == "buffer attend.gain holds NaN or infinity"
    assert not [one for one in report.not_measured if one.reason.startswith("nonfinite")]


def test_a_sick_layer_is_never_in_the_row_of_another():
    model = Reader(layers=5)
    model.blocks[2].qkv.weight.data[0, 0] = NAN
    text = to_text(check(model, inputs()), width=120)
    rows = [line.split() for line in text.splitlines() if line.startswith("blocks.")]
    assert [row[0] for row in rows] == ["blocks.0-1", "blocks.2", "blocks.3", "blocks.4"]
    assert ["critical" in row for row in rows] == [False, True, True, True]
    assert "nan" in rows[1]


def test_what_is_reached_stands_under_its_beginning():
    model = Reader()
    model.blocks[1].qkv.weight.data[0, 0] = NAN
    text = to_text(check(model, inputs()), width=120)
    assert text.index("which leads to:") < text.index("reaches 2 of 3 attentions (blocks.1-2)", text.index("Findings"))
    assert "波及" in headline(check(model, inputs())).zh
    assert "reaches" not in headline(check(model, inputs())).zh


def test_an_origin_outside_of_any_module_and_memory_that_nothing_wrote():
    def divide(x):
        cache = torch.empty_like(x).fill_(NAN)[:]  # as fresh memory may be
        cache.copy_(x)
        return (cache - cache) / (x - x)

    model = nn.Linear(2, 2)
    origin = find_origin(model, lambda: divide(torch.ones(2, 2)), {})
    assert (origin.kind, origin.op, origin.site) == ("undefined", "div", "")
    assert find_origin(model, lambda: torch.zeros(3).log().exp() + model(torch.ones(2)).sum(), {}) is None


def test_the_search_leaves_the_model_as_it_was():
    model = Reader(softened)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    enabled = torch.backends.mha.get_fastpath_enabled()
    plain = model(**inputs())["logits"]
    check(model, inputs(padding=3))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(plain, model(**inputs())["logits"])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.backends.mha.get_fastpath_enabled() == enabled
