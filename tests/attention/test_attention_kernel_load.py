"""Which library of the compiled kernel is loaded, and which is not; and when "auto" takes it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from building import call, environment, needs_kernel, program, script

import sqrtdk
from sqrtdk.errors import UnsupportedError
from sqrtdk.impl.kernel import build


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
