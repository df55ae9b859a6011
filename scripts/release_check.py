"""The release checklist: build wheels and sdist, look into them, install each in clean environments, run them.

The library is tried alone first, without what the lab needs, and then with the wheel of the lab. Each extra is then
tried alone with this Python and the pinned torch: release_extras.py says what it has to run.

    python scripts/release_check.py                 # each Python from 3.10 to 3.14 and each torch that is to be had
    python scripts/release_check.py --python python3.12 --torch 2.13.0
    python scripts/release_check.py --cuda          # also where the index has the CUDA build of torch alone (gigabytes)

It needs hatchling (in the extra `dev`), and the index that pip is set up for. The environments go into out/release, and
so does release.json, with what each combination said. What is not to be had is told with its reason, and makes the exit
code 0 only if at least one combination ran: 1 says that a step failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from install_lines import PUBLISHED
from page_programs import programs
from release_extras import PROGRAMS

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OLDEST_TORCH = "2.6.0"
PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13", "python3.14")
IN_WHEEL = ("py.typed", "report/templates/report.html", "messages/words/check.toml")
IN_LAB = ("py.typed", "report/templates/lab.html", "catalogue/lab.toml", "claims/grad_norm.toml")
OF_LAB = ("scipy", "sklearn", "matplotlib", "latex2mathml", "sqrtdk_lab")  # what the library alone does without
IN_SDIST = ("README.md", "README.zh-CN.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "CONTRIBUTING.md")
NOT_PACKED = re.compile(r"(^|/)(\.git|\.venv|out|__pycache__)/|\.pyc$")
# What a user does first; the exit code that each has to have.
COMMANDS = (
    (["--help"], 0), (["env"], 0), (["check", "demo"], 0), (["check", "demo:unscaled"], 1),
    (["diff", "demo", "demo:unscaled"], 1), (["kv", "demo"], 0), (["lab", "list"], 2),
)  # fmt: skip
LAB_COMMANDS = ((["lab", "--help"], 0), (["lab", "list"], 0), (["lab", "show", "grad-norm"], 0), (["app", "-h"], 0))


@dataclass(frozen=True)
class Outcome:
    """What one step said: "ok", "failed" or "not available", and why."""

    step: str
    outcome: str
    reason: str = ""


def _run(*command: str | Path, timeout: float = 1200, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout, check=False)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no output"])[-1]


def build(folder: Path) -> list[Path]:
    """Build sdist and wheel, as an index would get them."""
    done = _run(sys.executable, "-m", "hatchling", "build", "-d", folder, "-t", "sdist", "-t", "wheel")
    if done.returncode:
        raise SystemExit(f"The build failed:\n{done.stdout}{done.stderr}")
    done = _run(sys.executable, "-m", "pip", "-q", "wheel", "--no-deps", "--wheel-dir", folder, ROOT / "lab")
    if done.returncode:
        raise SystemExit(f"The build of the lab failed:\n{done.stdout}{done.stderr}")
    return [next(folder.glob(name)) for name in ("*.tar.gz", "sqrtdk-*.whl", "sqrtdk_lab-*.whl")]


def inspect(sdist: Path, wheel: Path, lab: Path) -> list[Outcome]:
    """Say whether all hold what they should, and the papers agree on the version."""
    with tarfile.open(sdist) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    with zipfile.ZipFile(wheel) as archive:
        members = set(archive.namelist())
        name = next(member for member in members if member.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    with zipfile.ZipFile(lab) as archive:
        of_lab = set(archive.namelist())
    version = PROJECT["version"]
    wrong = {
        "the lab's wheel holds pages, claims, words and types": [
            name for name in IN_LAB if f"sqrtdk_lab/{name}" not in of_lab
        ],
        "both have one version": [] if f"-{version}-" in lab.name else [lab.name],
        "wheel holds pages, words and types": [name for name in IN_WHEEL if f"sqrtdk/{name}" not in members],
        "wheel holds the package alone": [
            name for name in members if not re.match(r"sqrtdk(/|-[^/]*\.dist-info/)", name)
        ],
        "sdist holds the project's papers": [name for name in IN_SDIST if name not in packed],
        "nothing is packed by mistake": [name for name in members | packed if NOT_PACKED.search(name)],
        "the README is the long description": []
        if (ROOT / "README.md").read_text(encoding="utf-8") in metadata
        else ["README.md"],
        "the pages say that the index has it": [] if PUBLISHED else ["PUBLISHED in scripts/install_lines.py"],
        "the papers have this version": [
            path
            for path, line in (("CITATION.cff", f"version: {version}"), ("CHANGELOG.md", f"## {version}"))
            if line not in (ROOT / path).read_text(encoding="utf-8")
        ],
    }
    return [Outcome(step, "failed" if names else "ok", ", ".join(sorted(names)[:5])) for step, names in wrong.items()]


def torch_versions(python: str) -> dict[str, bool]:
    """The versions of torch on pip's index, newest first, each with whether its build is one without CUDA."""
    done = _run(python, "-m", "pip", "index", "versions", "torch")
    listed = re.search(r"Available versions: (.*)", done.stdout)
    versions = [version.strip() for version in listed[1].split(",")] if listed else []
    alone = sys.platform != "linux"  # elsewhere the plain build has no CUDA
    return {version.split("+")[0]: alone or f"{version.split('+')[0]}+cpu" in versions for version in versions}


def try_out(package: Path, lab: Path, python: str, torch: str, folder: Path) -> Outcome:
    """Install a package into a new environment with this torch, and do what a user does first; then add the lab."""
    step = f"{package.name} on {Path(python).name}, torch {torch}"
    shutil.rmtree(folder, ignore_errors=True)
    made = _run(python, "-m", "venv", folder)
    if made.returncode:
        return Outcome(step, "not available", _last_line(made))
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q", "install")
    for what in (f"torch=={torch}", str(package)):
        done = _run(*pip, what)
        if done.returncode:
            return Outcome(step, "not available" if what != str(package) else "failed", _last_line(done))
    there = f"from importlib.util import find_spec; print([name for name in {OF_LAB} if find_spec(name)])"
    found = _run(folder / "bin" / "python", "-c", there).stdout.strip()
    if found != "[]":
        return Outcome(step, "failed", f"the library alone brings {found}")
    if wrong := _wrong(folder, COMMANDS):
        return Outcome(step, "failed", wrong)
    for code, _ in programs((ROOT / "README.md").read_text(encoding="utf-8")):
        done = _run(folder / "bin" / "python", "-W", "error", "-c", code)
        if done.returncode:
            return Outcome(step, "failed", f"a program of the README: {_last_line(done)}")
    done = _run(*pip, str(lab))
    wrong = _last_line(done) if done.returncode else _wrong(folder, LAB_COMMANDS)
    if wrong:
        return Outcome(step, "failed", f"with the lab: {wrong}")
    return Outcome(step, "ok")


def try_extra(extra: str, program: str, wheel: Path, torch: str, folder: Path) -> Outcome:
    """Install the library with one extra into a new environment, and run the extra's program in an empty directory."""
    step = f"{wheel.name}[{extra}] on {Path(sys.executable).name}, torch {torch}"
    shutil.rmtree(folder, ignore_errors=True)
    (empty := folder / "empty").mkdir(parents=True)
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "-q", "install", f"torch=={torch}")
    for command in ((sys.executable, "-m", "venv", folder), (*pip, f"{wheel}[{extra}]")):
        done = _run(*command)
        if done.returncode:
            return Outcome(step, "failed", _last_line(done))
    done = _run(python, "-c", program, cwd=empty)
    return Outcome(step, "failed" if done.returncode else "ok", _last_line(done) if done.returncode else "")


def _wrong(folder: Path, commands: Sequence[tuple[Sequence[str], int]]) -> str:
    """Run commands in an environment; return the first whose exit code is another, or ""."""
    for arguments, expected in commands:
        done = _run(folder / "bin" / "sqrtdk", *arguments)
        if done.returncode != expected:
            return f"sqrtdk {' '.join(arguments)}: exit code {done.returncode}: {_last_line(done)}"
    return ""


def matrix(pythons: list[str], torches: list[str], packages: list[Path], folder: Path, cuda: bool) -> list[Outcome]:
    """Each Python with each torch: the wheel in all of them, the sdist in the first that there is."""
    outcomes: list[Outcome] = []
    sdist, wheel, lab = packages
    for python in pythons:
        found = shutil.which(python)
        if found is None or _run(found, "-c", "import venv, ensurepip").returncode:
            outcomes.append(Outcome(Path(python).name, "not available", "no such Python here, or one without venv"))
            continue
        known = torch_versions(found)
        newest = next(iter(known), None)
        for torch in dict.fromkeys(version if version != "newest" else newest or "newest" for version in torches):
            step = f"{Path(found).name}, torch {torch}"
            if torch not in known:
                outcomes.append(Outcome(step, "not available", "pip's index has no such torch for this Python"))
            elif not (known[torch] or cuda):
                outcomes.append(Outcome(step, "not available", "pip's index has its CUDA build alone: see --cuda"))
            else:
                ran = any(outcome.outcome == "ok" and sdist.name in outcome.step for outcome in outcomes)
                for package in (wheel,) if ran else (wheel, sdist):
                    outcomes.append(try_out(package, lab, found, torch, folder / "environment"))
                    print(f"{outcomes[-1].outcome}: {outcomes[-1].step} {outcomes[-1].reason}", flush=True)
    return outcomes


def main() -> int:
    """Run the checklist, print it, and keep it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--python", nargs="+", default=list(PYTHONS), help="names or paths")
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    default = [OLDEST_TORCH, *([pinned[1]] if pinned else []), "newest"]
    options.add_argument("--torch", nargs="+", default=default, help='versions; "newest" is that of the index')
    options.add_argument("--cuda", action="store_true", help="take a CUDA build where there is no other")
    options.add_argument("--extra", nargs="*", choices=list(PROGRAMS), default=list(PROGRAMS), help="all by default")
    options.add_argument("--folder", type=Path, default=ROOT / "out" / "release")
    arguments = options.parse_args()

    shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir(parents=True)
    packages = build(arguments.folder)
    outcomes = inspect(*packages)
    outcomes += matrix(arguments.python, arguments.torch, packages, arguments.folder, arguments.cuda)
    for extra in arguments.extra if pinned else ():
        outcomes.append(try_extra(extra, PROGRAMS[extra], packages[1], pinned[1], arguments.folder / "environment"))
        print(f"{outcomes[-1].outcome}: {outcomes[-1].step} {outcomes[-1].reason}", flush=True)
    for one in outcomes:
        print(f"{one.outcome:>13}  {one.step}{': ' + one.reason if one.reason else ''}")
    record = {
        "version": PROJECT["version"],
        "date": date.today().isoformat(),
        "platform": platform.platform(),
        "outcomes": [asdict(one) for one in outcomes],
    }
    (arguments.folder / "release.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    ran = any(one.outcome == "ok" and one.step.startswith("sqrtdk-") for one in outcomes)
    failed = any(one.outcome == "failed" for one in outcomes)
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
