"""`sqrtdk watch show RUN...`: several runs in one call, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.program import called


def _show(*arguments: object) -> subprocess.CompletedProcess[str]:
    return called("watch", "show", *arguments, COLUMNS="110")


def test_several_runs_make_a_table_a_page_and_a_document(runs: dict[str, Path], tmp_path: Path) -> None:
    page, document = tmp_path / "page.html", tmp_path / "runs.json"
    both = runs["healthy"], runs["unscaled"]
    done = _show(*both, "--html", page, "--output", document, "--verify", "--fail-on", "warn")
    assert done.returncode == 1
    assert done.stdout.startswith("Something is wrong in 1 of 2 runs: B.")
    assert done.stdout.count(": verified: ") == 2
    assert [run["run"] for run in json.loads(document.read_text())["runs"]] == [str(run) for run in both]
    assert 'id="overlay"' in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("names", "more", "rule", "hint"),
    [
        (("healthy", "healthy/../healthy"), (), "are the same run", "Name each run once."),
        (("healthy", "nothing"), (), "holds no run: there is no run.json", "Is it the folder of a run?"),
        (("healthy", "unscaled"), ("--follow",), "--follow shows one run; got 2", "write a page"),
        (("healthy", "unscaled"), ("--serve", "0"), "--serve shows one run; got 2", "write a page"),
        (("",), (), "holds no run itself, but 3 in folders of its own", "also takes several"),
    ],
)
def test_what_is_refused_is_said_in_a_sentence(
    names: tuple[str, ...], more: tuple[str, ...], rule: str, hint: str, runs: dict[str, Path]
) -> None:
    folder = runs["healthy"].parent
    done = _show(*(folder / name for name in names), *more)
    assert done.returncode == 2
    assert done.stdout == ""
    assert rule in " ".join(done.stderr.split())
    assert hint in " ".join(done.stderr.split())
