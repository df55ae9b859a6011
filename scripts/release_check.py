"""The release checklist: build wheels and sdist, look into them, install each in clean environments, run them.

The library is tried alone first, without what the lab needs, and then with the wheel of the lab. Each extra is then
tried alone with the pinned torch, on this Python and on the oldest and the newest of the others: release_extras.py
says what it has to run.

    python scripts/release_check.py                 # each Python from 3.10 to 3.14 and each torch that is to be had
    python scripts/release_check.py --python python3.12 --torch 2.13.0
    python scripts/release_check.py --cuda          # also where the index has the CUDA build of torch alone (gigabytes)

It needs hatchling (in the extra `dev`), and the index that pip is set up for. The environments go into out/release, and
so does release.json, with what each combination said; torch alone goes into out/torch, and stays there. What is not to
be had is told with its reason, and makes the exit code 0 only if at least one combination ran: 1 says that a step
failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from install_lines import PUBLISHED
from page_programs import programs
from release_environments import (
    ROOT,
    StepError,
    environment,
    install,
    interpreter,
    last_line,
    run,
    torch_versions,
    version_of,
)
from release_extras import PROGRAMS, TOGETHER, VARIABLES

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


def build(folder: Path) -> list[Path]:
    """Build sdist and wheel, as an index would get them."""
    done = run(sys.executable, "-m", "hatchling", "build", "-d", folder, "-t", "sdist", "-t", "wheel")
    if done.returncode:
        raise SystemExit(f"The build failed:\n{done.stdout}{done.stderr}")
    done = run(sys.executable, "-m", "pip", "-q", "wheel", "--no-deps", "--wheel-dir", folder, ROOT / "lab")
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


def try_out(package: Path, lab: Path, python: str, torch: str, folder: Path) -> Outcome:
    """Install a package into a new environment with this torch, and do what a user does first; then add the lab.

    Args:
        package: Wheel or sdist.
        lab: The lab's wheel.
        python: The interpreter.
        torch: Version of torch.
        folder: Where environments with torch alone lie.
    """
    step, place = f"{package.name} on Python {version_of(python)}, torch {torch}", package.parent / "environment"
    try:
        environment(python, torch, folder, place)
    except StepError as error:
        return Outcome(step, "not available", str(error))
    try:
        install(place, package)
        there = f"from importlib.util import find_spec; print([name for name in {OF_LAB} if find_spec(name)])"
        found = run(interpreter(place), "-c", there).stdout.strip()
        if found != "[]":
            return Outcome(step, "failed", f"the library alone brings {found}")
        if wrong := _wrong(place, COMMANDS):
            return Outcome(step, "failed", wrong)
        for code, _ in programs((ROOT / "README.md").read_text(encoding="utf-8")):
            done = run(interpreter(place), "-W", "error", "-c", code)
            if done.returncode:
                return Outcome(step, "failed", f"a program of the README: {last_line(done)}")
        install(place, lab)
    except StepError as error:
        return Outcome(step, "failed", str(error))
    wrong = _wrong(place, LAB_COMMANDS)
    return Outcome(step, "failed", f"with the lab: {wrong}") if wrong else Outcome(step, "ok")


def try_extra(extra: str, wheel: Path, python: str, torch: str, folder: Path) -> Outcome:
    """Install the library with one extra into a new environment, and run the extra's program in an empty directory."""
    step = f"{wheel.name}[{extra}] on Python {version_of(python)}, torch {torch}"
    place = wheel.parent / "environment"
    try:
        environment(python, torch, folder, place)
        install(place, f"{wheel}[{TOGETHER.get(extra, extra)}]", beside=wheel.parent, variables=VARIABLES.get(extra))
    except StepError as error:
        return Outcome(step, "failed" if error.available else "not available", str(error))
    (empty := place / "empty").mkdir()
    done = run(interpreter(place), "-c", PROGRAMS[extra], ROOT, cwd=empty)
    return Outcome(step, "failed" if done.returncode else "ok", last_line(done) if done.returncode else "")


def _wrong(folder: Path, commands: Sequence[tuple[Sequence[str], int]]) -> str:
    """Run commands in an environment; return the first whose exit code is another, or ""."""
    for arguments, expected in commands:
        done = run(interpreter(folder).with_name("sqrtdk"), *arguments)
        if done.returncode != expected:
            return f"sqrtdk {' '.join(arguments)}: exit code {done.returncode}: {last_line(done)}"
    return ""


def pythons_here(names: Sequence[str]) -> tuple[list[str], list[Outcome]]:
    """The paths of the interpreters that are here with venv, and an outcome for each other name."""
    here, missing = [], []
    for name in names:
        found = shutil.which(name)
        if found is None or run(found, "-c", "import venv, ensurepip").returncode:
            missing.append(Outcome(Path(name).name, "not available", "no such Python here, or one without venv"))
        else:
            here.append(found)
    return here, missing


def not_to_be_had(python: str, torch: str, cuda: bool) -> list[Outcome]:
    """Why this torch is not to be had for a Python; empty if it is."""
    known, step = torch_versions(python), f"Python {version_of(python)}, torch {torch}"
    if torch not in known:
        return [Outcome(step, "not available", "pip's index has no such torch for this Python")]
    if not (known[torch] or cuda):
        return [Outcome(step, "not available", "pip's index has its CUDA build alone: see --cuda")]
    return []


def matrix(pythons: list[str], torches: list[str], packages: list[Path], folder: Path, cuda: bool) -> Iterator[Outcome]:
    """Each Python with each torch: the wheel in all of them, the sdist until it ran in one."""
    sdist, wheel, lab = packages
    ran = False
    for python in pythons:
        newest = next(iter(torch_versions(python)), "newest")
        for torch in dict.fromkeys(newest if version == "newest" else version for version in torches):
            yield from (reasons := not_to_be_had(python, torch, cuda))
            for package in () if reasons else (wheel,) if ran else (wheel, sdist):
                outcome = try_out(package, lab, python, torch, folder)
                ran = ran or (outcome.outcome == "ok" and package == sdist)
                yield outcome


def each_extra(
    extras: list[str], pythons: list[str], torch: str, wheel: Path, folder: Path, cuda: bool
) -> Iterator[Outcome]:
    """Each extra on this Python, and on the first and the last of the others."""
    chosen = {version_of(python): python for python in (sys.executable, *pythons[:1], *pythons[-1:])} if extras else {}
    for python in chosen.values():
        yield from (reasons := not_to_be_had(python, torch, cuda))
        for extra in () if reasons else extras:
            yield try_extra(extra, wheel, python, torch, folder)


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
    options.add_argument("--torch-folder", type=Path, default=ROOT / "out" / "torch", help="kept from run to run")
    arguments = options.parse_args()

    shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir(parents=True)
    packages = build(arguments.folder)
    pythons, missing = pythons_here(arguments.python)
    outcomes = [*inspect(*packages), *missing]
    lent, cuda = arguments.torch_folder, arguments.cuda
    for outcome in itertools.chain(
        matrix(pythons, arguments.torch, packages, lent, cuda),
        each_extra(arguments.extra, pythons, pinned[1], packages[1], lent, cuda) if pinned else (),
    ):
        outcomes.append(outcome)
        print(f"{outcome.outcome}: {outcome.step} {outcome.reason}", flush=True)
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
