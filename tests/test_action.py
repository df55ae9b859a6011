"""The action's steps, run as a runner runs them, on a small repository with one healthy and one broken model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
import yaml

from tests.report import sarif_rules
from tests.support.program import environment

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
SHELL = ["bash", "--noprofile", "--norc", "-eo", "pipefail"]
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
EVIL = "$(touch owned)`touch owned`';touch owned;'"
NETS = """import torch
from torch.nn.functional import scaled_dot_product_attention


class Net(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.qkv, self.scale_of_q = torch.nn.Linear(32, 96), scale

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return scaled_dot_product_attention(q * self.scale_of_q, k, v)


def healthy():
    return Net(1.0), torch.ones(1, 8, 32).cumsum(1)


def broken():
    return Net(32**-0.5), torch.ones(1, 8, 32).cumsum(1)


def ends():
    import os

    os._exit(0)
"""


@dataclass
class Runner:
    """As much of a runner as the action needs: inputs, expressions, the files that steps write, conditions."""

    folder: Path
    inputs: dict[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    event: str = ""  # number of the pull request
    outputs: dict[str, str] = field(default_factory=dict)
    log: str = ""

    def value(self, expression: str) -> str:
        """What an expression stands for."""
        scope, _, name = expression.partition(".")
        if scope == "inputs":
            default = str(ACTION["inputs"][name].get("default", ""))
            return self.inputs.get(name, EXPRESSION.sub(lambda found: self.value(found[1]), default))
        known = {
            "github.action_path": str(ROOT), "github.token": "a-token", "github.event.pull_request.number": self.event,
        }  # fmt: skip
        if expression in known:
            return known[expression]
        assert expression.startswith("steps.check.outputs."), expression
        return self.outputs.get(expression.removeprefix("steps.check.outputs."), "")

    def text(self, words: str) -> str:
        """A field of a step, its expressions replaced."""
        return EXPRESSION.sub(lambda found: self.value(found[1]), str(words))

    def wanted(self, step: dict[str, Any]) -> bool:
        """Whether a step's condition holds; a term is a comparison, or a value that is not empty."""
        terms = EXPRESSION.sub(r"\1", step.get("if", "!cancelled()")).split(" && ")
        return all(self._holds(term) for term in terms)

    def _holds(self, term: str) -> bool:
        if term == "!cancelled()":
            return True
        if " == " in term:
            left, right = term.split(" == ")
            return self.value(left) == right.strip("'")
        return bool(self.value(term))

    def run(self, name: str) -> int | None:
        """Run a step's shell; its exit code, or None where its condition does not hold."""
        step = STEPS[name]
        if not self.wanted(step):
            return None
        script, output, summary = (self.folder / file for file in ("step.sh", "output", "summary.md"))
        script.write_text(step["run"])
        for file in (output, summary):
            file.touch()
        inside = self.folder / "repository" / self.text(step.get("working-directory", "."))
        variables = {key: self.text(words) for key, words in step.get("env", {}).items()}
        files = {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary), "RUNNER_TEMP": str(self.folder)}
        done = subprocess.run(
            [*SHELL, str(script)],
            cwd=inside,
            env=environment() | files | self.variables | variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        self.log += done.stdout + done.stderr
        self.outputs |= dict(line.split("=", 1) for line in output.read_text(encoding="utf-8").splitlines())
        return done.returncode


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    """A runner with a checkout of a small repository."""
    home = tmp_path / "repository" / "src"
    home.mkdir(parents=True)
    (home / "nets.py").write_text(NETS)
    subprocess.run(["git", "init", "-q", str(home.parent)], check=True)
    path = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    return Runner(tmp_path, {"python": sys.executable, "working-directory": "src"}, {"PYTHONPATH": path})


class Api(BaseHTTPRequestHandler):
    """GitHub's comments on pull request 7, as far as the action asks for them."""

    comments: ClassVar[list[dict[str, Any]]] = []
    refuses: ClassVar[bool] = False

    def do_GET(self) -> None:
        page = int(self.path.rpartition("page=")[2])
        self._answer(self.comments[100 * (page - 1) : 100 * page])

    def do_POST(self) -> None:
        self._write({"id": len(self.comments) + 1, "user": {"type": "Bot"}})

    def do_PATCH(self) -> None:
        self._write(next(one for one in self.comments if one["id"] == int(self.path.rpartition("/")[2])))

    def _write(self, comment: dict[str, Any]) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refuses or self.headers["Authorization"] != "Bearer a-token":
            self._answer({"message": "Resource not accessible by integration"}, 403)
            return
        comment["body"] = content["body"]
        if comment not in self.comments:
            self.comments.append(comment)
        self._answer(comment, 201)

    def _answer(self, content: Any, code: int = 200) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[str]:
    """The address of an empty pull request."""
    Api.comments, Api.refuses = [], False
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_no_expression_is_put_into_a_script() -> None:
    assert all("${{" not in step.get("run", "") for step in STEPS.values())
    assert all(step.get("shell") == "bash" for step in STEPS.values() if "run" in step)
    assert all(str(said["description"]).endswith(".") for said in ACTION["inputs"].values())


@pytest.mark.full
def test_a_healthy_and_a_broken_model(runner: Runner, api: str) -> None:
    runner.inputs |= {"models": "\n  nets:healthy\n\nnets:broken  \n"}
    runner.event = "7"
    runner.variables |= {"GITHUB_API_URL": api, "GITHUB_REPOSITORY": "a/b"}
    assert runner.run("Check") == 0, runner.log
    assert runner.outputs["exit-code"] == "1"
    good, bad = sarif_rules.checked_runs(Path(runner.outputs["sarif"]).read_text(encoding="utf-8"))
    assert not [result for result in good["results"] if result["level"] == "error"]
    (error,) = (result for result in bad["results"] if result["level"] == "error")
    where = error["locations"][0]["physicalLocation"]
    assert where["artifactLocation"] == {"uri": "src/nets.py", "uriBaseId": "SRCROOT"}
    assert "scaled_dot_product_attention(q" in NETS.splitlines()[where["region"]["startLine"] - 1]
    assert good["automationDetails"] != bad["automationDetails"]
    suites = ElementTree.parse(runner.outputs["junit"]).getroot()
    assert [suite.get("name") for suite in suites] == ["nets:healthy", "nets:broken"]
    comment = Path(runner.outputs["markdown"]).read_text(encoding="utf-8")
    assert comment.index("nets:broken</code>: failed") < comment.index("<code>nets:healthy</code>: 1 attention call")
    assert runner.log.count("2 models: 1 failed") == 1  # one process for both
    assert (runner.folder / "summary.md").read_text(encoding="utf-8") == comment
    assert runner.wanted(STEPS["Code scanning"])
    assert runner.run("Comment") == 0, runner.log
    assert [one["body"] for one in Api.comments] == [comment]
    assert runner.run("Verdict") == 1


def test_a_later_run_replaces_its_own_comment_and_nobody_elses(runner: Runner, api: str, tmp_path: Path) -> None:
    file = tmp_path / "comment.md"
    file.write_text("<!-- sqrtdk -->\nnew")
    runner.event, runner.outputs = "7", {"markdown": str(file)}
    runner.variables |= {"GITHUB_API_URL": api, "GITHUB_REPOSITORY": "a/b"}
    others = [{"id": number, "user": {"type": "User"}, "body": "<!-- sqrtdk -->\nmine"} for number in range(1, 121)]
    Api.comments.extend(others)
    for body in ("new", "newer"):
        file.write_text(f"<!-- sqrtdk -->\n{body}")
        assert runner.run("Comment") == 0, runner.log
        assert [one["body"].split("\n")[1] for one in Api.comments[119:]] == ["mine", body]


def test_without_permission_to_comment_the_job_goes_on(runner: Runner, api: str, tmp_path: Path) -> None:
    (tmp_path / "comment.md").write_text("<!-- sqrtdk -->\nnew")
    runner.event, runner.outputs = "7", {"markdown": str(tmp_path / "comment.md")}
    runner.variables |= {"GITHUB_API_URL": api, "GITHUB_REPOSITORY": "a/b"}
    Api.refuses = True
    assert runner.run("Comment") == 0
    assert "::warning::sqrtdk: no comment" in runner.log
    runner.event = ""  # a push
    assert runner.run("Comment") is None


@pytest.mark.full
def test_a_baseline_fails_only_on_what_changed(runner: Runner) -> None:
    home = runner.folder / "repository" / "src"
    write = [sys.executable, "-m", "sqrtdk", "check", "nets:broken", "--baseline", "b.json", "--update"]
    subprocess.run(write, cwd=home, env=environment() | runner.variables, check=True, capture_output=True)
    runner.inputs |= {"models": "nets:broken", "baseline": "b.json"}
    assert runner.run("Check") == 0, runner.log
    assert runner.outputs["exit-code"] == "0"
    assert "as in the baseline" in Path(runner.outputs["markdown"]).read_text(encoding="utf-8")
    (home / "nets.py").write_text(NETS.replace("Net(32**-0.5)", "Net(32**-1.5)"))
    assert runner.run("Check") == 0, runner.log
    assert runner.outputs["exit-code"] == "1"
    assert "ratio changed" in Path(runner.outputs["markdown"]).read_text(encoding="utf-8")
    assert runner.run("Verdict") == 1


@pytest.mark.full
def test_a_model_that_can_not_be_checked_is_exit_code_2_and_in_the_comment(runner: Runner) -> None:
    runner.inputs |= {"models": "nets:ends\nnets:nothing\nnets:healthy"}
    assert runner.run("Check") == 0
    assert runner.outputs["exit-code"] == "2"
    comment = Path(runner.outputs["markdown"]).read_text(encoding="utf-8")
    assert "**not checked** <code>nets:ends</code>: the model's code ended the process, with exit code 0" in comment
    assert "**not checked** <code>nets:nothing</code>" in comment
    assert "<code>nets:healthy</code>: 1 attention call" in comment
    assert len(json.loads(Path(runner.outputs["sarif"]).read_text(encoding="utf-8"))["runs"]) == 2
    assert runner.run("Verdict") == 2


def test_no_model_is_one_error(runner: Runner) -> None:
    runner.inputs |= {"models": " \n"}
    assert runner.run("Check") == 2
    assert runner.log.count("::error::") == 1
    assert runner.outputs == {}


def test_inputs_are_never_run(runner: Runner) -> None:
    runner.inputs |= {"models": f"{EVIL}\n--help", "options": EVIL, "fail-on": EVIL}
    assert runner.run("Check") == 0
    assert (runner.outputs["exit-code"], runner.outputs["sarif"]) == ("2", "")
    assert "Attention of 2 models: not checked" in Path(runner.outputs["markdown"]).read_text(encoding="utf-8")
    assert list(runner.folder.rglob("owned")) == []


@pytest.mark.full
def test_the_install_step_installs_the_package(runner: Runner, tmp_path: Path) -> None:
    site = tmp_path / "site"
    here = {"PIP_TARGET": str(site), "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
    runner.variables |= here | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    assert runner.run("Install") == 0, runner.log
    assert (site / "sqrtdk" / "cli" / "check.py").is_file()
    runner.inputs["install"] = "false"
    assert runner.run("Install") is None


def test_the_hook_runs_a_verb_and_installs_what_it_needs() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert hook["additional_dependencies"] == project["optional-dependencies"]["hf"]
    assert hook["entry"] == "sqrtdk check --static"
    matches = re.compile(hook["files"])
    assert all(matches.search(path) for path in ("config.json", "models/a/config.json"))
    assert not any(matches.search(path) for path in ("tsconfig.json", "config.json.bak"))
