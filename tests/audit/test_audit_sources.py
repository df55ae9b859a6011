"""Where the lines lie that a report names: code, config, and what was audited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqrtdk._check import check
from sqrtdk.audit.multipliers import by_config
from sqrtdk.audit.records import SourceFile
from sqrtdk.audit.sources import declared_at, field_lines, split_lines
from sqrtdk.messages import Message
from tests.report.sample_report import judged

GEMMA = {
    "model_type": "gemma2", "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
NET = """import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v


def make():
    return Net(), torch.randn(1, 8, 32)
"""
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


def gemma(folder: Path, **more: object) -> Path:
    """A directory with a config, one field a line."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(GEMMA | more, indent=2))
    return folder


@given(st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=4), st.sampled_from([None, 1, 3]))
def test_every_key_has_its_line(document: dict[str, object], indent: int | None) -> None:
    text = json.dumps(document, indent=indent)
    lines = field_lines(text)
    expected: set[tuple[str, ...]] = set()

    def walk(value: object, path: tuple[str, ...]) -> None:
        for key, inner in value.items() if isinstance(value, dict) else ():
            expected.add((*path, key))
            walk(inner, (*path, key))

    walk(document, ())
    assert set(lines) == expected
    for path, line in lines.items():
        assert json.dumps(path[-1]) in text.split("\n")[line - 1]


def test_places_are_read_back() -> None:
    assert split_lines("a.py:3, b.py:14") == (("a.py", 3), ("b.py", 14))
    assert split_lines(None) == split_lines("nowhere") == ()


def test_code_of_the_repository_is_named_from_its_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "repo" / "lib"
    home.mkdir(parents=True)
    (home / "far_nets.py").write_text(NET)
    subprocess.run(["git", "init", "-q", str(tmp_path / "repo")], check=True)
    work = tmp_path / "repo" / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(str(home))
    report = check("far_nets:make", seq_len=8)
    assert report.root == os.path.realpath(tmp_path / "repo")
    assert report.sources == (SourceFile("far_nets.py", "lib/far_nets.py", "root"),)
    assert report.model.at == "far_nets.py:14"
    assert [finding.at for finding in report.findings if finding.rule == "scale_ledger"] == ["far_nets.py:11"]
    sys.modules.pop("far_nets")


def test_without_a_repository_the_working_directory_is_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "near_nets.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    report = check("near_nets:make")
    assert (report.root, report.sources[0].path) == (os.path.realpath(tmp_path), "near_nets.py")
    sys.modules.pop("near_nets")


def test_a_declaration_is_at_its_line_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gemma(tmp_path / "models" / "a", query_pre_attn_scalar=144)
    report = check("models/a", static=True, seq_len=8)
    assert [judged.verdict for judged in report.calls] == ["declared"]
    assert report.calls[0].declared_at == "models/a/config.json:11"
    assert report.model.at == "models/a/config.json:2"
    assert SourceFile("models/a/config.json", "models/a/config.json", "root") in report.sources
    assert {source.base for source in report.sources} == {"root", "packages"}  # the code is transformers'


def test_a_field_that_has_its_default_is_at_the_model_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gemma(tmp_path / "b")
    report = check("b", static=True, seq_len=8)
    assert "query_pre_attn_scalar" in str(report.calls[0].declared_by)
    assert report.calls[0].declared_at == "b/config.json:2"


@pytest.mark.parametrize(("site", "line"), [("vision_tower.layers.0", 2), ("text.layers.0", 3), ("other.layers.0", 1)])
def test_a_part_of_a_composite_has_its_own_lines(site: str, line: int) -> None:
    lines = {("x",): 1, ("vision_config", "x"): 2, ("text_config", "x"): 3, ("model_type",): 4}
    first, second = (by_config(name, value, "sources.field.scale") for name, value in (("x", "3"), ("y", "2")))
    by = Message("sources.declared.and", first=first, second=second)
    call = judged(site, verdict="declared", declared_by=by)
    assert declared_at(call, Path("m"), lines) == f"m/config.json:{line}, m/config.json:4"
    assert declared_at(judged(site, declared_by="attribute scale = 1"), Path("m"), lines) is None


def test_the_textbook_needs_no_line() -> None:
    report = check("demo", seq_len=8)
    assert {judged.declared_at for judged in report.calls} == {None}
    assert {source.file for source in report.sources} == {"sqrtdk/models/demo.py"}
