"""Laws of a server: each is kept by a right server, and broken by one that does exactly this wrong."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sqrtdk.answers import SERVER_LAWS, Server, ServerReport, check_server
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED
from sqrtdk.errors import InvalidValueError
from sqrtdk.report.server.json import to_json
from sqrtdk.report.server.terminal import to_text
from tests.servers.served import Served, model, serving
from tests.support.optional import jsonschema
from tests.support.program import called

ROOT = Path(__file__).parents[2]
FAULTS = ("repeats", "prefix", "decoding", "batch", "lengths", "prefix_cache", "chunks")
ALSO = {  # laws that the fault of another one breaks as well
    "repeats": {*SERVER_LAWS} - {"reach", "repeats"},  # nothing is steady then
    "batch": {"lengths"},
    "prefix_cache": {"chunks"},
    "prefix": {"lengths"},
}
SHORT = {"characters": 160}


@pytest.fixture(scope="module")
def decoder() -> Any:
    return model()


def report_of(decoder: torch.nn.Module, kind: str, fault: str = "", laws: str = "all", **how: Any) -> ServerReport:
    with serving(Served(decoder, fault, **how)) as url:
        return check_server(Server(url, kind=kind), laws, **SHORT)


def states(report: ServerReport) -> dict[str, str]:
    return {answer.law: answer.state for answer in report.laws}


def test_a_right_server_breaks_no_law_and_a_wrong_one_does(decoder: Any) -> None:
    assert states(report_of(decoder, "vllm", laws="prefix,chunks")) == {"prefix": KEPT, "chunks": KEPT}
    report = report_of(decoder, "vllm", "chunks", "prefix,chunks")
    assert states(report) == {"prefix": KEPT, "chunks": BROKEN}
    assert report.exit_code == 1


@pytest.mark.full
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_right_server_keeps_every_law(kind: str, decoder: Any) -> None:
    report = report_of(decoder, kind)
    told = states(report)
    # whether prompts ran together is read off a clock, on a machine that may be busy
    assert {law for law, state in told.items() if state != KEPT} <= {"batch", "lengths"}
    assert not report.broken
    assert report.exit_code == 0
    assert report.requests <= sum(law.requests for law in SERVER_LAWS.values())
    assert report.tokens > 0


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_each_law_has_a_server_that_breaks_it(fault: str, decoder: Any) -> None:
    told = states(report_of(decoder, "vllm", fault))
    broken = {law for law, state in told.items() if state == BROKEN}
    assert fault in broken, told
    assert broken <= {fault} | ALSO.get(fault, set()), told


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama-server", "ollama", "tgi", "completions", "chat", "openai", "tgi-prefill"])
def test_what_a_kind_leaves_empty_is_not_asked(kind: str, decoder: Any) -> None:
    report = report_of(decoder, kind)
    asked = {answer.law: answer for answer in report.laws}
    assert not report.broken
    whole = kind in ("openai", "tgi-prefill")
    assert (asked["prefix"].state, asked["reach"].state) == ((KEPT, KEPT) if whole else (NOT_ASKED, NOT_ASKED))
    assert asked["chunks"].state == (KEPT if kind == "llama-server" else NOT_ASKED)
    assert asked["prefix_cache"].state == (KEPT if kind == "llama-server" else NOT_ASKED)
    assert all(answer.reason for answer in report.laws if answer.state == NOT_ASKED)


@pytest.mark.full
def test_a_cache_that_is_not_read_and_prompts_one_by_one_are_not_asked(decoder: Any) -> None:
    class Bare(Served):
        def cached(self, ids: list[int], name: Any) -> int:
            return 0

        def run(self, batch: list[dict[str, Any]]) -> None:
            time.sleep(0.1)  # what a prompt takes, whatever else this machine does
            super().run(batch)

    with serving(Bare(decoder, batches=False)) as url:
        report = check_server(Server(url, kind="vllm"), "batch,lengths,prefix_cache,chunks", **SHORT)
    ids = {answer.law: answer.reason.id for answer in report.laws}  # type: ignore[attr-defined]
    assert ids == {
        "batch": "servers.laws.one_by_one", "lengths": "servers.laws.one_by_one",
        "prefix_cache": "servers.laws.cache_unread", "chunks": "servers.laws.cache_unread",
    }  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("layers", "window"), [(1, 24), (2, 24), (2, None)])
def test_the_range_of_dependence_shows_a_window(layers: int, window: int | None) -> None:
    report = report_of(model(layers, window), "vllm", laws="reach", batches=False)
    (answer,) = report.laws
    assert answer.state == KEPT
    read = int(answer.reason.values["tokens"])  # type: ignore[attr-defined]
    if window is None:
        assert answer.reason.id == "servers.reach.whole"
        assert read > 140
        return
    most = layers * (window - 1)  # a window of w lets a token see w - 1 back, in each layer
    assert answer.reason.id == "servers.reach.bounded"
    assert most - 2 <= read <= most


def test_names_lengths_and_limits_are_checked_before_anything_is_sent() -> None:
    server = Server("http://127.0.0.1:9", most=10)
    with pytest.raises(InvalidValueError, match="no law 'reech'; did you mean 'reach'"):
        check_server(server, "reech")
    with pytest.raises(InvalidValueError, match="8 characters are too short"):
        check_server(server, characters=8)
    with pytest.raises(InvalidValueError, match="43 requests are needed; 10 of 10 are left"):
        check_server(server)
    assert server.requests == 0


def test_the_command_line(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQRTDK_SERVER_KEY", "sk-secret")
    short = "--server-characters", "160"
    with serving(Served(decoder, "prefix", batches=False)) as url:
        done = called("check", url, "--server-kind", "openai", "--laws", "prefix,repeats", *short)
        assert done.returncode == 1
        assert "broken: critical" in done.stdout
        assert "repeats  kept" in done.stdout
        assert done.stderr == f"up to 6 requests of {url}, prompts of 160 characters; 200 are allowed\n"
        done = called(
            "check", url, "--server-kind", "openai", "--laws", "prefix", *short, "--json", "--fail-on", "never"
        )
        assert done.returncode == 0
        told = called("check", url, "--server-kind", "openai", "--laws", "prefix", *short, "--lang", "zh")
        assert "前缀（prefix）" in told.stdout
        assert "处理办法" in told.stdout
    document = json.loads(done.stdout)
    schema = json.loads((ROOT / "docs" / "server.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(document)
    assert document["laws"][0]["state"] == "broken"
    assert "secret" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "line", ["check URL --seq-len 8", "check URL --html a.html", "check URL demo", "check demo --server-kind vllm",
             "check URL --baseline b.json", "diff demo demo --server-requests 3", "check URL?key=1",
             "check URL --laws none"]
)  # fmt: skip
def test_options_that_do_not_fit_are_refused_before_anything_is_sent(line: str) -> None:
    done = called(*line.replace("URL", "http://127.0.0.1:9").split())
    assert done.returncode == 2
    assert "Error:" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_report_is_drawn_and_written_without_a_law() -> None:
    empty = ServerReport("http://127.0.0.1:8000/v1", "vllm", "org/model", ())
    assert "org/model" in to_text(empty)
    assert json.loads(to_json(empty))["laws"] == []
