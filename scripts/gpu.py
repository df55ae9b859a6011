"""`make gpu`: the tests that need a GPU, then the benchmark, and the records of both, in at most ten minutes.

    python scripts/gpu.py FOLDER

Torch is taken as it is, never installed, of the first of these Pythons whose torch sees an NVIDIA GPU:

- the one that SQRTDK_TORCH names, and then no other;
- .venv, where the index that `make test` used gave torch for CUDA;
- the one that runs this.

What else the tests need is installed beside it into .venv-gpu where it is missing. Exit code 0: all passed; 1: a test
failed, or this kernel did not run a case; 2: nothing can run here, and nothing was installed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HERE, BESIDE = ROOT / ".venv" / "bin" / "python", ROOT / ".venv-gpu"
MOST_S, TESTS_S, SPARE_S = 570.0, 270.0, 15.0
OLDEST = (2, 11)
PROBE = """
import importlib.util, json, sys
told = {"python": list(sys.version_info[:2]), "torch": None}
try:
    import torch
    told |= {"torch": torch.__version__, "cuda": torch.version.cuda, "sees": torch.cuda.is_available()}
    told["folder"] = str(__import__("pathlib").Path(torch.__file__).parents[1])
    told["triton"] = importlib.util.find_spec("triton") is not None
    needed = ("numpy", "safetensors", "typer", "rich", "jinja2", "msgspec", "pytest", "xdist")
    told["missing"] = [name for name in needed if importlib.util.find_spec(name) is None]
except Exception as error:
    told["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(told))
"""
MACHINE = """
import json, pathlib, sys
import torch
sys.path.append(sys.argv[1] + "/benchmarks")
from gpu_record import machine
print(json.dumps(machine(torch.device("cuda", 0), pathlib.Path(sys.argv[1]))))
"""


def probe(python: str) -> dict[str, Any]:
    """What a Python says of its torch; `error` where it can't."""
    try:
        done = subprocess.run([python, "-W", "ignore", "-c", PROBE], capture_output=True, text=True, timeout=120)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        return {"error": f"it does not run: {type(error).__name__}"}
    return found


def obstacle(told: dict[str, Any]) -> str | None:
    """Why a Python is of no use; None where it is."""
    if "error" in told:
        return str(told["error"])
    if not told["sees"] or not told["cuda"]:
        built = f"for CUDA {told['cuda']}" if told["cuda"] else "without CUDA"
        return f"torch {told['torch']} (built {built}) sees no NVIDIA GPU"
    if tuple(told["python"]) < (3, 11):
        return f"Python {'.'.join(map(str, told['python']))} is older than 3.11"
    if tuple(int(part) for part in told["torch"].split(".")[:2]) < OLDEST:
        return f"torch {told['torch']} is older than {'.'.join(map(str, OLDEST))}"
    return None if told["triton"] else "Triton is missing, which torch for CUDA brings"


def chosen() -> tuple[str, dict[str, Any]] | str:
    """The Python to use and what it told; or, in one line, why there is none."""
    named = os.environ.get("SQRTDK_TORCH")
    candidates = [named] if named else [*([str(HERE)] if HERE.exists() else []), sys.executable]
    reasons = []
    for python in candidates:
        told = probe(python)
        reason = obstacle(told)
        if reason is None:
            return python, told
        reasons.append(f"{python}: {reason}")
    return (
        f"make gpu needs an NVIDIA GPU and torch {'.'.join(map(str, OLDEST))} or newer for CUDA: {'; '.join(reasons)}. "
        "SQRTDK_TORCH=/path/to/python names another Python."
    )


def complete(python: str, told: dict[str, Any]) -> str:
    """A Python with that torch and all that the tests need."""
    if not told["missing"]:
        return python
    print(f"Installing what the tests need beside torch {told['torch']} into .venv-gpu ...", flush=True)
    subprocess.run([python, "-m", "venv", str(BESIDE)], check=True)
    inside = str(BESIDE / "bin" / "python")
    command = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([inside, "-c", command], capture_output=True, text=True, check=True).stdout.strip()
    # A path file and not --system-site-packages: that Python may be one of a virtual environment itself.
    Path(site, "torch-of-another.pth").write_text(told["folder"] + "\n", encoding="utf-8")
    held = BESIDE / "constraints.txt"
    held.write_text(f"torch=={told['torch'].split('+')[0]}\n", encoding="utf-8")
    quiet = ["-m", "pip", "--disable-pip-version-check", "-qq", "install", "--constraint", str(held)]
    subprocess.run([inside, *quiet, "--editable", f"{ROOT}[test]"], check=True)
    again = probe(inside)
    if obstacle(again) or again["folder"] != told["folder"]:
        raise OSError(f"it does not take the torch of {told['folder']}: {obstacle(again)}")
    return inside


def tests(python: str, folder: Path, most_s: float) -> dict[str, Any]:
    """Run the marked tests: outcome of each, and the seconds that it took."""
    xml = folder / "tests.xml"
    xml.unlink(missing_ok=True)
    workers = str(min(8, os.cpu_count() or 1))
    command = [python, "-m", "pytest", "-q", "-m", "gpu", "--numprocesses", workers, f"--junitxml={xml}", "tests/gpu"]
    begin, late = time.monotonic(), False
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        code: int | None = process.wait(most_s)
    except subprocess.TimeoutExpired:
        late, code = True, None
        process.send_signal(signal.SIGINT)  # what ran is still written
        try:
            process.wait(SPARE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    found = {"exit_code": code, "cut_off": late, "seconds": round(time.monotonic() - begin, 1)}
    return found | outcomes(xml)


def outcomes(xml: Path) -> dict[str, Any]:
    """Counts by outcome, and every test that pytest wrote down, in its order."""
    rows = []
    for case in ElementTree.parse(xml).iter("testcase") if xml.exists() else ():
        other = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        row = {
            "test": f"{case.get('classname')}::{case.get('name')}",
            "outcome": "passed" if other is None else other.tag,
        }
        row["seconds"] = float(case.get("time") or 0.0)
        rows.append(row if other is None else row | {"reason": (other.get("message") or "")[:500]})
    counts = {name: sum(row["outcome"] == name for row in rows) for name in ("passed", "failure", "error", "skipped")}
    return {"counts": counts, "tests": rows}


def main(folder: Path) -> int:
    """See the module."""
    begin = time.monotonic()
    choice = chosen()
    if isinstance(choice, str):
        print(choice, file=sys.stderr)
        return 2
    try:
        python = complete(*choice)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"make gpu could not set up .venv-gpu: {error}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "HF_HUB_OFFLINE": "1"}
    os.environ.pop("TRITON_INTERPRET", None)

    ran = tests(python, folder, TESTS_S)
    done = subprocess.run(
        [python, "-W", "ignore", "-c", MACHINE, str(ROOT)], capture_output=True, text=True, check=True
    )
    machine = done.stdout.splitlines()[-1]
    record = {"record": "gpu-tests", "schema_version": 1, **json.loads(machine), **ran}
    (folder / "gpu-tests.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    left = MOST_S - (time.monotonic() - begin)
    workers = str(min(8, os.cpu_count() or 1))
    options = ["--budget", f"{left - SPARE_S:.0f}", "--prepare", workers, "--json", str(folder / "gpu.json")]
    try:
        code = subprocess.run([python, "benchmarks/gpu.py", *options], cwd=ROOT, timeout=left).returncode
    except subprocess.TimeoutExpired:
        print("The benchmark was cut off; its record holds what it had measured.", file=sys.stderr)
        code = 1
    counts = ran["counts"]
    print(f"Tests: {counts['passed']} passed, {counts['failure'] + counts['error']} failed. Records: {folder}")
    return 1 if ran["exit_code"] != 0 or code != 0 else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "out" / "gpu").resolve()))
