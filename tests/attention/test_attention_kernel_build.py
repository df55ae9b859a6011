"""How the compiled kernel is built: once, whole or not at all; and what happens where it can't be."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sqrtdk.errors import UnsupportedError
from sqrtdk.impl.kernel import build, compiler, libraries
from tests.attention.building import CALL, built, call, fresh_call, quick, script, settings
from tests.support.kernel_here import needs_kernel, unable
from tests.support.program import Warm


def test_without_a_compiler_everything_works_and_says_why(tmp_path: Path, warm: Warm) -> None:
    given = settings(tmp_path, CXX=str(tmp_path / "missing"))
    found = call(warm, given)
    assert (found["plain"], found["choice"], found["sum"]) == ("fused", "tiled", 8 * 512 * 512.0)
    why = f"CXX names '{tmp_path / 'missing'}', which is not found" if not unable() else str(unable())
    assert f"not the compiled kernel: {why}" in found["reason"]
    assert f"can't be built: {why} | impl='tiled' runs everywhere." in found["named"]
    done = warm(verb="build", **given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"Error: the compiled kernel can't be built: {why}\nHint: impl='tiled' runs everywhere.\n"
    done = warm("--if-possible", verb="build", **given)
    assert (done.returncode, done.stderr) == (
        0,
        f"Done without: the compiled kernel can't be built: {why}. impl='tiled' runs everywhere.\n",
    )
    assert f"not in use: {why}" in " ".join(warm(verb="env", **given).stdout.split())
    kernel = json.loads(warm("--json", verb="env", **given).stdout)["kernel"]
    assert (kernel["built"], kernel["loaded"], kernel["reason"]) == (False, False, why)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("named", "lacking"), [("sse4", "sse4_2"), ("avx512", "avx512dq"), (None, "sse4_2")])
def test_a_cpu_without_the_instructions_is_named(
    named: str | None, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    there = frozenset(libraries.TARGETS[named or "sse4"].features) - {lacking}
    monkeypatch.setattr(libraries, "_features", lambda: there)
    if named is not None:
        monkeypatch.setenv("SQRTDK_KERNEL", named)
    with pytest.raises(UnsupportedError, match=f"can't be built: the CPU has no {lacking}"):
        build.build_kernel(force=True)


@pytest.mark.parametrize(
    ("machine", "features", "fits"),
    [
        ("x86_64", libraries.TARGETS["avx512_bf16"].features, "avx512_bf16"),
        ("x86_64", libraries.TARGETS["avx512"].features, "avx512"),
        ("x86_64", libraries.TARGETS["avx2"].features, "avx2"),
        ("x86_64", libraries.TARGETS["sse4"].features, "sse4"),
        ("aarch64", ("fp", "asimd", "sve"), "neon"),
    ],
)
def test_the_fastest_target_that_the_cpu_takes(
    machine: str, features: tuple[str, ...], fits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SQRTDK_KERNEL", raising=False)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(libraries, "_features", lambda: frozenset(features))
    assert libraries.this_target() == fits
    monkeypatch.setenv("SQRTDK_KERNEL", "mmx")
    with pytest.raises(UnsupportedError, match="SQRTDK_KERNEL is mmx; it is one of .*" + fits):
        libraries.this_target()


@needs_kernel
def test_a_plain_call_starts_no_compiler(tmp_path: Path, warm: Warm) -> None:
    trace = tmp_path / "started"
    given = settings(tmp_path / "cache", CXX=str(script(tmp_path / "cxx", f'touch "{trace}"; exit 1')))
    found = call(warm, given)
    assert "it is not built: `sqrtdk build`" in found["reason"]
    assert "the compiler failed" in found["named"]  # by name it does
    assert trace.exists()
    trace.unlink()
    plain = CALL.replace('impl="cpu"', 'impl="auto"')
    assert warm(plain, verb="-c", **given).returncode == 0
    assert not trace.exists()


@needs_kernel
def test_the_compiler_s_own_error_is_shown(tmp_path: Path, warm: Warm) -> None:
    said = "echo '/errors/here.h: note' >&2; echo 'attention.cpp:1: error: no such thing' >&2; echo end >&2; exit 1"
    cxx = script(tmp_path / "cxx", said)
    done = warm(verb="build", **settings(tmp_path / "cache", CXX=str(cxx)))
    assert done.returncode == 2
    assert "Error: the compiler failed: attention.cpp:1: error: no such thing" in done.stderr
    assert "Hint: The compiler has to be GCC 11 or newer" in done.stderr
    assert not list((tmp_path / "cache/sqrtdk").iterdir())
    silent = script(tmp_path / "cxx", "echo 'no errors known' >&2; echo 'it was killed' >&2; exit 1")
    done = warm("--if-possible", verb="build", **settings(tmp_path / "cache", CXX=str(silent)))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("Done without: the compiler failed: it was killed. ")


@needs_kernel
def test_a_cache_that_can_t_be_written_is_named(tmp_path: Path, warm: Warm) -> None:
    (tmp_path / "file").touch()
    done = warm(verb="build", **settings(tmp_path / "file"))
    assert done.returncode == 2
    assert "can't be kept in" in done.stderr
    assert "SQRTDK_CACHE names another directory" in done.stderr
    done = warm("--if-possible", verb="build", **settings(tmp_path / "file"))
    assert done.returncode == 0
    assert "can't be kept in" in done.stderr


@pytest.mark.full
@needs_kernel
def test_an_interrupted_build_leaves_nothing_that_is_taken_for_one(tmp_path: Path, warm: Warm) -> None:
    given = settings(tmp_path / "cache", CXX=str(quick(tmp_path / "cxx", wait=60)))
    folder = tmp_path / "cache/sqrtdk"
    running = subprocess.Popen(
        [sys.executable, "-m", "sqrtdk", "build"],
        env=os.environ | given,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not list(folder.glob(".build-*/*")):
        assert running.poll() is None
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert not list(folder.glob("*.so"))
    (left,) = folder.iterdir()
    assert "it is not built" in call(warm, given | {"CXX": "/bin/false"})["reason"]
    long_ago = time.time() - 2 * build.ABANDONED_S
    os.utime(left, (long_ago, long_ago))
    warm(verb="build", **(given | {"CXX": str(quick(tmp_path / "cxx2"))}))
    assert not left.exists()
    assert len(list(folder.glob("*.so"))) == 1


@pytest.mark.full
@needs_kernel
def test_two_builds_at_once_leave_one_whole_library(tmp_path: Path) -> None:
    cxx = quick(tmp_path / "cxx", wait=1)
    given = os.environ | settings(tmp_path / "cache", CXX=str(cxx))
    command = [sys.executable, "-m", "sqrtdk", "build"]
    running = [subprocess.Popen(command, env=given, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [each.communicate()[1] for each in running]
    assert [each.returncode for each in running] == [0, 0]
    assert not any("Error" in text for text in told)  # torch may warn there of what it has not found
    (made,) = (tmp_path / "cache/sqrtdk").iterdir()
    assert made.name == built().name
    assert made.read_bytes() == built().read_bytes()


@needs_kernel
def test_what_is_built_is_the_user_s_alone(tmp_path: Path, warm: Warm) -> None:
    given = settings(tmp_path / "cache", CXX=str(quick(tmp_path / "cxx")))
    code = "import os, sys, sqrtdk.cli; os.umask(0); sys.argv[1:] = ['build']; sqrtdk.cli.main()"
    assert warm(code, verb="-c", **given).returncode == 0
    folder = tmp_path / "cache/sqrtdk"
    (made,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, made.stat().st_mode & 0o777) == (0o700, 0o755)


@needs_kernel
def test_cxx_may_be_a_command_or_a_path_with_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = script(tmp_path / "a compiler", "exit 1")
    (plain := tmp_path / "ccache").write_text("#!/bin/sh\n")
    plain.chmod(0o755)
    named = {
        str(program): [str(program)],
        f"{plain} g++ -v": [str(plain), "g++", "-v"],
        f"'{program}' -v": [str(program), "-v"],
        "no-such-compiler -v": [],
        "'": [],
        " ": [shutil.which("g++") or shutil.which("c++")],
    }
    for text, words in named.items():
        monkeypatch.setenv("CXX", text)
        assert compiler.command() == words
        assert (unable() is None) == bool(words)
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    assert unable() == "CXX names 'no-such-compiler -v', which is not found"
    with pytest.raises(UnsupportedError, match="can't be built: CXX names"):
        build.compile_into(tmp_path / "new", "avx512")
    assert not (tmp_path / "new").exists()


@needs_kernel
def test_a_compiler_that_can_t_be_started_is_named(tmp_path: Path, warm: Warm) -> None:
    (cxx := tmp_path / "cxx").write_bytes(b"\x7fELF no program")
    cxx.chmod(0o755)
    done = warm(verb="build", **settings(tmp_path / "cache", CXX=str(cxx)))
    assert done.returncode == 2
    assert f"the compiler {cxx} can't be started: Exec format error" in done.stderr
    assert "Hint: The compiler has to be GCC 11 or newer" in done.stderr


@needs_kernel
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("true", "the compiler reported no error and wrote no library"),
        pytest.param(
            ': > "$made"',
            "its library is no good; a process tried to load it: OSError: {made}: file too short",
            marks=pytest.mark.full,
        ),
        pytest.param(
            'echo "no library" > "$made"',
            "its library is no good; a process tried to load it: OSError: {made}: ",
            marks=pytest.mark.full,
        ),
        pytest.param(
            'head -c 200000 "{whole}" > "$made"',
            "a process tried to load it: it was killed by SIGBUS",
            marks=pytest.mark.full,
        ),
        ('echo "int x;" | gcc -x c -shared -fPIC - -o "$made"', "'sqrtdk_cpu' object has no attribute 'forward'"),
        ('printf half > "$made"; kill -KILL $$', "the compiler failed: it was killed by SIGKILL"),
    ],
    ids=["nothing", "empty", "text", "half", "another", "killed"],
)
def test_what_a_compiler_leaves_is_tried_before_it_is_kept(body: str, why: str, tmp_path: Path, warm: Warm) -> None:
    cxx = script(tmp_path / "cxx", body.replace("{whole}", str(built())))
    done = warm(verb="build", **settings(tmp_path / "cache", CXX=str(cxx)))
    assert (done.returncode, done.stdout) == (2, "")
    first, _, last = why.partition("{made}")
    assert first in done.stderr
    assert last in done.stderr
    assert "Hint: " in done.stderr
    assert not list((tmp_path / "cache/sqrtdk").iterdir())


def running(word: str) -> bool:
    """Whether a process of whose command line this is a word runs; one that ended and was not asked for has none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if word.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                return True
    return False


@pytest.mark.parametrize("words", [["sleep"], ["sh", "-c", 'sleep "$0" & wait']], ids=["itself", "what it started"])
def test_a_program_that_does_not_end_is_ended_with_what_it_started(words: list[str]) -> None:
    seconds = f"600.{os.getpid()}"
    with pytest.raises(UnsupportedError, match=r"(?m)^the program did not end within 1 s$") as raised:
        compiler.run_program([*words, seconds], 1.0, "the program", "another one")
    assert raised.value.hint == "another one"
    for _ in range(600):  # until the kernel is through with it
        if not running(seconds):
            break
        time.sleep(0.1)
    assert not running(seconds)


@needs_kernel
def test_a_compiler_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cxx = script(tmp_path / "cxx", "exec sleep 600")
    monkeypatch.setenv("CXX", str(cxx))
    monkeypatch.setattr(compiler, "COMPILE_S", 0.5)
    with pytest.raises(UnsupportedError, match=f"(?m)^the compiler {cxx} did not end within 0.5 s$") as raised:
        build.compile_into(tmp_path / "new", "avx512")
    assert raised.value.hint == compiler.COMPILER_HINT
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.slow
@needs_kernel
def test_a_library_that_does_not_end_while_it_is_loaded_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves a file when its loading begins: the limit is passed there, not while torch is imported."""
    begun, source = tmp_path / "begun", tmp_path / "wait.c"
    source.write_text(
        "#include <fcntl.h>\n#include <unistd.h>\n"
        f'__attribute__((constructor)) static void hang(void) {{ creat("{begun}", 0600); sleep(600); }}'
    )
    monkeypatch.setenv("CXX", str(script(tmp_path / "cxx", f'gcc -shared -fPIC "{source}" -o "$made"')))
    monkeypatch.setattr(build, "TRIAL_S", 30.0)
    with pytest.raises(UnsupportedError, match="the process that tries the library did not end within 30 s"):
        build.compile_into(tmp_path / "new", "avx512")
    assert begun.exists()
    assert not list((tmp_path / "new").iterdir())


@needs_kernel
def test_a_compiler_that_is_no_program_is_named(tmp_path: Path, warm: Warm) -> None:
    (plain := tmp_path / "cxx").write_text("#!/bin/sh\n")
    done = warm(verb="build", **settings(tmp_path / "cache", CXX=str(plain)))
    assert done.returncode == 2
    assert f"can't be built: CXX names '{plain}', which is no program" in done.stderr


@needs_kernel
def test_a_sweep_removes_what_is_old_and_bears_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long_ago = time.time() - 2 * build.UNUSED_S
    for name in (".build-a", ".build-b"):
        (tmp_path / name).mkdir()
    start = libraries.stem("avx512")
    kept, older = f"{start}kept.so", f"{start}older.so"
    for name in ("attention-old.so", kept, older, "attention-read.so"):
        (tmp_path / name).touch()
    for path in tmp_path.iterdir():
        os.utime(path, (long_ago, long_ago))
    for name in (older, "attention-read.so"):
        os.utime(tmp_path / name, (time.time(), long_ago))
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if path.name == ".build-a":
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    build._sweep(tmp_path / kept, "avx512")
    monkeypatch.undo()
    assert {path.name for path in tmp_path.iterdir()} == {".build-a", kept, "attention-read.so"}


def test_a_wheel_holds_the_kernel_of_the_tree_that_is_packed(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="not measured: hatchling comes with the dev extra")
    folder = tmp_path / "src/sqrtdk/impl/kernel"
    folder.mkdir(parents=True)
    for parent in (folder, *list(folder.parents)[:2]):
        (parent / "__init__.py").touch()
    (folder / "libraries.py").write_text(
        "from pathlib import Path\nPREBUILT = Path('prebuilt')\ndef targets_here():\n    return ['here']\n"
    )
    (folder / "build.py").write_text(
        "def compile_into(folder, target):\n"
        "    (made := folder / f'attention-{target}-tree.so').touch()\n    return made\n"
    )
    hook = Path(__file__).parents[2] / "scripts/hatch_build.py"
    code = f"""
import runpy
made = {{"force_include": {{}}}}
hook = runpy.run_path({str(hook)!r})["PrebuiltKernel"]({str(tmp_path)!r}, {{}}, None, None, "", "wheel")
hook.initialize("standard", made)
print(*made["force_include"].values())
hook.finalize("standard", made, "")
"""
    given = os.environ | {"SQRTDK_PREBUILD": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
    assert done.stdout == "sqrtdk/impl/kernel/prebuilt/attention-here-tree.so\n"
    command = [sys.executable, "-c", code]
    given |= {"SQRTDK_PREBUILD": "yes"}  # no wheel without, unsaid
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert "ValueError: SQRTDK_PREBUILD is 'yes'; it is 1" in done.stderr


@pytest.mark.slow
@needs_kernel
def test_a_build_by_the_real_compiler_twice_at_once(tmp_path: Path) -> None:
    given = os.environ | settings(tmp_path)
    command = [sys.executable, "-m", "sqrtdk", "build"]
    running = [subprocess.Popen(command, env=given) for _ in range(2)]
    assert [each.wait() for each in running] == [0, 0]
    assert len(list((tmp_path / "sqrtdk").iterdir())) == 1
    assert fresh_call(settings(tmp_path))["choice"] == "cpu"
