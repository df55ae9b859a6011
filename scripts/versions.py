"""Run the core of the tests with other versions of Python, torch, transformers, numpy and JAX, each on its own.

    python scripts/versions.py                  # all of them
    python scripts/versions.py oldest middle    # these; the record keeps the rest
    python scripts/versions.py oldest --folder tests/trace    # this folder; the record keeps the others of the same

ENVIRONMENTS lists them. "pinned" is the version of constraints.txt, and of Python the one that runs this; "oldest" is
the bound of pyproject.toml; "middle" is that of MIDDLE; "newest" is what pip takes without a pin, and of Python the
first of PYTHONS on the PATH. The oldest of all stand in one environment, as do those of the middle.
The environments go into out/versions (SQRTDK_VERSIONS names another folder) and stay there. On Linux an index hands out
the CUDA build of torch, five gigabytes an environment, unless pip is set up for a build without CUDA.

FOLDERS are run one after another with the default marks, by JOBS workers; the record has a date for each. Each
environment has sqrtdk with the extras EXTRAS and the packages NEEDED of the extra `test`, no more; tests that need
another package, or a newer one, are skipped, as their reasons say. An environment of another JAX has the packages
JAX_NEEDED too, and runs JAX_FOLDERS alone.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from sqrtdk._environment import cpu_name

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "versions.json"
FOLDERS = (
    "tests/attention",
    "tests/trace",
    "tests/audit",
    "tests/integrations",
    "tests/laws",
    "tests/nn",
    "tests/stats",
    "tests/scores",
)
PYTHONS = ("python3.14", "python3.13", "python3.12")
MIDDLE = {"torch": "2.8.0", "transformers": "4.57.1", "numpy": "2.0.2"}
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
COLUMNS = ("python", "torch", "transformers", "numpy", "passed", "failed", "skipped", "minutes")  # of the printed table
JAX_FOLDERS = ("tests/frontends",)
JAX_NEEDED = ("equinox", "msgpack")
ASK = """
import importlib.util, json, platform, numpy, torch, transformers
found = {"python": platform.python_version()}
found |= {module.__name__: module.__version__ for module in (torch, transformers, numpy)}
if importlib.util.find_spec("jax"):
    import jax
    found["jax"] = jax.__version__
print(json.dumps(found))
"""
VERSIONS = ("python", "torch", "transformers", "numpy", "jax")  # that it may find


@dataclass(frozen=True)
class Environment:
    """What is installed: each "pinned", "oldest", "middle" or "newest"."""

    name: str
    python: str = "pinned"
    torch: str = "pinned"
    transformers: str = "pinned"
    numpy: str = "pinned"
    jax: str = "pinned"

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of tests that run."""
        return FOLDERS if self.jax == "pinned" else JAX_FOLDERS

    @property
    def needed(self) -> tuple[str, ...]:
        """The packages of the extra `test`; an older torch brings the Triton that it can work with."""
        older = self.torch in ("oldest", "middle")
        names = tuple(name for name in NEEDED if not (older and name == "triton"))
        return names if self.jax == "pinned" else (*names, *JAX_NEEDED)


ENVIRONMENTS = (
    Environment("pinned"),
    Environment("newest-transformers", transformers="newest"),
    Environment("newest-torch", torch="newest"),
    Environment("newest-python", python="newest"),
    Environment("middle", torch="middle", transformers="middle", numpy="middle"),
    Environment("oldest", python="oldest", torch="oldest", transformers="oldest", numpy="oldest"),
    Environment("newest-jax", jax="newest"),
    Environment("oldest-jax", jax="oldest"),
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
    for package in ("torch", "transformers", "numpy", "jax"):
        wanted = getattr(environment, package)
        if wanted == "newest":
            pins[package] = newest(package, python)
        elif wanted == "oldest":
            pins[package] = _oldest(package)
        elif wanted == "middle":
            pins[package] = MIDDLE[package]
    pins["jaxlib"] = pins["jax"]
    return "".join(f"{package}=={version}\n" for package, version in pins.items())


def _oldest_python() -> str:
    found = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found is not None, "pyproject.toml has no oldest Python"
    return found[1]


def _requirements(names: Sequence[str] = NEEDED) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = project["optional-dependencies"]["test"]
    named = {re.split(r"[^\w-]", requirement)[0]: requirement for requirement in listed}
    return [named[name] for name in names]


def _python(wanted: str) -> str:
    if wanted == "pinned":
        return sys.executable
    names = PYTHONS if wanted == "newest" else (f"python{_oldest_python()}",)
    for name in names:
        found = shutil.which(name)
        code = "import ensurepip, sys, venv; print(sys.executable)"
        if found and subprocess.run([found, "-c", code], capture_output=True, check=False).returncode == 0:
            return found
    raise NotAvailableError(f"none of {', '.join(names)} is here, with venv")


def make(environment: Environment, folder: Path) -> Path:
    """Make an environment, unless it is there, and return its Python; a stamp says what it was made from."""
    base = _python(environment.python)
    pinned = constraints(environment, base)
    python, stamp = folder / "bin" / "python", folder / ".whole"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    alone = dict(re.findall(r"^(VIT_PYTORCH|FLAX) := (.+)$", makefile, re.MULTILINE))
    of_jax = environment.jax != "pinned"
    steps = (
        ["torch"],
        [
            "--editable", f"{ROOT}[{','.join((*EXTRAS, 'jax') if of_jax else EXTRAS)}]",
            *_requirements(environment.needed),
        ],
        ["--no-deps", alone["VIT_PYTORCH"], *(alone["FLAX"].split() if of_jax else ())],
    )  # fmt: skip
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


def run_tests(python: Path, tests: str, folder: Path) -> dict[str, Any]:
    """Run a folder of tests with a Python, and return what they said; all of it lies in pytest.txt in the other."""
    report, log = folder / "junit.xml", folder / "pytest.txt"
    folder.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    command += [f"--sample-seed={SAMPLE_SEED}", f"--numprocesses={os.environ.get('JOBS', '2')}", tests]
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


def whole(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The folders' runs as one: their sums, and what failed in each."""
    reasons = [run["reason"] for run in runs.values() if "reason" in run]
    return {
        "outcome": "ok" if all(run["outcome"] == "ok" for run in runs.values()) else "failed",
        **({"reason": "; ".join(reasons)} if reasons else {}),
        **{count: sum(run.get(count, 0) for run in runs.values()) for count in ("passed", "failed", "skipped")},
        "failures": [failure for run in runs.values() for failure in run.get("failures", ())],
        "minutes": round(sum(run["minutes"] for run in runs.values()), 1),
        "folders": list(runs),
        "runs": dict(runs),
    }


def try_out(
    environment: Environment, place: Path, folders: Sequence[str] = (), kept: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Make an environment and run the tests in it, unless it is the pinned one by another name: after each folder the
    entry of the record. Of the kept entry the other folders stay, where its versions are the same."""
    today = date.today().isoformat()
    entry = {"name": environment.name, "date": today}
    pinned = ENVIRONMENTS[0]
    try:
        base = _python(environment.python)
        alike = environment != pinned and base == _python(pinned.python)
        if alike and constraints(environment, base) == constraints(pinned, base):
            yield entry | {"outcome": "same", "reason": pinned.name}
            return
        python = make(environment, place / environment.name)
    except NotAvailableError as reason:
        yield entry | {"outcome": "not available", "reason": str(reason)}
        return
    found = json.loads(subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=True).stdout)
    before = kept or {}
    runs = (
        before.get("runs", {}) if folders and found == {key: before[key] for key in VERSIONS if key in before} else {}
    )
    for tests in folders or environment.folders:
        ran = {"date": today} | run_tests(python, tests, place / environment.name / "log" / Path(tests).name)
        runs = {name: ran if name == tests else runs[name] for name in environment.folders if name in {*runs, tests}}
        yield entry | found | whole(runs)


def line(entry: dict[str, Any]) -> str:
    """A line of the printed table."""
    cells = "".join(f"{entry.get(name, '')!s:>13}" for name in COLUMNS)
    return f"{entry['name']:20}{cells}  {entry['outcome']} {entry.get('reason', '')}".rstrip()


def main() -> int:
    """Run them, print the table, and keep the record."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [environment.name for environment in ENVIRONMENTS]
    options.add_argument("environments", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all by default")
    options.add_argument("--folder", action="append", default=[], help="of the tests; all by default")
    options.add_argument("--output", type=Path, default=RECORD)
    arguments = options.parse_args()
    if unknown := set(arguments.environments) - set(names):
        options.error(f"no environment is called {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    if unknown := set(arguments.folder) - {each for environment in ENVIRONMENTS for each in environment.folders}:
        options.error(f"no folder of these tests is called {', '.join(sorted(unknown))}")

    place = Path(os.environ.get("SQRTDK_VERSIONS", ROOT / "out" / "versions")).absolute()
    place.mkdir(parents=True, exist_ok=True)
    entries: dict[str, dict[str, Any]] = {}
    cpus = [cpu_name()]
    if (arguments.environments or arguments.folder) and arguments.output.exists():
        kept = json.loads(arguments.output.read_text(encoding="utf-8"))
        entries = {entry["name"]: entry for entry in kept["environments"]}
        cpus = sorted({*cpus, *kept["cpu"].split(", ")})
    chosen = [each for each in ENVIRONMENTS if each.name in (arguments.environments or names)]
    for environment in chosen:
        folders = [each for each in environment.folders if each in arguments.folder]
        if arguments.folder and not folders:
            continue
        for entry in try_out(environment, place, folders, entries.get(environment.name)):
            entries[environment.name] = entry
            print(line(entry), flush=True)
            record = {
                "date": date.today().isoformat(),
                "cpu": ", ".join(cpus),
                "environments": [entries[name] for name in names if name in entries],
            }
            arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"\n{'':20}" + "".join(f"{title:>13}" for title in COLUMNS))
    print("\n".join(line(entries[name]) for name in names if name in entries))
    outcomes = [entries[each.name]["outcome"] for each in chosen if each.name in entries]
    return 1 if "failed" in outcomes or "ok" not in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
