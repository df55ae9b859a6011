"""How the compiled kernel comes to be there: built once, whole or not at all; and what happens where it can't be."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import sqrtdk
from sqrtdk.errors import UnsupportedError
from sqrtdk.impl.kernel import build

HERE = build.unable() is None
needs_kernel = pytest.mark.skipif(not HERE, reason=f"no compiled kernel: {build.unable()}")

CALL = """
import json, sys, torch, sqrtdk
q = torch.randn(1, 8, 512, 64)
softcap = {"softcap": 30.0}
found = {
    "plain": sqrtdk.explain(q, q, q).impl,
    "choice": sqrtdk.explain(q, q, q, **softcap).impl,
    "reason": sqrtdk.explain(q, q, q, **softcap).reason,
    "sum": float(sqrtdk.attention(q, q, q, return_aux=sqrtdk.AuxRequest.all(), **softcap)[1].count.sum()),
}
try:
    sqrtdk.attention(q, q, q, impl="cpu")
    found["named"] = "runs"
except NotImplementedError as error:
    found["named"] = f"{error} | {error.hint}"
print(json.dumps(found))
"""


def script(path: Path, body: str) -> Path:
    """An executable that stands for a compiler; `$made` is the file that it shall write."""
    path.write_text(f'#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && made=$2; shift; done\n{body}\n')
    path.chmod(0o755)
    return path


def quick(path: Path, wait: float = 0.0) -> Path:
    """A compiler that is through at once: its library is empty, and half of it is there while it works."""
    return script(path, f'printf half > "$made"; sleep {wait}; echo "int x;" | gcc -x c -shared -fPIC - -o "$made"')


def environment(cache: Path, **more: str) -> dict[str, str]:
    return os.environ | {"SQRTDK_CACHE": str(cache)} | more


def program(*arguments: str, given: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sqrtdk", *arguments]
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False)


def call(given: dict[str, str]) -> dict[str, str]:
    done = subprocess.run([sys.executable, "-c", CALL], env=given, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_without_a_compiler_everything_works_and_says_why(tmp_path: Path) -> None:
    given = environment(tmp_path, CXX=str(tmp_path / "missing"))
    found = call(given)
    assert (found["plain"], found["choice"], found["sum"]) == ("fused", "tiled", 8 * 512 * 512.0)
    why = f"CXX names '{tmp_path / 'missing'}', which is not found" if HERE else str(build.unable())
    assert f"not the compiled kernel: {why}" in found["reason"]
    assert f"can't be built: {why} | impl='tiled' runs everywhere." in found["named"]
    done = program("build", given=given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"Error: the compiled kernel can't be built: {why}\nHint: impl='tiled' runs everywhere.\n"
    done = program("build", "--if-possible", given=given)
    assert (done.returncode, done.stderr) == (
        0,
        f"Done without: the compiled kernel can't be built: {why}. impl='tiled' runs everywhere.\n",
    )
    assert f"not in use: {why}" in program("env", given=given).stdout
    kernel = json.loads(program("env", "--json", given=given).stdout)["kernel"]
    assert (kernel["built"], kernel["loaded"], kernel["reason"]) == (False, False, why)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lacking", ["avx512f", "avx512dq"])
def test_a_cpu_without_the_instructions_is_named(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = frozenset(build.NEEDED) - {lacking}
    monkeypatch.setattr(build, "_features", lambda: there)
    with pytest.raises(UnsupportedError, match=f"can't be built: the CPU has no {lacking}"):
        build.build(force=True)


@needs_kernel
def test_a_plain_call_starts_no_compiler(tmp_path: Path) -> None:
    trace = tmp_path / "started"
    given = environment(tmp_path / "cache", CXX=str(script(tmp_path / "cxx", f'touch "{trace}"; exit 1')))
    found = call(given)
    assert "it is not built: `sqrtdk build`" in found["reason"]
    assert "the compiler failed" in found["named"]  # by name it does
    assert trace.exists()
    trace.unlink()
    plain = CALL.replace('impl="cpu"', 'impl="auto"')
    subprocess.run([sys.executable, "-c", plain], env=given, capture_output=True, check=True)
    assert not trace.exists()


@needs_kernel
def test_the_compiler_s_own_error_is_shown(tmp_path: Path) -> None:
    said = "echo '/errors/here.h: note' >&2; echo 'attention.cpp:1: error: no such thing' >&2; echo end >&2; exit 1"
    cxx = script(tmp_path / "cxx", said)
    done = program("build", given=environment(tmp_path / "cache", CXX=str(cxx)))
    assert done.returncode == 2
    assert "Error: the compiler failed: attention.cpp:1: error: no such thing" in done.stderr
    assert "Hint: It has to be GCC 11 or newer" in done.stderr
    assert not list((tmp_path / "cache/sqrtdk").iterdir())
    silent = script(tmp_path / "cxx", "echo 'no errors known' >&2; echo 'it was killed' >&2; exit 1")
    done = program("build", "--if-possible", given=environment(tmp_path / "cache", CXX=str(silent)))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("Done without: the compiler failed: it was killed. ")


@needs_kernel
def test_a_cache_that_can_t_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = program("build", given=environment(tmp_path / "file"))
    assert done.returncode == 2
    assert "can't be kept in" in done.stderr
    assert "SQRTDK_CACHE names another directory" in done.stderr
    done = program("build", "--if-possible", given=environment(tmp_path / "file"))
    assert done.returncode == 0
    assert "can't be kept in" in done.stderr


@needs_kernel
def test_an_interrupted_build_leaves_nothing_that_is_taken_for_one(tmp_path: Path) -> None:
    given = environment(tmp_path / "cache", CXX=str(quick(tmp_path / "cxx", wait=60)))
    folder = tmp_path / "cache/sqrtdk"
    running = subprocess.Popen(
        [sys.executable, "-m", "sqrtdk", "build"], env=given, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while not list(folder.glob(".build-*/*")):
        assert running.poll() is None
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert not list(folder.glob("*.so"))
    (left,) = folder.iterdir()
    assert "it is not built" in call(given | {"CXX": "/bin/false"})["reason"]
    long_ago = time.time() - 2 * build.ABANDONED_S
    os.utime(left, (long_ago, long_ago))
    program("build", given=given | {"CXX": str(quick(tmp_path / "cxx2"))})
    assert not left.exists()
    assert len(list(folder.glob("*.so"))) == 1


@needs_kernel
def test_two_builds_at_once_leave_one_whole_library(tmp_path: Path) -> None:
    cxx = quick(tmp_path / "cxx", wait=1)
    given = environment(tmp_path / "cache", CXX=str(cxx))
    command = [sys.executable, "-m", "sqrtdk", "build"]
    running = [subprocess.Popen(command, env=given, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate()[1] for each in running]
    assert all("the library can't be loaded: operator sqrtdk_cpu::forward does not exist" in text for text in said)
    (made,) = (tmp_path / "cache/sqrtdk").iterdir()
    assert made.read_bytes()[:4] == b"\x7fELF"


@needs_kernel
def test_a_broken_library_is_named_and_built_again(tmp_path: Path) -> None:
    folder, trace = tmp_path / "sqrtdk", tmp_path / "started"
    folder.mkdir(mode=0o700)
    broken = folder / build.library().name
    broken.write_text("no library")
    given = environment(tmp_path, CXX=str(script(tmp_path / "cxx", f'echo >> "{trace}"; exit 1')))
    found = call(given)
    assert found["choice"] == "tiled"
    assert f"not the compiled kernel: the library can't be loaded: {broken}: " in found["reason"]  # the loader's text
    assert "the compiler failed" in found["named"]
    assert trace.read_text() == "\n"  # once
    shutil.copy(build.library(), tmp_path / "whole")
    copying = script(tmp_path / "cxx", f'cp "{tmp_path / "whole"}" "$made"')
    assert call(given | {"CXX": str(copying)})["named"] == "runs"
    assert call(given | {"CXX": "/bin/false"})["choice"] == "cpu"


@needs_kernel
@pytest.mark.parametrize("cache", ["/tmp/" + 300 * "x", "~no-such-user-as-this/x", "~"])
def test_a_cache_that_can_t_be_examined_breaks_nothing(cache: str, tmp_path: Path) -> None:
    given = environment(Path(cache), CXX="/bin/false", HOME="/proc/version")
    found = call(given)
    assert found["choice"] == "tiled"
    assert any(text in found["reason"] for text in ("File name too long", "home directory", "it is not built"))
    done = program("env", "--json", given=given)
    assert done.returncode == 0, done.stderr
    kernel = json.loads(done.stdout)["kernel"]
    assert (kernel["built"], kernel["loaded"]) == (False, False)
    done = program("build", given=given)
    assert done.returncode == 2
    assert "SQRTDK_CACHE names" in done.stderr


@needs_kernel
def test_a_missing_source_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_reason", "not yet")
    monkeypatch.setattr(build, "sources", lambda: [tmp_path / "attention.cpp"])
    build._digest.cache_clear()
    build.load_if_built()
    found = build.state()
    monkeypatch.undo()
    build._digest.cache_clear()
    assert (found.path, found.built, found.loaded) == (None, False, False)
    assert "a source can't be read" in str(found.reason)


@pytest.fixture
def unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, in a process whose kernel counts as not loaded."""
    monkeypatch.setenv("SQRTDK_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_reason", "not yet")
    monkeypatch.setattr(build, "_digest", lambda target: "0")
    return tmp_path


@needs_kernel
@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("how", ["everyone can write", "belongs to another user"])
def test_a_library_that_others_can_write_is_not_loaded(
    what: str, how: str, unloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unloaded / "sqrtdk"
    folder.mkdir(mode=0o700)
    library = build.library()
    library.write_text("no library")
    library.chmod(0o755)
    bad = library if what == "file" else folder
    if how == "everyone can write":
        bad.chmod(0o777)
    else:
        real = Path.stat
        other = os.stat_result((0o40700, 0, 0, 1, 4242, 0, 0, 0, 0, 0))
        monkeypatch.setattr(Path, "stat", lambda path, **more: other if path == bad else real(path, **more))
    with pytest.raises(UnsupportedError, match=f"the library is not loaded: .*{how}"):
        build.load()
    assert not build.loaded()
    monkeypatch.setenv("CXX", "/bin/false")
    refused = "the compiler failed" if what == "file" else f"can't be kept safely: .*{how}"
    with pytest.raises(UnsupportedError, match=refused):
        build.build()


@needs_kernel
def test_what_is_built_is_the_user_s_alone(tmp_path: Path) -> None:
    given = environment(tmp_path / "cache", CXX=str(quick(tmp_path / "cxx")))
    command = f"umask 000; exec {sys.executable} -m sqrtdk build"
    subprocess.run(["sh", "-c", command], env=given, capture_output=True, check=False)
    folder = tmp_path / "cache/sqrtdk"
    (made,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, made.stat().st_mode & 0o777) == (0o700, 0o755)


THREADS = """
import os, shutil, sys, threading, torch, sqrtdk
from sqrtdk.impl.kernel import build
assert not build.loaded()
os.mkdir(build.library().parent, 0o700)
shutil.copy(sys.argv[1], build.library())
q, start, failed = torch.randn(1, 8, 64, 64), threading.Barrier(8), []
sys.setswitchinterval(1e-6)
def first():
    start.wait()
    try:
        sqrtdk.attention(q, q, q, impl="cpu")
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=first) for _ in range(8)]
for each in threads: each.start()
for each in threads: each.join()
assert not failed, failed
"""


@needs_kernel
def test_many_threads_load_it_once(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", THREADS, str(build.library())]
    done = subprocess.run(
        command, env=environment(tmp_path, CXX="/bin/false"), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_many_threads_build_it_once(unloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def slow(path: Path, target: str) -> None:
        time.sleep(0.2)
        built.append(path)

    monkeypatch.setattr(build, "_system", lambda: None)
    monkeypatch.setattr(build, "_attempt", lambda: None if built else "not built")
    monkeypatch.setattr(build, "compile_to", slow)
    threads = [threading.Thread(target=build.ready) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(built) == 1
    assert build.loaded()


PREBUILT = """
import sys
from pathlib import Path
from sqrtdk.impl.kernel import build
build.PREBUILT = Path(sys.argv[1])
try:
    print(build.build() if sys.argv[2] == "build" else build.load() or build.library())
except NotImplementedError as error:
    print(error)
"""


@needs_kernel
def test_a_prebuilt_library_serves_unless_the_cache_has_one(tmp_path: Path) -> None:
    shutil.copy(build.library(), tmp_path / "whole")
    cxx = script(tmp_path / "cxx", f'cp "{tmp_path / "whole"}" "$made"')
    given = environment(tmp_path / "cache", CXX=str(cxx))
    shipped = tmp_path / "prebuilt" / build.library().name
    kept = tmp_path / "cache/sqrtdk" / build.library().name
    shipped.parent.mkdir()
    kept.parent.mkdir(mode=0o700, parents=True)

    def run(verb: str) -> str:
        command = [sys.executable, "-c", PREBUILT, str(shipped.parent), verb]
        return subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout.strip()

    shutil.copy(tmp_path / "whole", shipped)
    assert run("load") == run("build") == str(shipped)
    kept.write_text("no library")
    assert run("load") == str(shipped)
    kept.unlink()
    shipped.write_text("no library")
    assert f"{shipped}: " in run("load")
    assert run("build") == str(kept)
    assert run("load") == str(kept)


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
        assert build._compiler() == words
        assert (build.unable() is None) == bool(words)
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    assert build.unable() == "CXX names 'no-such-compiler -v', which is not found"
    with pytest.raises(UnsupportedError, match="can't be built: CXX names"):
        build.compile_to(tmp_path / "new/x.so", "avx512")
    assert not (tmp_path / "new").exists()


@needs_kernel
def test_a_compiler_that_can_t_be_started_is_named(tmp_path: Path) -> None:
    (cxx := tmp_path / "cxx").write_bytes(b"\x7fELF no program")
    cxx.chmod(0o755)
    done = program("build", given=environment(tmp_path / "cache", CXX=str(cxx)))
    assert done.returncode == 2
    assert f"the compiler {cxx} can't be started: Exec format error" in done.stderr
    assert "Hint: It has to be GCC 11 or newer" in done.stderr


@needs_kernel
def test_a_sweep_removes_what_is_old_and_bears_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long_ago = time.time() - 2 * build.UNUSED_S
    for name in (".build-a", ".build-b"):
        (tmp_path / name).mkdir()
    for name in ("attention-old.so", "attention-kept.so", "attention-read.so"):
        (tmp_path / name).touch()
    for path in tmp_path.iterdir():
        os.utime(path, (long_ago, long_ago))
    os.utime(tmp_path / "attention-read.so", (time.time(), long_ago))
    real = Path.stat

    def stat(path: Path, **more: bool) -> os.stat_result:
        if path.name == ".build-a":
            raise FileNotFoundError(path)
        return real(path, **more)

    monkeypatch.setattr(Path, "stat", stat)
    build._sweep(tmp_path, tmp_path / "attention-kept.so")
    monkeypatch.undo()
    assert {path.name for path in tmp_path.iterdir()} == {".build-a", "attention-kept.so", "attention-read.so"}


@pytest.mark.parametrize("given", ["~/x", "x"])
def test_the_cache_s_name_is_made_whole(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SQRTDK_CACHE", given)
    assert build._cache() == tmp_path / "x/sqrtdk"


def test_auto_leaves_a_kernel_that_was_not_looked_for(unloaded: Path) -> None:
    large = torch.randn(1, 8, 512, 64)
    choice = sqrtdk.explain(large, large, large, softcap=5.0)
    assert choice.impl != "cpu"
    assert "not the compiled kernel: not yet" in choice.reason


def test_a_wheel_holds_the_kernel_of_the_tree_that_is_packed(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="not measured: hatchling comes with the dev extra")
    folder = tmp_path / "src/sqrtdk/impl/kernel"
    folder.mkdir(parents=True)
    for parent in (folder, *list(folder.parents)[:2]):
        (parent / "__init__.py").touch()
    (folder / "build.py").write_text(
        "from pathlib import Path\nPREBUILT, TARGETS = Path('prebuilt'), {'here': ()}\n"
        "def file_name(target): return f'attention-{target}-tree.so'\n"
        "def compile_to(path, target): path.touch()\n"
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


@needs_kernel
def test_the_library_s_name_follows_source_torch_and_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = build.library()
    names = {here.name, build.library("avx512").name, build.library("avx512_bf16").name}
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    build._digest.cache_clear()
    names.add(build.library().name)
    monkeypatch.undo()
    copy = tmp_path / "attention.cpp"
    copy.write_text(build.sources()[0].read_text() + "\n// changed\n")
    monkeypatch.setattr(build, "sources", lambda: [copy])
    build._digest.cache_clear()
    names.add(build.library().name)
    monkeypatch.undo()
    build._digest.cache_clear()
    assert len(names) == 4
    assert build.library() == here


@needs_kernel
def test_auto_takes_it_where_it_pays() -> None:
    large, small = torch.randn(1, 8, 512, 64), torch.randn(1, 1, 8, 8)
    assert sqrtdk.explain(large, large, large).impl == "cpu"
    assert sqrtdk.explain(small, small, small).impl == "fused"
    assert "the call is small" in sqrtdk.explain(small, small, small).reason
    assert sqrtdk.explain(small, small, small, softcap=5.0).impl == "cpu"
    assert sqrtdk.explain(small, small, small, return_aux=sqrtdk.AuxRequest.all()).impl == "cpu"
    assert sqrtdk.explain(large.double(), large.double(), large.double()).impl == "fused"
    learned = torch.zeros(512, 512, requires_grad=True)
    choice = sqrtdk.explain(large, large, large, bias=learned)
    assert choice.impl != "cpu"
    assert "not the compiled kernel: the gradient of a bias is as large as the weights" in choice.reason
    assert torch.equal(sqrtdk.attention(large, large, large), sqrtdk.attention(large, large, large, impl="cpu"))


@pytest.mark.slow
@needs_kernel
def test_a_build_by_the_real_compiler_twice_at_once(tmp_path: Path) -> None:
    given = environment(tmp_path)
    command = [sys.executable, "-m", "sqrtdk", "build"]
    running = [subprocess.Popen(command, env=given) for _ in range(2)]
    assert [each.wait() for each in running] == [0, 0]
    assert len(list((tmp_path / "sqrtdk").iterdir())) == 1
    assert call(given)["choice"] == "cpu"
