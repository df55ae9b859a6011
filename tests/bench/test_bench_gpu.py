"""The benchmark for GPUs: its flow runs in the interpreter, its targets are judged, and its record is what is said."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu
import gpu_record
import gpu_ways
from peers import sdpa
from sqrtdk.errors import InvalidValueError
from tests.support.triton_here import needs_triton
from ways import BASE, Way

ROOT = Path(__file__).parents[2]


def text_of(name: str) -> str:
    """In one line, without the marks of lists."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").replace("\n- ", "\n").split())


# what is said


@pytest.mark.parametrize("name", ["README.md", "docs/en/limits.md", "docs/en/kernels.md"])
def test_pages_say_what_the_record_does(name: str) -> None:
    record = gpu_record.read()
    assert (record is None) is not gpu_record.RECORD.exists()
    assert gpu_record.sentence(record) in text_of(name)
    assert (gpu_record.NOT_MEASURED in text_of(name)) is (record is None)


@pytest.mark.parametrize("name", ["README.zh-CN.md", "docs/zh/limits.md", "docs/zh/kernels.md"])
def test_the_chinese_pages_say_so_too(name: str) -> None:
    assert ("尚未在 GPU 上测量" in text_of(name)) is (gpu_record.read() is None)


def cells(**ms: dict[str, float]) -> list[dict[str, Any]]:
    """Cells of the forward pass, by case and way."""
    return [
        {
            "case": case.replace("_", "-"),
            "pass": "forward",
            "ways": {
                way.replace("_", "-"): {"ms": {"median": t}, "tflops": 400.0 / t, "seconds": [t, 2 * t]}
                for way, t in ways.items()
            },
            "not_measured": {},
        }
        for case, ways in ms.items()
    ]


def covered(name: str) -> list[str]:
    return [case for case, shape in gpu.CASES.items() if gpu.TARGETS[name].covers(shape)]


def test_a_record_is_told_with_the_figure_of_every_target(tmp_path: Path) -> None:
    targets = [gpu.judged(name, []) for name in gpu.TARGETS]
    targets[0] |= {"figure": 431.26, "met": True}
    targets[1] |= {"figure": 1.2, "met": False}
    record = {
        "schema_version": 1,
        "check": False,
        "device": {"name": "NVIDIA H200"},
        "versions": {"torch": "2.13.0+cu130"},
        "targets": targets,
    }
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(record))
    said = gpu_record.sentence(gpu_record.read(path))
    assert said.startswith("Measured on one NVIDIA H200 in bfloat16, torch 2.13.0+cu130: all statistics, forward")
    assert "at least 400 TFLOP/s: 431.3 TFLOP/s, met; " in said
    assert "at most 1.12: 1.2 times, missed; " in said
    assert said.count("not measured") == len(targets) - 2
    assert said.endswith(f" 1 of {len(targets)} targets are met.")


@pytest.mark.parametrize("text", ["", "[]", '{"check": false}', '{"schema_version": 2, "check": false}'])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match=r"gpu\.json is no record|gpu\.json is a record of version 2"):
        gpu_record.read(path)


def test_the_pages_have_the_targets() -> None:
    bars = []
    for target in gpu.TARGETS.values():
        what, _, bar = target.text.rpartition(", ")
        assert f"| {what} | {bar} |" in text_of("docs/en/kernels.md")
        bars.append(bar.replace("at least", "至少").replace("at most", "至多"))
    assert re.findall(r"\| (至[少多] [^|]+) \|", text_of("docs/zh/kernels.md")) == bars


# targets


def test_the_worst_case_decides() -> None:
    cases = covered("statistics")
    assert {"4096-128", "4096-128-causal", "8192-128", "16384-128", "gqa"} <= set(cases)
    assert not {"2048-128", "4096-64", "decode-1"} & set(cases)
    ways = {case: {"ours": 1.0, "ours-stats": 1.1} for case in cases}
    good = gpu.judged("statistics", cells(**ways))
    assert (good["met"], good["missing"]) == (True, [])
    assert good["figure"] == pytest.approx(1.1)
    bad = gpu.judged("statistics", cells(**(ways | {"8192-128": {"ours": 1.0, "ours-stats": 1.13}})))
    assert (bad["met"], bad["worst"]) == (False, "8192-128")
    del ways["gqa"]
    assert gpu.judged("statistics", cells(**ways))["met"] is None  # nothing missed, and not all was measured
    assert gpu.judged("statistics", [])["figure"] is None
    bad = gpu.judged("statistics", cells(**{"4096-128": {"ours": 1.0, "ours-stats": 2.0}}))
    assert bad["met"] is False


def test_a_rate_is_a_least_and_peers_are_the_fastest() -> None:
    ways = {case: {"ours-stats": 0.9} for case in covered("rate")}
    assert gpu.judged("rate", cells(**ways))["met"] is True
    slow = gpu.judged("rate", cells(**(ways | {"gqa": {"ours-stats": 1.1}})))
    assert (slow["met"], slow["worst"], slow["unit"]) == (False, "gqa", "TFLOP/s")
    thrice = {case: {"ours-stats": 1.0, "cudnn-thrice": 3.0, "flash-thrice": 1.4} for case in covered("thrice")}
    assert gpu.judged("thrice", cells(**thrice))["figure"] == pytest.approx(1.4)
    assert gpu.judged("thrice", cells(**thrice))["met"] is False


def test_operations_are_of_the_products_alone() -> None:
    full, causal = gpu.CASES["4096-128"], gpu.CASES["4096-128-causal"]
    assert gpu.operations(full, False) == 4 * 2 * 32 * 4096**2 * 128
    assert gpu.operations(full, True) == 3.5 * gpu.operations(full, False)
    assert gpu.operations(causal, False) == gpu.operations(full, False) * 4097 / 8192


# the flow


@pytest.mark.full
@needs_triton
def test_the_whole_flow_runs_in_the_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    ways = "ours-stats,flash,cudnn,flash-thrice,dense,measure"
    arguments = ["--check", "--cases", "2048-64-causal,decode-1", "--ways", ways, "--json", str(path)]
    with torch._dynamo.config.patch(recompile_limit=8):  # it sets another; pytest's monkeypatch would delete it
        assert gpu.main(arguments) == 0
    shown = capsys.readouterr().out
    record = json.loads(path.read_text())
    ran = {(cell["case"], cell["pass"]): set(cell["ways"]) for cell in record["cells"]}
    ours = {BASE, "ours-stats", "flash"}
    assert ran == {
        ("2048-64-causal", "forward"): ours | {"flash-thrice", "dense", "measure"},
        ("2048-64-causal", "training"): ours,
        ("decode-1", "forward"): ours | {"dense", "measure"},
    }
    assert all("cudnn" in cell["not_measured"] for cell in record["cells"])
    assert [target["name"] for target in record["targets"]] == list(gpu.TARGETS)
    assert record["commit"].keys() == {"id", "changed"}
    assert " ms" not in shown
    assert "TFLOP/s:" not in shown.replace("400 TFLOP/s: dry run", "")
    with pytest.raises(InvalidValueError, match="dry run"):
        gpu_record.read(path)


def test_a_way_that_disagrees_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Way("wrong", lambda case: lambda: 1.1 * sdpa(case)(), peer=True)
    monkeypatch.setitem(gpu_ways.FORWARD, "ours", wrong)
    options = gpu.parsed(["--check", "--cases", "2048-64", "--ways", "ours"])
    cell = gpu.timed("2048-64", "forward", options)
    assert cell["ways"] == {}
    assert "ours and sdpa differ" in cell["not_measured"]["all"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["dense", "flash-thrice"])
def test_what_users_do_today_gives_the_output(name: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ways, "LARGEST_CHUNK", 3 * 16 * 16)  # three heads at a time
    heads = 2 if name == "flash-thrice" else 4
    shape = replace(gpu.CASES["4096-64"], length=16, keys=16, width=8, heads=heads, key_heads=2, is_causal=causal)
    case = gpu.tensors(shape, False, torch.device("cpu"))
    found, wanted = gpu_ways.FORWARD[name].make(case)(), sdpa(case)()
    assert (found.float() - wanted.float()).abs().max() < 4 * torch.finfo(torch.bfloat16).eps * wanted.abs().max()


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_without_a_gpu_the_benchmark_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        gpu.main([])
    assert raised.value.code == 2
    assert capsys.readouterr() == ("", "torch sees no GPU; --check runs the flow on the CPU and measures nothing\n")


def test_the_machine_is_told(tmp_path: Path) -> None:
    told = gpu_record.machine(torch.device("cpu"), ROOT)
    assert told["versions"]["torch"] == torch.__version__
    assert told["device"]["kind"] == "cpu"
    assert gpu_record.commit(tmp_path) == {"id": None, "changed": None}
    assert set(gpu_record.clocks(torch.device("cpu"))) == {"at"}
