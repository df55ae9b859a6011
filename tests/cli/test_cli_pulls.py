"""What pull requests meet: files for other tools, baselines, and configs checked one by one."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from sqrtdk.cli.options import STDOUT
from tests.cli.errors import check_error
from tests.report import sarif_rules
from tests.support.program import Warm, called

NETS = """import torch


class Net(torch.nn.Module):
    scale = 32**-0.5

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = q @ k.mT
        if self.scale:
            logits = logits * 32**-0.5
        return logits.softmax(-1) @ v


def good():
    torch.manual_seed(0)
    return Net(), torch.randn(1, 8, 32)


def bad():
    net, x = good()
    net.scale = None
    return net, x
"""
OWN = """import torch
from transformers import PretrainedConfig, PreTrainedModel


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, hidden_size=64, query_pre_attn_scalar=64, head_dim=64, vocab_size=64, **more):
        self.hidden_size, self.query_pre_attn_scalar = hidden_size, query_pre_attn_scalar
        self.head_dim, self.vocab_size = head_dim, vocab_size
        super().__init__(**more)


class Attention(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.qkv = torch.nn.Linear(size, 3 * size)

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.attn = Attention(config.hidden_size)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, **more):
        return self.attn(self.embed(input_ids))
"""
OWN_CONFIG = {
    "model_type": "own",
    "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"},
    "head_dim": 64,
    "query_pre_attn_scalar": 144,
}
FILE = "attention.json"
MODULES = {"pull_nets.py": NETS}
FILES = ["--sarif", "a.sarif", "--junit", "a.xml", "--markdown", "a.md", "--html", "a.html", "--output", "a.json"]
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1,
    "intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def test_all_reports_of_one_run_agree(nets: Path) -> None:
    done = called("check", "pull_nets:bad", *FILES, cwd=nets)
    assert done.returncode == 1, done.stderr
    assert "1 attention call: 1 unexplained." in done.stdout
    document = json.loads((nets / "a.json").read_text())
    run = sarif_rules.checked((nets / "a.sarif").read_text())
    assert [result["ruleId"] for result in run["results"]] == [entry["rule"] for entry in document["findings"]]
    where = run["results"][0]["locations"][0]["physicalLocation"]
    assert where == {
        "artifactLocation": {"uri": "pull_nets.py", "uriBaseId": "SRCROOT"},
        "region": {"startLine": NETS.splitlines().index("        logits = q @ k.mT") + 1},
    }
    assert run["originalUriBaseIds"]["SRCROOT"]["uri"] == f"{nets.resolve().as_uri()}/"
    case = ElementTree.parse(nets / "a.xml").getroot().find("testsuite/testcase")
    assert case is not None
    assert case.find("failure") is not None
    assert (nets / "a.md").read_text().startswith("### Attention of <code>pull_nets:bad</code>: failed\n")


def test_a_healthy_model_has_no_results(nets: Path) -> None:
    done = called("check", "pull_nets:good", *FILES[:6], cwd=nets)
    assert done.returncode == 0, done.stderr
    levels = {result["level"] for result in sarif_rules.checked((nets / "a.sarif").read_text())["results"]}
    assert levels <= {"none", "note"}
    assert ElementTree.parse(nets / "a.xml").getroot().get("failures") == "0"


def test_a_result_lies_at_the_code_of_the_directory_and_at_the_line_of_its_config(sqrtdk: Warm, tmp_path: Path) -> None:
    model = tmp_path / "models" / "own"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(OWN_CONFIG, indent=2))
    (model / "own.py").write_text(OWN)
    copies = str(tmp_path / "copies")  # transformers runs a copy of the code
    words = ("--static", "--trust-remote-code", "--sarif", "a.sarif")
    done = sqrtdk("models/own", *words, cwd=tmp_path, HF_MODULES_CACHE=copies)
    assert done.returncode == 1, done.stderr
    (result,) = sarif_rules.checked((tmp_path / "a.sarif").read_text())["results"]
    assert result["ruleId"] == "declared_vs_actual"
    places = [place["physicalLocation"] for place in (*result["locations"], *result["relatedLocations"])]
    lines = [(place["artifactLocation"]["uri"], place["region"]["startLine"]) for place in places]
    config = (model / "config.json").read_text().splitlines()
    assert lines == [
        ("models/own/own.py", next(n for n, line in enumerate(OWN.splitlines(), 1) if "scaled_dot" in line)),
        ("models/own/config.json", next(n for n, line in enumerate(config, 1) if "query_pre" in line)),
    ]
    assert {place["artifactLocation"]["uriBaseId"] for place in places} == {"SRCROOT"}


def test_nothing_is_overwritten_and_nothing_is_written_before_all_is_drawn(nets: Path) -> None:
    (nets / "a.xml").write_text("mine")
    done = called("check", "pull_nets:bad", *FILES, cwd=nets)
    check_error(done, "a.xml exists")
    assert not (nets / "a.sarif").exists()
    assert (nets / "a.xml").read_text() == "mine"
    assert called("check", "pull_nets:bad", *FILES, "--force", cwd=nets).returncode == 1
    twice = called("check", "pull_nets:bad", "--sarif", "x", "--markdown", "x", cwd=nets)
    assert "two reports would be written to x" in twice.stderr
    assert not (nets / "x").exists()


def test_markdown_on_stdout_is_alone_there(nets: Path) -> None:
    done = called("check", "pull_nets:bad", "--markdown", STDOUT, "--json", "--output", "a.json", cwd=nets)
    assert done.returncode == 1
    assert done.stdout.startswith("### Attention of")
    assert "Exit code 1" in done.stderr
    assert (nets / "a.json").exists()
    both = called("check", "pull_nets:bad", "--markdown", STDOUT, "--json", cwd=nets)
    check_error(both, "one document")


def test_a_baseline_passes_what_it_knows_and_names_what_changed(nets: Path) -> None:
    kept = ("--baseline", FILE)
    check_error(called("check", "pull_nets:bad", *kept, cwd=nets), "can't be read", f"--baseline {FILE} --update")
    assert not (nets / FILE).exists()
    written = called("check", "pull_nets:bad", *kept, "--update", cwd=nets)
    assert (written.returncode, written.stdout) == (0, "")
    assert "1 attention: 1 unexplained." in written.stderr
    assert called("check", "pull_nets:bad", *kept, cwd=nets).returncode == 0
    changed = called("check", "pull_nets:good", *kept, "--markdown", "c.md", cwd=nets)
    assert changed.returncode == 1
    assert "- verdict unexplained: missing\n       + verdict exact" in changed.stdout
    assert "verdict changed" in (nets / "c.md").read_text()
    document = json.loads(called("check", "pull_nets:good", *kept, "--json", cwd=nets).stdout)
    assert {change["what"] for change in document["changes"]} >= {"formula", "ratio", "verdict"}
    assert document["exit_code"] == 1
    assert called("check", "pull_nets:good", *kept, "--fail-on", "never", cwd=nets).returncode == 0


def test_an_update_says_what_changed_and_nothing_fails(nets: Path) -> None:
    update = ("--baseline", FILE, "--update")
    called("check", "pull_nets:bad", *update, cwd=nets)
    before = (nets / FILE).read_bytes()
    renewed = called("check", "pull_nets:good", *update, cwd=nets)
    assert renewed.returncode == 0
    assert "+ verdict exact" in renewed.stdout
    assert (nets / FILE).read_bytes() != before
    again = json.loads(called("check", "pull_nets:good", *update, "--json", cwd=nets).stdout)
    assert (again["changes"], again["exit_code"]) == ([], 0)


def test_an_update_gives_up_a_file_that_is_no_baseline_only_by_force(nets: Path) -> None:
    for content in ("my notes", '{"schema_version": 1, "model": "m", "mode": "static", "attentions": []}'):
        (nets / FILE).write_text(content)
        done = called("check", "pull_nets:bad", "--baseline", FILE, "--update", cwd=nets)
        check_error(done, "")
        assert (nets / FILE).read_text() == content
        assert called("check", "pull_nets:bad", "--baseline", FILE, "--update", "--force", cwd=nets).returncode == 0
        assert called("check", "pull_nets:bad", "--baseline", FILE, cwd=nets).returncode == 0


@pytest.mark.parametrize(
    ("content", "why"), [("{}", "no schema_version"), ('{"schema_version": 9}', "version '9'"), (None, "can't be read")]
)
def test_a_baseline_of_another_kind_is_one_error(nets: Path, content: str | None, why: str) -> None:
    if content is not None:
        (nets / "b.json").write_text(content)
    done = called("check", "pull_nets:good", "--baseline", "b.json", cwd=nets)
    check_error(done, why)


def test_each_config_is_looked_at_and_the_worst_counts(tmp_path: Path) -> None:
    contents = {"good": json.dumps(LLAMA), "other": '{"name": "a web page"}', "broken": "{"}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    files = {name: f"{name}/config.json" for name in contents}
    fine = called("check", "--static", files["good"], files["other"], cwd=tmp_path)
    assert fine.returncode == 0, fine.stderr
    (line,) = fine.stdout.splitlines()
    assert line.startswith("good/config.json: The one attention has the textbook scale")
    assert " 1 attention call: 1 exact. No findings" in line
    assert "other/config.json: not checked, it names no model_type" in fine.stderr
    worst = called("check", "--static", files["broken"], files["good"], cwd=tmp_path)
    assert worst.returncode == 2
    assert "good/config.json: The one attention has" in worst.stdout
    assert "broken/config.json: not checked" in worst.stderr
    (tmp_path / "good" / "my_model.json").write_text(contents["good"])
    renamed = called("check", "--static", "good/my_model.json", cwd=tmp_path)
    assert "The one attention has the textbook scale" in renamed.stdout
    strict = called("check", "--static", files["good"], "--fail-on", "note", cwd=tmp_path)
    assert strict.returncode == 0
    assert called("check", "--static", files["other"], cwd=tmp_path).returncode == 0  # what a hook gives of one file


def test_documents_are_of_one_model(tmp_path: Path) -> None:
    check_error(called("check", "demo", "demo:twice", cwd=tmp_path), "2 MODELs", "--static A B C")
    for option in (["--json"], ["--html", "a.html"], ["--baseline", FILE]):
        done = called("check", "--static", "demo", "demo:twice", *option, cwd=tmp_path)
        check_error(done, f"{option[0]} given with several MODELs")
