"""Models whose numbers stop being finite: where that begins, why, and what it reaches."""

import pytest
import torch
from torch import nn

from sqrtdk import check
from sqrtdk.audit.records import has_nonfinite
from sqrtdk.report.check.headline import headline
from sqrtdk.report.terminal import to_text
from sqrtdk.tracing.tape.nonfinite import find_origin
from tests.attentions.each import each
from tests.audit.nonfinite_models import HEADS, INF, NAN, WIDTH, Reader, inputs, multiplied, of_nonfinite, softened
from tests.support.sentences import facts

OUTPUT_REACHED = {f"rules.nonfinite.reaches.{which}output" for which in ("", "some_and_", "only_and_")}


def held(kind, name):
    """Facts of the sentence on a tensor that is not finite itself."""
    return "rules.nonfinite.held", {"what": (f"rules.nonfinite.{kind}", {"name": name})}


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
    assert (first.severity, first.site, facts(first.message)) == (
        "critical", weight.rpartition(".")[0], held("parameter", weight),
    )  # fmt: skip
    assert [has_nonfinite(judged.call) for judged in report.calls] == [i >= 3 - reached for i in range(3)]
    assert second.value == reached
    assert facts(second.message)[0] in OUTPUT_REACHED
    assert headline(report).en.startswith(f"Not finite from {first.site} on: parameter {weight} holds")
    assert "textbook" not in headline(report).en
    assert report.exit_code == 1


def test_of_several_sick_weights_the_one_that_runs_first_is_named():
    model = Reader()
    model.blocks[0].down.weight.data[0, 0] = NAN
    model.blocks[0].up.weight.data[0, 0] = NAN  # runs before, and stands before in no list but this run's
    model.blocks[0].out.weight.data[0, 0] = NAN
    first, _ = of_nonfinite(check(model, inputs()))
    assert facts(first.message) == ("rules.nonfinite.parameters", {"number": 3, "name": "blocks.0.out.weight"})


def test_another_product_in_a_model_with_rows_without_a_key_is_named_itself():
    first, _ = of_nonfinite(check(Reader(multiplied), inputs(padding=3)))
    assert facts(first.message) == ("rules.nonfinite.infinite", {"op": "mul"})


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
    assert facts(first.message) == (
        "rules.nonfinite.overflow",
        {"op": "q . k", "dtype": "float16", "value": f"{first.value:.4g}", "largest": "65504"},
    )
    assert "test_audit_nonfinite.py:" in first.at


def test_another_step_that_overflows_float16_is_named_where_it_is():
    model = Reader().half()
    model.blocks[0].up.weight.data *= 300
    model.blocks[0].down.weight.data *= 3000
    first, second = of_nonfinite(check(model, inputs()))
    assert first.site == "blocks.0.down"
    id, values = facts(first.message)
    assert (id, values["op"], values["dtype"]) == ("rules.nonfinite.overflow", "addmm", "float16")
    assert facts(second.message)[1] == {"number": 2, "total": 3, "sites": "(blocks.1-2)"}


def test_a_buffer_an_input_and_arithmetic_on_infinities():
    model = Reader()
    model.gain[2] = NAN
    assert facts(of_nonfinite(check(model, inputs()))[0].message) == held("buffer", "gain")
    first, _ = of_nonfinite(check(Reader(multiplied), inputs()))
    assert facts(first.message) == ("rules.nonfinite.infinite", {"op": "mul"})
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    x = torch.randn(1, 5, 16)
    x[0, 2] = NAN
    assert facts(of_nonfinite(check(layer, x))[0].message) == held("input", "0")


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
        assert facts(found[1].message) == ("rules.nonfinite.reaches.output", {})


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
    assert (finding.severity, facts(finding.message)) == ("critical", ("rules.nonfinite.reaches.output", {}))
    (missed,) = [one for one in report.not_measured if one.reason.startswith("nonfinite")]
    assert missed.reason.startswith(f"nonfinite: where it begins was not searched: Once raised {type(error).__name__}")
    assert report.exit_code == 1


def test_a_model_that_raises_after_its_first_nan_still_has_an_origin():
    report = check(Once(RuntimeError("only once"), late=True), inputs())
    assert facts(of_nonfinite(report)[0].message) == held("buffer", "attend.gain")
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
