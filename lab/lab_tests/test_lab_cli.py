"""`sqrtdk lab list, show, run, report`: what is printed and written, exit codes and errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sqrtdk.messages import word as word_of
from sqrtdk_lab.claim import EXPLANATION_IDS
from sqrtdk_lab.register import CLAIMS
from tests.cli.test_cli_chinese import english
from tests.report.terminal_text import check_fits
from tests.support.program import called

LANG = {"en": "en", "zh": "zh-CN"}  # of --lang, by the language of a text
CHEAP = ["onehot-64", "softmax-example", "var-linear"]


def _lab(*arguments: object) -> subprocess.CompletedProcess[str]:
    return called("lab", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quick records of a few claims."""
    folder = tmp_path_factory.mktemp("lab")
    done = _lab("run", *CHEAP, "--quick", "--output", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_list_has_every_claim_and_what_the_explanations_are_called(language: str) -> None:
    text = _lab("list", "--lang", LANG[language]).stdout
    last = text.splitlines()[-len(EXPLANATION_IDS) :]
    assert last == [f"  {source} {word_of(f'lab.explanation.{source}.name', language)}" for source in EXPLANATION_IDS]
    for claim in CLAIMS.values():
        assert re.search(rf"^ +{claim.id} ", text, re.MULTILINE)
        statement = getattr(claim.statement, language)
        assert "".join(statement.split()) in "".join(text.split())  # wrapped in its column


@pytest.mark.parametrize("language", ["en", "zh"])
def test_show_spells_its_sources_out(language: str) -> None:
    name = {"en": "from the footnote to training", "zh": "从脚注到训练"}[language]
    comma = {"en": ", ", "zh": "、"}[language]
    first = _lab("show", "paper-footnote", "--lang", LANG[language]).stdout.splitlines()[0]
    assert first == f"paper-footnote  S1 {name}{comma}arXiv:1706.03762"


def test_the_list_as_json() -> None:
    claims = json.loads(_lab("list", "--json").stdout)["claims"]
    assert [claim["id"] for claim in claims] == list(CLAIMS)
    assert all(claim["statement"]["zh"] for claim in claims)
    parts = [part for claim in claims for part in claim["parts"]]
    assert all((part["reason"] is None) == bool(part["bars"]) for part in parts)  # what has no bar says why


def test_show_says_why_a_part_is_not_measurable() -> None:
    text = " ".join(_lab("show", "heads-claims").stdout.split())
    part = CLAIMS["heads-claims"].parts[0]
    assert part.reason is not None
    assert f"Not measurable {part.text.en} ({part.reason.en.rstrip('.')})" in text
    assert "True if some heads" not in text


def test_show_tells_how_a_claim_is_measured() -> None:
    text = " ".join(_lab("show", "var-linear").stdout.split())
    claim = CLAIMS["var-linear"]
    for wanted in (
        claim.statement.en,
        claim.method.en,
        claim.control.en,
        "0.95 <= variance_over_d_k <= 1.05",
        "--quick",
    ):
        assert wanted in text
    assert json.loads(_lab("show", "var-linear", "--json").stdout)["flipped"] == dict(claim.flipped)


def test_show_has_the_formula_as_text_and_json_as_latex() -> None:
    text = _lab("show", "paper-table3").stdout
    assert "Attention(Q, K, V) = softmax((Q K^T)/sqrt(d_k)) V" in text
    assert "\\" not in text
    assert json.loads(_lab("show", "paper-table3", "--json").stdout)["formula"] == CLAIMS["paper-table3"].formula


def test_a_run_prints_verdicts_and_writes_records_and_plots(folder: Path) -> None:
    again = _lab("run", *CHEAP, "--quick", "--output", folder)
    lines = again.stdout.splitlines()
    assert [line for line in lines if line.endswith("  kept")] == [
        "onehot-64  holds  kept",
        "softmax-example  fails  kept",
        "var-linear  holds  kept",
    ]
    assert lines[-1].split() == ["Report", str(folder / "report.html")]
    for name in CHEAP:
        record = json.loads((folder / f"{name}.json").read_text())
        assert record["quick"] is True
        for plot in record["plots"]:
            assert (folder / f"{name}-{plot['name']}.svg").read_text().lstrip().startswith("<?xml")
            assert (folder / f"{name}-{plot['name']}.png").read_bytes().startswith(b"\x89PNG")
    assert list(folder.glob("var-linear-*.svg"))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_run_says_what_came_out(folder: Path, language: str) -> None:
    """The statement, the figure with its interval and its bar, why, and the files."""
    said = " ".join(_lab("run", "var-linear", "--quick", "--output", folder, "--lang", LANG[language]).stdout.split())
    record = json.loads((folder / "var-linear.json").read_text())
    figures = [
        check["figure"] for part in record["outcome"]["verdict"]["findings"] for check in part["checks"] if check["met"]
    ]
    name = {"en": "{name} at d_k = {d_k}: ", "zh": "{name}，d_k = {d_k}："}[language]
    bar = {"en": "; bar 0.95 to 1.05", "zh": "；判据 0.95 至 1.05"}[language]
    wanted = [
        f"{name.format(name=one['name'], d_k=one['at']['d_k'])}{one['value']:.4g} [{one['low']:.4g}, {one['high']:.4g}]"
        for one in figures
        if one["name"] == "variance_over_d_k"
    ]
    assert sum(f"{one}{bar}" in said for one in wanted) == 1
    assert "".join(record["statement"][language].split()) in "".join(said.split())
    first = {"en": "terms q_i k_i. ", "zh": "。"}[language]
    assert "".join(record["why"][language].partition(first)[0].split()) in "".join(said.split())
    assert str(folder / "var-linear-variance.png") in said


@pytest.mark.sampled(1)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_of_the_lab_shows_what_a_run_prints(
    language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / language / "lab.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```console\n\$ sqrtdk (lab run .*?)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    done = called(*shown[0].split(), COLUMNS="100")
    seconds = re.compile(r"[\d.]+ (?:s|秒)$", re.MULTILINE)
    assert seconds.sub("", done.stdout) == seconds.sub("", shown[1])


def test_of_many_claims_each_has_two_lines(tmp_path: Path) -> None:
    many = ["onehot-64", "softmax-example", "derivative-floor", "params-multi"]
    done = called("lab", "run", *many, "--quick", "--output", tmp_path, COLUMNS="80")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[: 2 * len(many) : 2]] == many
    assert [line.strip().split(":")[0] for line in lines[1 : 2 * len(many) : 2]][1] == "sum_of_printed"
    assert all(re.search(r": .*; bar ", line) for line in lines[1 : 2 * len(many) : 2])
    check_fits(done.stdout, 80)


def test_plots_that_a_kill_prevented_are_drawn_by_the_next_run(folder: Path) -> None:
    path = next(folder.glob("var-linear-*.svg"))
    before = path.read_bytes()
    path.unlink()
    assert _lab("run", "var-linear", "--quick", "--output", folder).returncode == 0
    assert path.read_bytes() == before


def test_one_json_document_on_stdout(folder: Path) -> None:
    done = _lab("run", *CHEAP, "--quick", "--output", folder, "--json")
    document = json.loads(done.stdout)
    claims = document["claims"]
    assert [claim["id"] for claim in claims] == CHEAP
    assert all(claim["sound"] and claim["reused"] and Path(claim["record"]).is_file() for claim in claims)
    assert claims[-1]["plots"]
    assert all(Path(plot).is_file() for claim in claims for plot in claim["plots"])
    assert [[check["met"] for check in claim["decided_by"]] for claim in claims] == [[True], [False], [True]]
    assert all(claim["why"] for claim in claims)
    assert Path(document["report"]).read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_page_of_a_run_has_every_record_of_its_directory_and_is_replaced(folder: Path) -> None:
    page = folder / "report.html"
    page.write_text("old")
    assert _lab("run", "onehot-64", "--quick", "--output", folder).returncode == 0
    assert all(f'id="{name}"' in page.read_text(encoding="utf-8") for name in CHEAP)


def test_records_go_to_a_directory_of_their_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _lab("run", "onehot-64", "--quick", "--seed", "3").returncode == 0
    assert (tmp_path / "sqrtdk-lab" / "quick-seed3" / "onehot-64.json").is_file()


def test_the_report_is_one_page_and_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert _lab("report", folder, "--output", page).returncode == 0
    text = page.read_text(encoding="utf-8")
    assert all(f'id="{name}"' in text for name in CHEAP)
    again = _lab("report", folder, "--output", page)
    assert again.returncode == 2
    assert "exists and is not overwritten" in again.stderr
    assert _lab("report", folder, "--output", page, "--force").returncode == 0


def test_another_schema_version_is_an_error(folder: Path, tmp_path: Path) -> None:
    record = json.loads((folder / "onehot-64.json").read_text())
    (tmp_path / "onehot-64.json").write_text(json.dumps(record | {"schema_version": 0}))
    for arguments in (("report", tmp_path), ("run", "onehot-64", "--quick", "--output", tmp_path)):
        done = _lab(*arguments)
        assert done.returncode == 2
        assert "schema version 0" in done.stderr


def _changed(folder: Path, to: Path, outcome: object = None, control: object = None, **changes: object) -> Path:
    """A directory with a record whose verdicts or other entries are changed."""
    record = json.loads((folder / "onehot-64.json").read_text())
    record["outcome"]["verdict"] |= outcome or {}
    record["control"]["verdict"] |= control or {}
    (to / "onehot-64.json").write_text(json.dumps(record | changes))
    return to


@pytest.mark.parametrize(
    ("outcome", "control", "words"),
    [
        ("holds", "holds", ["holds", "unsound", "the control has the same verdict (holds)"]),
        ("holds", "undecided", ["holds", "unsound", "the control is undecided"]),
        ("undecided", "undecided", ["1 undecided", "unsound", "the control is undecided"]),
        ("undecided", "fails", ["1 undecided"]),
    ],
)
def test_a_verdict_that_says_nothing_ends_with_exit_code_1(
    folder: Path, tmp_path: Path, outcome: str, control: str, words: list[str]
) -> None:
    _changed(folder, tmp_path, {"answer": outcome}, {"answer": control})
    done = _lab("run", "onehot-64", "--quick", "--output", tmp_path)
    assert done.returncode == 1
    found = " ".join(done.stdout.split())
    for word in ("unsound", "same verdict", "the control is undecided"):
        assert (word in found) == any(word in wanted for wanted in words)
    assert all(word in found for word in words)


@pytest.mark.parametrize("answer", ["partly", "depends", "undecided"])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_part_that_is_undecided_is_shown(folder: Path, tmp_path: Path, language: str, answer: str) -> None:
    part = json.loads((folder / "onehot-64.json").read_text())["outcome"]["verdict"]["findings"][0]
    parts = [part | {"met": met} for met in (True, False, None)]
    _changed(folder, tmp_path, {"answer": answer, "findings": parts})
    done = _lab("run", "onehot-64", "--quick", "--output", tmp_path, "--lang", LANG[language])
    assert done.returncode == 1
    sign = {"en": ":", "zh": "："}[language]
    for word in ("holds", "fails", "undecided"):  # wrapped in its column
        wanted = f"{word_of(f'lab.answer.{word}', language)}{sign}{part['text'][language]}"
        assert "".join(wanted.split()) in "".join(done.stdout.split())


@pytest.mark.parametrize("language", ["en", "zh"])
def test_what_a_verdict_depends_on_is_said_first(folder: Path, tmp_path: Path, language: str) -> None:
    claim = CLAIMS["init-scaling"]
    assert claim.condition is not None
    part = json.loads((folder / "onehot-64.json").read_text())["outcome"]["verdict"]["findings"][0]
    parts = [part | {"met": met} for met in (True, False)]
    condition = {"en": claim.condition.en, "zh": claim.condition.zh}
    _changed(folder, tmp_path, {"answer": "depends", "findings": parts}, condition=condition)
    run = ("run", "onehot-64", "--quick", "--output", tmp_path)
    shown = "".join(_lab("show", claim.id, "--lang", LANG[language]).stdout.split())
    said = "".join(_lab(*run, "--lang", LANG[language]).stdout.split())
    words = "".join(condition[language].split())
    assert words in shown
    assert 0 < said.index(words) < said.index("".join(part["text"][language].split()))
    assert json.loads(_lab(*run, "--json").stdout)["claims"][0]["condition"] == condition["en"]
    assert json.loads(_lab("show", claim.id, "--json").stdout)["condition"] == condition
    assert json.loads(_lab("show", "var-linear", "--json").stdout)["condition"] is None


@pytest.mark.parametrize(
    ("arguments", "environment", "language"),
    [
        ((), {}, "en"),
        ((), {"LANG": "zh_CN.UTF-8"}, "zh"),
        ((), {"LC_MESSAGES": "zh_CN.UTF-8", "LANG": "en_US.UTF-8"}, "zh"),
        ((), {"LC_ALL": "de_DE.UTF-8", "LANG": "zh_CN.UTF-8"}, "en"),
        (("--lang", "en"), {"LANG": "zh_CN.UTF-8"}, "en"),
        (("--lang", "zh-CN"), {"LANG": "en_US.UTF-8"}, "zh"),
    ],
)
def test_the_language_is_the_one_asked_for_or_the_environments(
    arguments: tuple[str, ...], environment: dict[str, str], language: str
) -> None:
    variables = dict.fromkeys(("LC_ALL", "LC_MESSAGES", "LANG"), "") | environment
    text = called("lab", "show", "var-linear", *arguments, **variables).stdout
    assert ("方差" in text) == (language == "zh")
    document = json.loads(called("lab", "show", "var-linear", "--json", *arguments, **variables).stdout)
    assert document["statement"] == {"en": CLAIMS["var-linear"].statement.en, "zh": CLAIMS["var-linear"].statement.zh}


def test_one_language_at_a_time(folder: Path, tmp_path: Path) -> None:
    _changed(folder, tmp_path, None, {"answer": "undecided"})
    said = _lab("run", "onehot-64", "--quick", "--output", tmp_path, "--lang", "zh-CN").stdout
    assert english(said.replace(str(tmp_path), "")) == []


def test_texts_of_a_record_and_paths_are_escaped(folder: Path, tmp_path: Path) -> None:
    evil = "\x1b[31m\u202e\n"
    part = json.loads((folder / "onehot-64.json").read_text())["outcome"]["verdict"]["findings"][0]
    parts = [part | {"met": met, "text": {"en": evil, "zh": evil}} for met in (True, False)]
    place = tmp_path / f"lab{evil}"
    place.mkdir()
    _changed(folder, place, {"answer": "depends", "findings": parts})
    done = _lab("run", "onehot-64", "--quick", "--output", place)
    page = _lab("report", place)
    assert done.returncode == page.returncode == 0, done.stderr + page.stderr
    assert r"\x1b[31m\u202e\n" in done.stdout
    assert r"\x1b[31m\u202e\n" in page.stderr
    assert not re.search("[\x1b\u202e]", done.stdout + done.stderr + page.stdout + page.stderr)
    assert len(page.stderr.splitlines()) == 2


def test_the_report_names_what_was_not_run(folder: Path, tmp_path: Path) -> None:
    done = _lab("report", folder, "--output", tmp_path / "page.html")
    count = len(CLAIMS) - len(CHEAP)
    assert f"Not run, {count} of {len(CLAIMS)} claims: var-general, " in done.stderr
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    notice = text.split('id="missing">')[1].split("</section>")[0]
    assert re.findall("<code>(.*?)</code>", notice) == [name for name in CLAIMS if name not in CHEAP]
    assert f"未运行：{len(CLAIMS)} 条说法中的 {count} 条" in notice


def test_matplotlib_is_missed_before_the_first_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = _lab("run", "onehot-64", "--quick", "--output", tmp_path / "new")
    assert done.returncode == 2
    assert "matplotlib can't be imported" in done.stderr
    assert not (tmp_path / "new").exists()
