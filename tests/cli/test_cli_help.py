"""What the program says about itself, without torch."""

import subprocess
import sys

import pytest

PROGRAMS = {"script": ["sqrtdk"], "module": [sys.executable, "-m", "sqrtdk"]}
HEAVY = ("torch", "numpy", "transformers", "rich", "jinja2")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"], ["--version"], ["check", "-h"], []])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['sqrtdk', *{arguments!r}]\n"
        "from sqrtdk.cli import main\n"
        "try:\n    main()\n"
        f"finally:\n    print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = _run(sys.executable, "-c", code)
    assert done.stderr.strip().splitlines()[-1] == "[]"
    assert "sqrtdk" in done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"], ["--version"], ["check", "--seq-len", "0"]])
def test_both_entries_are_one_program(arguments: list[str]) -> None:
    script, module = (_run(*program, *arguments) for program in PROGRAMS.values())
    assert (script.returncode, script.stdout, script.stderr) == (module.returncode, module.stdout, module.stderr)


def test_version() -> None:
    done = _run("sqrtdk", "--version")
    assert done.returncode == 0
    assert done.stdout.startswith("sqrtdk ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--batch", "0"],
        ["check", "--seq-len", "x"],
        ["check", "--attn", "flash"],
        ["check", "--fail-on", "sometimes"],
        ["check", "--no-such-option"],
        ["check", "demo", "demo"],
        ["chekc"],
    ],
)
def test_usage_errors_exit_2_without_a_traceback(arguments: list[str]) -> None:
    done = _run("sqrtdk", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Error:" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_option_of_the_contract_is_there() -> None:
    text = _run("sqrtdk", "check", "--help").stdout
    options = "static attn text input batch seq-len device dtype seed revision trust-remote-code device-map"
    options += " offload-folder json html output force fail-on"
    missing = [name for name in options.split() if f"--{name} " not in text]
    assert not missing


def test_help_says_what_both_attentions_list() -> None:
    text = " ".join(_run("sqrtdk", "check", "--help").stdout.split())
    assert "both lists the calls of eager, then those of sdpa" in text


def test_help_names_what_is_allowed() -> None:
    text = " ".join(_run("sqrtdk", "check", "--help").stdout.split())
    for words in (
        "float32 (fp32), bfloat16 (bf16), float16 (fp16) or float64 (fp64)",
        "cpu, cuda, cuda:1, mps",
        "<eager|sdpa|both>",
        "note|warn|unmeasured|",
        "[x>=1]",
        "e.g. auto",
    ):
        assert words in text, words
