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


def strange():
    import os

    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return good()


def lost():
    raise SystemExit("gone")
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
    line, last = filter(None, fine.stdout.splitlines())
    assert line == "passed, scales alone  good/config.json: 1 attention call, 1 exact"
    assert last == "1 model: 1 passed, scales alone. Exit code 0 (fail-on: fail)."
    assert "other/config.json: not checked, it names no model_type" in fine.stderr
    worst = called("check", "--static", files["broken"], files["good"], cwd=tmp_path)
    assert worst.returncode == 2
    assert "good/config.json: 1 attention call, 1 exact" in worst.stdout
    assert "1 not checked (broken/config.json)" in worst.stdout
    assert "broken/config.json: not checked" in worst.stderr
    (tmp_path / "good" / "my_model.json").write_text(contents["good"])
    renamed = called("check", "--static", "good/my_model.json", cwd=tmp_path)
    assert "1 attention call, 1 exact" in renamed.stdout
    strict = called("check", "--static", files["good"], "--fail-on", "note", cwd=tmp_path)
    assert strict.returncode == 0
    assert called("check", "--static", files["other"], cwd=tmp_path).returncode == 0  # what a hook gives of one file


def test_several_models_are_answered_in_one_run_and_a_lost_one_costs_no_other(nets: Path) -> None:
    models = ("pull_nets:good", "pull_nets:strange", "pull_nets:lost", "pull_nets:bad")
    done = called("check", *models, *FILES[:6], "--json", cwd=nets)
    assert done.returncode == 2, done.stderr
    document = json.loads(done.stdout)
    assert [one["model"]["id"] for one in document["models"]] == [models[0], models[1], models[3]]
    assert [(one["model"], "gone" in one["error"]) for one in document["not_checked"]] == [("pull_nets:lost", True)]
    alone = json.loads(called("check", "pull_nets:bad", "--json", cwd=nets).stdout)
    # what another model left behind, a directory or a default dtype, changes nothing
    assert document["models"][2]["calls"] == alone["calls"]
    assert [suite.get("name") for suite in ElementTree.parse(nets / "a.xml").getroot()][-1] == "pull_nets:lost"
    comment = (nets / "a.md").read_text()
    assert comment.index("pull_nets:lost") < comment.index("pull_nets:bad</code>: failed") < comment.index("good")
    assert called("check", "pull_nets:good", "pull_nets:bad", cwd=nets).returncode == 1
    check_error(called("check", "demo", "http://127.0.0.1:9/v1", cwd=nets), "addresses or models")


def test_a_model_that_is_named_twice_is_one_in_every_document(nets: Path) -> None:
    documents = ("--junit", "a.xml", "--sarif", "a.sarif", "--markdown", "a.md", "--force")
    done = called("check", "pull_nets:good", "pull_nets:good", "--json", *documents, cwd=nets)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [one["model"]["id"] for one in document["models"]] == document["repeated"] == ["pull_nets:good"]
    assert [one.get("name") for one in ElementTree.parse(nets / "a.xml").getroot()] == ["pull_nets:good"]
    assert len(json.loads((nets / "a.sarif").read_text())["runs"]) == 1
    said = "1 of them is given more than once and checked once (pull_nets:good)"
    assert said in (nets / "a.md").read_text()
    assert said in done.stderr


def test_a_baseline_of_several_models_fails_on_what_changed_in_one(nets: Path) -> None:
    names, kept = ("pull_nets:good", "pull_nets:bad"), ("--baseline", FILE)
    assert called("check", *names, *kept, "--update", cwd=nets).returncode == 0
    assert called("check", *names, *kept, cwd=nets).returncode == 0
    assert called("check", names[1], *kept, cwd=nets).returncode == 0  # one of them alone
    more = called("check", *names, "pull_nets:strange", *kept, "--markdown", STDOUT, cwd=nets)
    assert more.returncode == 1
    assert "<code>pull_nets:strange</code>: changed" in more.stdout
    part = json.loads(called("check", names[0], "pull_nets:strange", *kept, "--json", cwd=nets).stdout)
    assert part["not_in_run"] == [names[1]]
    check_error(called("check", "pull_nets:strange", *kept, cwd=nets), "is not among them")
    lost = called("check", names[0], "pull_nets:lost", *kept, "--update", cwd=nets)
    assert lost.returncode == 2
    assert called("check", *names, *kept, cwd=nets).returncode == 0  # an update of some keeps the lines of others


def test_a_changed_value_of_the_config_is_one_change_with_its_line(tmp_path: Path) -> None:
    model = tmp_path / "granite"
    model.mkdir()
    config = LLAMA | {"model_type": "granite", "num_hidden_layers": 2, "attention_multiplier": 0.25}
    (model / "config.json").write_text(json.dumps(config, indent=1))
    for mode in (["--static"], []):
        kept = ("granite", *mode, "--laws", "none", "--baseline", f"b{len(mode)}.json")
        assert called("check", *kept, "--update", cwd=tmp_path).returncode == 0
        changed = config | {"attention_multiplier": 0.125, "rope_theta": 500.0}
        (model / "config.json").write_text(json.dumps(changed, indent=1))
        line = next(n for n, text in enumerate(json.dumps(changed, indent=1).splitlines(), 1) if "multiplier" in text)
        done = called("check", *kept, cwd=tmp_path)
        assert done.returncode == 1
        assert f"granite/config.json:{line}: attention_multiplier 0.25 -> 0.125" in done.stdout
        assert "1 change, 1 more that do not count, 0 attentions as in the baseline" in done.stdout
        document = json.loads(called("check", *kept, "--json", cwd=tmp_path).stdout)
        assert {one["follows_from"] for one in document["changes"]} == {"attention_multiplier"}
        assert [(one["field"], one["fails"]) for one in document["config"]] == [
            ("attention_multiplier", True), ("rope_theta", False)
        ]  # fmt: skip
        (model / "config.json").write_text(json.dumps(config, indent=1))
