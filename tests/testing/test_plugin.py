"""The pytest plugin in runs of its own: alone, under xdist, and in a suite that does not ask for it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from sqrtdk.audit import records
from sqrtdk.messages import Message
from sqrtdk.testing import below, plugin
from tests.support.program import warm

pytest_plugins = ["pytester"]

SUITE = """
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

pytestmark = pytest.mark.attention
q = 0.6 * torch.randn(1, 2, 6, 16, generator=torch.Generator().manual_seed(0))


class Layer(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scaled_by = scale

    def forward(self, q):
        return sdpa(q, q, q, scale=self.scaled_by)


@pytest.fixture
def broken():
    raise RuntimeError("of the fixture")


@pytest.mark.parametrize("scale", [0.25, 1.0])
def test_scales(scale):
    Layer(scale)(q)

@pytest.mark.attention(allow="missing")
def test_allowed():
    Layer(1.0)(q)

@pytest.mark.attention(fail_on="critical")
def test_bar_of_its_own():
    Layer(1.0)(q)

@pytest.mark.attention(fail_on="note")
def test_note():
    sdpa(q, q, q, scale=0.3)

@pytest.mark.xfail
def test_expected_to_fail():
    Layer(1.0)(q)

def test_own_failure():
    Layer(1.0)(q)
    assert False, "of the test"

def test_fixture(broken):
    pass

def test_skipped():
    pytest.skip("no")

def test_lost():
    torch.sort(sdpa(q, q, q, scale=0.3))
    sdpa(torch.sort(q)[0], q, q, scale=0.3)

def test_one_key():
    sdpa(q[:, :, :1], q[:, :, :1], q[:, :, :1], scale=0.3)

def test_nothing():
    pass
"""
LINE = re.compile(r"^sqrtdk: .*$", re.MULTILINE)
# the title, the rule with its place, the message and the tests of the first finding below it
BELOW = re.compile(r"^(below the bar, .*)\n  (.*)\n    (.*)\n    in (.*)$", re.MULTILINE)
FAILED = {
    "test_scales[1.0]": "unexplained: missing", "test_note": "note, scale_ledger",
    "test_own_failure": "of the test",
}  # fmt: skip


OWN = ("-p", plugin.__name__)


@pytest.fixture(autouse=True)
def _only_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other plugins import torch, and take their time; ours is asked for by its name, installed or not."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(test_suite=SUITE)
    return pytester


def forked(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """A run in a process of its own that has torch imported already."""
    code = "import sys, pytest; raise SystemExit(pytest.main(sys.argv[1:]))"
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = warm()(code, *OWN, "--sqrtdk", *arguments, verb="-c", cwd=pytester.path, **variables)
    return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)


@pytest.mark.parametrize("workers", [(), pytest.param(("-p", "xdist", "-n", "2"), marks=pytest.mark.full)])
def test_a_run(suite: pytest.Pytester, workers: tuple[str, ...]) -> None:
    run = forked(suite, "--strict-markers", *workers)
    text = run.stdout.str()
    run.assert_outcomes(failed=len(FAILED), passed=6, errors=1, skipped=1, xfailed=1)
    for name, why in FAILED.items():
        assert f"FAILED test_suite.py::{name}" in text
        assert why in text
    assert LINE.findall(text) == [
        "sqrtdk: 12 tests, 10 attentions, 8 findings (5 fail, 3 note), 1 not judged, "
        "3 tests that could not have failed, 2 did not run"
    ]
    assert "- found:    softmax(q.k)  (unexplained: missing)" in text
    assert "+ expected: softmax(0.25 * q.k)" in text
    (lost,) = re.findall(r"^not judged: test_suite.py::test_lost: (.*)$", text, re.MULTILINE)
    assert lost.startswith("(no module): the scale could not be judged")
    assert lost.endswith(" (fails with --sqrtdk-fail-on unmeasured)")
    assert BELOW.findall(text) == [
        (
            'below the bar, fail; fails with @pytest.mark.attention(fail_on="fail"):',
            "scale_ledger  Layer  test_suite.py:15",
            "scale 1 instead of 1/sqrt(16) = 0.25, 4 times too large: missing, no 1/sqrt(head_dim) was applied",
            "test_suite.py::test_bar_of_its_own",
        ),
        (
            "below the bar, note; fails with --sqrtdk-fail-on note:",
            "scale_ledger  (no module)  test_suite.py:54",
            "scale 0.3 instead of 1/sqrt(16) = 0.25, 1.2 times too large: nothing declares or explains it; "
            "it ran outside any module, where nothing could declare it",
            "test_suite.py::test_lost",
        ),
    ]
    weak = re.findall(r"^could not have failed: (.*)$", text, re.MULTILINE)
    assert weak == ["3 tests; --sqrtdk-weak says which, and why"]
    assert "of the fixture" in text
    assert "INTERNALERROR" not in text


def test_tests_that_could_not_have_failed_are_named_on_request(suite: pytest.Pytester) -> None:
    text = forked(suite, "--sqrtdk-weak").stdout.str()
    weak = re.findall(r"^could not have failed: test_suite.py::(\S+): (.{7})", text, re.MULTILINE)
    assert sorted(weak) == [("test_nothing", "no atte"), ("test_one_key", "one key"), ("test_scales[0.25]", "scale 0")]
    assert "--sqrtdk-weak says" not in text


def test_a_suite_that_does_not_ask_is_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys
        import pytest

        @pytest.mark.attention
        def test_nothing_is_loaded(pytestconfig):
            assert {"torch", "numpy", "sqrtdk.audit", "sqrtdk.errors"}.isdisjoint(sys.modules)
            assert "sqrtdk.testing.plugin" in sys.modules
            assert not pytestconfig.pluginmanager.has_plugin("sqrtdk-audit")
        """
    )
    run = pytester.runpytest_subprocess(*OWN, "--strict-markers")
    run.assert_outcomes(passed=1)
    assert not LINE.findall(run.stdout.str())
    asked = pytester.runpytest_subprocess(*OWN, "--sqrtdk", "--sqrtdk-fail-on", "sometimes")
    assert asked.ret == pytest.ExitCode.USAGE_ERROR
    asked.stderr.fnmatch_lines(["*invalid choice: 'sometimes'*"])


@pytest.mark.parametrize("workers", [(), pytest.param(("-p", "xdist", "-n", "2"), marks=pytest.mark.full)])
def test_a_wrong_marker_is_an_error_of_collection(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("x", range(3))
        @pytest.mark.attention(allow=("missing", "Block", "block.*", "mising"))
        def test_kind(x): ...

        @pytest.mark.attention(fail_on="sometimes")
        def test_bar(): ...

        @pytest.mark.attention(alow="missing")
        def test_name(): ...

        @pytest.mark.laws(names="gravity")
        def test_law(): ...

        @pytest.mark.laws("causal", "padding")
        def test_laws(): ...
        """
    )
    run = forked(pytester, *workers)
    run.assert_outcomes(errors=1)
    text = run.stdout.str()
    for told in (
        "test_kind[0] and 2 more: marker attention: allow names 'mising', which is no kind of verdict; did you mean "
        "'missing'?",
        "test_bar: marker attention: fail_on is 'sometimes'\n  Use one of: note",
        "test_name: marker attention got alow; did you mean 'allow'?\n  It takes allow=..., fail_on=... alone.",
        "test_law: marker laws: there is no law 'gravity'",
        "test_laws: marker laws got 'padding'\n  It takes names=..., allow=..., fail_on=... alone.",
    ):
        assert told in text
    assert "During handling of" not in text


def test_unmeasured_fails_where_it_is_asked_for(suite: pytest.Pytester) -> None:
    run = forked(suite, "--sqrtdk-fail-on", "unmeasured", "-k", "lost or one_key")
    run.assert_outcomes(passed=1, failed=1, deselected=10)
    assert "the scale could not be judged" in run.stdout.str()


def test_findings_below_the_bar_are_one_short_list() -> None:
    messages = [Message("joins.brackets", first="a logit", second=f"{10 * layer}") for layer in range(4)]
    found = [
        records.Finding("max_logit", "warn", f"h.{layer}", None, None, message, "a fix", "a source")
        for layer, message in enumerate(messages)
    ]
    (entry,) = below.below_bar(found, (), found[:1], ("h.3",), None)
    assert entry == ["warn", "--sqrtdk-fail-on warn", "max_logit  h.1-2 (2 sites)", "a logit (10) (the first of them)"]
    tests = [f"test_{number}" for number in range(14)]
    folded = below.below_lines((test, entry) for test in tests)
    assert folded[-1] == "    in test_0, test_1, test_2 and 11 more"
    apart = below.below_lines((test, ["note", "--o", test, ""]) for test in tests)
    assert apart.count("below the bar, note; fails with --o:") == 1
    assert apart[-1] == f"below the bar: ... and {14 - below.MOST_LISTED} more"


def test_its_words_are_those_of_the_audit() -> None:
    assert plugin.FAIL_ON_CHOICES == records.FAIL_ON
    assert list(reversed(plugin.WORST_FIRST)) == list(records.SEVERITIES)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"sqrtdk": plugin.__name__}


LAWS = """
import pytest
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, is_causal):
        super().__init__()
        torch.manual_seed(0)
        self.is_causal, self.runs_causally = True, is_causal
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.runs_causally)


@pytest.mark.laws
@pytest.mark.parametrize("is_causal", [True, False])
def test_layer(is_causal):
    state = torch.get_rng_state()
    Layer(is_causal)(x=torch.ones(1, 2, 16).cumsum(1).expand(2, -1, -1).repeat(1, 4, 1) / 3)

@pytest.mark.laws("causal", allow="law_causal")
@pytest.mark.attention(allow=("mask_audit", "law_causal"))
def test_allowed():
    Layer(False)(torch.linspace(-1, 1, 2 * 8 * 16).view(2, 8, 16))

@pytest.mark.laws
def test_nothing():
    nn.Linear(3, 3)(torch.ones(2, 3))

@pytest.mark.laws("causal", fail_on="never")
def test_bar():
    Layer(False)(torch.linspace(-1, 1, 2 * 8 * 16).view(2, 8, 16))

def test_unmarked():
    Layer(False)(torch.ones(2, 8, 16))
"""


def test_laws_are_asked_of_the_models_that_a_marked_test_calls(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_laws=LAWS)
    run = forked(pytester, "--strict-markers")
    text = run.stdout.str()
    run.assert_outcomes(failed=1, passed=5)
    assert "laws of Layer in test_layer[False] (fail_on: fail)" in text
    assert "critical, law_causal" in text
    assert "no law asked: test_laws.py::test_nothing: Linear: " in text
    (line,) = re.findall(r"^sqrtdk laws: .*$", text, re.MULTILINE)
    assert re.fullmatch(r"sqrtdk laws: 5 tests, \d+ answers kept, 3 broken, \d+ not asked", line)
    ((title, place, _, tests),) = BELOW.findall(text)
    assert title == 'below the bar, critical; fails with @pytest.mark.laws(fail_on="critical"):'
    assert (place.split()[0], tests) == ("law_causal", "test_laws.py::test_bar")
    assert "sqrtdk: 1 test, 1 attention" in text  # the runs of laws are not among them
    assert "INTERNALERROR" not in text
