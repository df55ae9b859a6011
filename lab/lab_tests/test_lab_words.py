"""The words of the claims: both languages say the same, and the experiments ask for what is there and nothing else."""

from __future__ import annotations

import ast
import re
from importlib.resources import files
from pathlib import Path

import pytest

from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Text
from sqrtdk_lab.register import CLAIMS
from sqrtdk_lab.words import REQUIRED_TEXTS, ClaimWords, parse_words, words_of

FOLDER = Path(str(files("sqrtdk_lab.claims")))
NAMES = [name.replace("-", "_") for name in CLAIMS]
WHOLE = "".join(f'{key} = {{en = "It is {{peak}}.", zh = "它是 {{peak}}。"}}\n' for key in REQUIRED_TEXTS)
PLACEHOLDER = re.compile(r"{(\w+)}")
SPREAD = "None"  # the name that ast gives to **values
CJK = re.compile(r"[\u3000-\u9fff\uff00-\uffef]")


def _placeholders(text: str) -> set[str]:
    return set(PLACEHOLDER.findall(text.replace("{{", "").replace("}}", "")))


def _asked(name: str) -> list[tuple[str, set[str]]]:
    """Keys, as patterns where they are put together, and placeholders of all calls of a module's WORDS."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "WORDS"]
    return [(key, {str(one.arg) for one in call.keywords}) for call in calls for key in _keys(call.args[0])]


def _keys(node: ast.expr) -> list[str]:
    match node:
        case ast.Constant(value):
            return [re.escape(str(value))]
        case ast.JoinedStr(parts):
            return ["".join(re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".+" for p in parts)]
        case ast.BinOp(ast.Constant(start), ast.Add(), _):
            return [re.escape(str(start)) + ".+"]
        case ast.IfExp(_, one, other):
            return [*_keys(one), *_keys(other)]
    raise AssertionError(f"a key that this test cannot read: {ast.unparse(node)}")


def test_every_claim_has_its_words_and_all_words_have_a_claim() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.toml")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_words_of_an_experiment_are_in_both_languages_and_all_asked_for(name: str) -> None:
    """Prose stands in the words alone."""
    texts, asked = words_of(f"sqrtdk_lab.claims.{name}").texts, _asked(name)
    assert [pattern for pattern, _ in asked if not any(re.fullmatch(pattern, key) for key in texts)] == []
    for key, text in texts.items():
        placeholders = _placeholders(text.en)
        assert placeholders == _placeholders(text.zh), key
        assert CJK.search(text.zh), key
        assert not CJK.search(text.en), key
        written = [values for pattern, values in asked if pattern == re.escape(key)]
        calls = written or [values for pattern, values in asked if re.fullmatch(pattern, key)]
        assert calls, key
        for values in calls:  # a mapping that is spread gives values that only the run of the claim can compare
            assert values - {SPREAD} <= placeholders if SPREAD in values else values == placeholders, key
    assert not re.search(r"[\u4e00-\u9fff]", (FOLDER / f"{name}.py").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = [", "it is no TOML"),
        (WHOLE.partition("\n")[2], "the text 'statement' is missing"),
        (WHOLE + '[plot.a]\nen = "one"\n', "plot.a: it has no text in zh"),
        (WHOLE + '[plot.a]\nen = "one"\nzh = " "\n', "plot.a: it has no text in zh"),
        (WHOLE + '[plot.a]\nen = "one"\nzh = "一"\nde = "eins"\n', "plot.a: it has 'de' beside en and zh"),
        (WHOLE + 'plot = "one"\n', "plot: a table with en and zh was expected; got 'one'"),
        (WHOLE + '[a]\nen = "{x} {y}"\nzh = "{x}"\n', "a: en has the placeholders 'x', 'y', zh 'x'"),
        (
            WHOLE + '[a]\nen = "{x:.3f}"\nzh = "{x}"\n',
            "a: en: a placeholder is a name in braces and nothing else; got {x:.3f}",
        ),
        (
            WHOLE + '[a]\nen = "{x.y}"\nzh = "{x}"\n',
            "a: en: a placeholder is a name in braces and nothing else; got {x.y}",
        ),
        (WHOLE + '[a]\nen = "{}"\nzh = "{}"\n', "a: en: a placeholder is a name in braces"),
        (WHOLE + '[a]\nen = "{x"\nzh = "{x}"\n', "a: en: expected '}' before end of string"),
    ],
)
def test_words_that_are_not_whole_are_one_error_that_says_what_is_wrong(content: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=r"the words of the claim in x\.toml are not whole") as raised:
        parse_words(content, "x.toml")
    assert message in str(raised.value)


def test_all_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(
        InvalidValueError, match=r"'why' is missing; b: it has no text in en; c.d: it has no text in zh"
    ):
        parse_words(WHOLE.replace("why", "a") + '[b]\nzh = "二"\n[c.d]\nen = "x"\n', "x.toml")


def test_words_without_a_file_are_an_error() -> None:
    with pytest.raises(InvalidValueError, match=r"no_such_claim\.toml are not whole: it cannot be read"):
        words_of("sqrtdk_lab.claims.no_such_claim")


def test_a_text_takes_the_values_that_it_asks_for() -> None:
    words = parse_words(WHOLE, "x.toml")
    assert words("why", peak=Text("high", "高")) == Text("It is high.", "它是高。")
    with pytest.raises(InvalidValueError, match="why has the placeholders 'peak', and got 'other', 'peak'"):
        words("why", peak=1, other=2)
    with pytest.raises(InvalidValueError, match=r"why has the placeholders 'peak', and got \(none\)"):
        words("why")
    with pytest.raises(InvalidValueError, match="there is no text 'plot' among statement, method, control, why"):
        words("plot")


def test_what_is_filled_in_is_not_read_again() -> None:
    words = ClaimWords("x", {"a": Text("{{x}} {y}", "{{x}} {y} 字")})
    assert words("a", y="{z}").en == "{x} {z}"
