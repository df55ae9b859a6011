"""Run the core of the tests with other versions of Python, torch and transformers, each in an environment of its own.

    python scripts/versions.py                             # all of them
    python scripts/versions.py oldest-torch newest-torch   # these; the record keeps the rest

ENVIRONMENTS lists them. "pinned" is the version of constraints.txt, and of Python the one that runs this; "oldest" is
the bound of pyproject.toml; "newest" is what pip takes without a pin, and of Python the first of PYTHONS on the PATH.
The environments go into out/versions (SQRTDK_VERSIONS names another folder) and stay there. On Linux an index hands out
the CUDA build of torch, five gigabytes an environment, unless pip is set up for a build without CUDA.

FOLDERS are run with the default marks, by JOBS workers. Each environment has sqrtdk with the extras EXTRAS and the
packages NEEDED of the extra `test`, no more; tests that need another package are skipped, as their reasons say.

The record goes to benchmarks/results/versions.json; `python scripts/versions_page.py` puts it into docs/en/limits.md.
The exit code is 1 if a test failed, or no environment ran.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from sqrtdk._environment import cpu_name

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "versions.json"
FOLDERS = ("tests/attention", "tests/trace", "tests/audit", "tests/integrations")
PYTHONS = ("python3.14", "python3.13", "python3.12")
EXTRAS = ("hf", "watch")
SAMPLE_SEED = 0  # every environment runs the same cases of the long matrices
NEEDED = (
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "jaxtyping",
    "beartype",
    "jsonschema",
    "filelock",
    "omegaconf",
    "einops",
    "x-transformers",
    "triton",
)
ASK = """
import json, platform, torch, transformers
print(json.dumps({"python": platform.python_version(), "torch": torch.__version__,
                  "transformers": transformers.__version__}))
"""


@dataclass(frozen=True)
class Environment:
    """What is installed: each "pinned", "oldest" or "newest"."""

    name: str
    python: str = "pinned"
    torch: str = "pinned"
    transformers: str = "pinned"


ENVIRONMENTS = (
    Environment("pinned"),
    Environment("newest-transformers", transformers="newest"),
    Environment("oldest-transformers", transformers="oldest"),
    Environment("newest-torch", torch="newest"),
    Environment("oldest-torch", torch="oldest"),
    Environment("newest-python", python="newest"),
)


class NotAvailableError(Exception):
    """Why an environment is not to be had on this machine."""


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def _oldest(package: str) -> str:
    """The bound of pyproject.toml as a release: 2.11 is 2.11.0."""
    found = re.search(rf'"{package}>=([\d.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found is not None, f"pyproject.toml has no oldest {package}"
    return ".".join((*found[1].split("."), "0", "0")[:3])


def newest(package: str, python: str) -> str:
    """The version that pip installs without a pin."""
    pip = (python, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--dry-run", "--ignore-installed")
    report: dict[str, Any] = json.loads(_run(*pip, "--no-deps", "--report", "-", package))
    return str(report["install"][0]["metadata"]["version"])


def constraints(environment: Environment, python: str) -> str:
    """The constraints file of an environment."""
    pins = _pins()
    if environment.torch != "pinned":
        pins.pop("triton", None)  # each torch has its own
    for package in ("torch", "transformers"):
        wanted = getattr(environment, package)
        if wanted == "newest":
            pins[package] = newest(package, python)
        elif wanted == "oldest":
            pins[package] = _oldest(package)
    return "".join(f"{package}=={version}\n" for package, version in pins.items())


def _requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = project["optional-dependencies"]["test"]
    named = {re.split(r"[^\w-]", requirement)[0]: requirement for requirement in listed}
    return [named[name] for name in NEEDED]


def _python(wanted: str) -> str:
    if wanted == "pinned":
        return sys.executable
    for name in PYTHONS:
        found = shutil.which(name)
        code = "import ensurepip, sys, venv; print(sys.executable)"
        if found and subprocess.run([found, "-c", code], capture_output=True, check=False).returncode == 0:
            return found
    raise NotAvailableError(f"none of {', '.join(PYTHONS)} is here, with venv")


def make(environment: Environment, folder: Path) -> Path:
    """Make an environment, unless it is there, and return its Python; a stamp says what it was made from."""
    base = _python(environment.python)
    pinned = constraints(environment, base)
    python, stamp = folder / "bin" / "python", folder / ".whole"
    vit = re.search(r"^VIT_PYTORCH := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert vit is not None
    steps = (
        ["torch"],
        ["--editable", f"{ROOT}[{','.join(EXTRAS)}]", *_requirements()],
        ["--no-deps", vit[1]],
    )
    made_from = f"{base}\n{pinned}{steps}"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == made_from:
        return python
    print(f"Making {folder} ...", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run(base, "-m", "venv", folder)
    (folder / "constraints.txt").write_text(pinned, encoding="utf-8")
    for step in steps:
        pip = (python, "-m", "pip", "--disable-pip-version-check", "-q", "install")
        _run(*pip, "--constraint", folder / "constraints.txt", *step)
    stamp.write_text(made_from, encoding="utf-8")
    return python


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise NotAvailableError(([line for line in lines if line.startswith("ERROR:")] or lines or ["no output"])[-1])
    return done.stdout


def run_tests(python: Path, folder: Path) -> dict[str, Any]:
    """Run the tests with a Python, and return what they said; all of it lies in pytest.txt in the folder."""
    report, log = folder / "junit.xml", folder / "pytest.txt"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    command += [f"--sample-seed={SAMPLE_SEED}", f"--numprocesses={os.environ.get('JOBS', '2')}", *FOLDERS]
    variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | os.environ
    variables["PATH"] = f"{python.parent}{os.pathsep}{variables['PATH']}"
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT, check=False)
    minutes = round((time.monotonic() - start) / 60, 1)
    if not report.exists():
        return {"outcome": "failed", "reason": f"pytest ended with {done.returncode}: {log}", "minutes": minutes}
    counts: Counter[str] = Counter()
    failures = []
    for case in ElementTree.parse(report).iter("testcase"):
        state = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        counts[state] += 1
        if state in ("failure", "error"):
            failures.append(f"{case.get('classname')}.{case.get('name')}")
    return {
        "outcome": "ok" if done.returncode == 0 and counts["passed"] else "failed",
        "passed": counts["passed"],
        "failed": len(failures),
        "failures": failures,
        "skipped": counts["skipped"],
        "minutes": minutes,
    }


def try_out(environment: Environment, folder: Path) -> dict[str, Any]:
    """Make an environment and run the tests in it, unless it is the pinned one by another name."""
    entry = {"name": environment.name, "date": date.today().isoformat()}
    pinned = ENVIRONMENTS[0]
    try:
        base = _python(environment.python)
        alike = environment != pinned and base == _python(pinned.python)
        if alike and constraints(environment, base) == constraints(pinned, base):
            return entry | {"outcome": "same", "reason": pinned.name}
        python = make(environment, folder / environment.name)
    except NotAvailableError as reason:
        return entry | {"outcome": "not available", "reason": str(reason)}
    versions = json.loads(subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=True).stdout)
    return entry | versions | run_tests(python, folder / environment.name)


def line(entry: dict[str, Any]) -> str:
    """A line of the printed table."""
    cells = [entry.get(name, "") for name in ("python", "torch", "transformers", "passed", "failed", "skipped")]
    cells += [entry.get("minutes", ""), entry["outcome"], entry.get("reason", "")]
    return f"{entry['name']:20}" + "".join(f"{cell!s:>13}" for cell in cells[:7]) + "  " + " ".join(cells[7:])


def main() -> int:
    """Run them, print the table, and keep the record."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [environment.name for environment in ENVIRONMENTS]
    options.add_argument("environments", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all by default")
    options.add_argument("--output", type=Path, default=RECORD)
    arguments = options.parse_args()
    if unknown := set(arguments.environments) - set(names):
        options.error(f"no environment is called {', '.join(sorted(unknown))}: there are {', '.join(names)}")

    folder = Path(os.environ.get("SQRTDK_VERSIONS", ROOT / "out" / "versions")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    entries: dict[str, dict[str, Any]] = {}
    if arguments.environments and arguments.output.exists():
        kept = json.loads(arguments.output.read_text(encoding="utf-8"))["environments"]
        entries = {entry["name"]: entry for entry in kept}
    chosen = [each for each in ENVIRONMENTS if each.name in (arguments.environments or names)]
    for environment in chosen:
        entries[environment.name] = try_out(environment, folder)
        print(line(entries[environment.name]), flush=True)
        record = {
            "date": date.today().isoformat(),
            "cpu": cpu_name(),
            "folders": FOLDERS,
            "environments": [entries[name] for name in names if name in entries],
        }
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    titles = ("python", "torch", "transformers", "passed", "failed", "skipped", "minutes")
    print(f"\n{'':20}" + "".join(f"{title:>13}" for title in titles))
    print("\n".join(line(entries[name]) for name in names if name in entries))
    outcomes = [entries[environment.name]["outcome"] for environment in chosen]
    return 1 if "failed" in outcomes or "ok" not in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
