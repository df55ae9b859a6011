"""Which library of the compiled kernel is loaded, and which is not; and when "auto" takes it."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

import sqrtdk
from sqrtdk.errors import UnsupportedError
from sqrtdk.impl.kernel import build, libraries, load
from tests.attention.building import built, call, planted, quick, script, settings
from tests.support.kernel_here import needs_kernel
from tests.support.program import Warm


@pytest.mark.full
@needs_kernel
def test_a_damaged_library_is_named_and_built_again(tmp_path: Path, warm: Warm) -> None:
    broken, trace = planted(tmp_path), tmp_path / "started"
    broken.write_bytes(broken.read_bytes()[:200_000])
    given = settings(tmp_path, CXX=str(script(tmp_path / "cxx", f'echo >> "{trace}"; exit 1')))
    why = f"the library is not loaded: {broken} is damaged: `sqrtdk build` builds it again"
    found = call(warm, given)
    assert found["choice"] == "tiled"
    assert f"not the compiled kernel: {why}" in found["reason"]
    assert found["named"].startswith("the compiler failed: it exited with 1 | The compiler has to be GCC 11 or newer")
    assert trace.read_text() == "\n"  # once
    kernel = json.loads(warm("--json", verb="env", **given).stdout)["kernel"]
    assert (kernel["library"], kernel["built"], kernel["loaded"]) == (str(broken), False, False)
    assert kernel["reason"] == why
    assert f"not in use: {why}" in " ".join(warm(verb="env", **given).stdout.split())
    without = call(warm, given | {"CXX": "/no/compiler"})["named"]
    assert (
        without == "the compiled kernel can't be built: CXX names '/no/compiler', which is not found | "
        "impl='tiled' runs everywhere."
    )
    done = warm(verb="build", **(given | {"CXX": str(quick(tmp_path / "cxx"))}))
    assert (done.returncode, done.stdout) == (0, f"{broken}\n")
    assert broken.read_bytes() == built().read_bytes()
    assert call(warm, given | {"CXX": "/bin/false"})["choice"] == "cpu"


@needs_kernel
@pytest.mark.parametrize(
    ("cache", "why"),
    [
        pytest.param("/tmp/" + 300 * "x", "can't be read: File name too long", marks=pytest.mark.full),
        ("~no-such-user-as-this/x", "the cache directory is unknown: Could not determine home directory"),
        ("~", "/proc/version/sqrtdk can't be read: Not a directory"),
    ],
    ids=["long", "nobody", "within a file"],
)
def test_a_cache_that_can_t_be_examined_breaks_nothing(cache: str, why: str, warm: Warm) -> None:
    given = settings(Path(cache), CXX="/bin/false", HOME="/proc/version")
    found = call(warm, given)
    assert found["choice"] == "tiled"
    assert why in found["reason"]
    done = warm("--json", verb="env", **given)
    assert done.returncode == 0, done.stderr
    kernel = json.loads(done.stdout)["kernel"]
    assert (kernel["built"], kernel["loaded"]) == (False, False)
    assert why in kernel["reason"]
    done = warm(verb="build", **given)
    assert done.returncode == 2
    assert "SQRTDK_CACHE names" in done.stderr


@needs_kernel
def test_a_missing_source_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_reason", "not yet")
    monkeypatch.setattr(load, "_path", None)
    monkeypatch.setattr(libraries, "cpp_sources", lambda: [tmp_path / "attention.cpp"])
    libraries._digest.cache_clear()
    load.load_if_built()
    found = load.kernel_state()
    monkeypatch.undo()
    libraries._digest.cache_clear()
    assert (found.path, found.built, found.loaded) == (None, False, False)
    assert "a source can't be read" in str(found.reason)


@pytest.fixture
def unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, in a process whose kernel counts as not loaded."""
    monkeypatch.setenv("SQRTDK_CACHE", str(tmp_path))
    monkeypatch.setattr(load, "_reason", "not yet")
    monkeypatch.setattr(load, "_path", None)
    monkeypatch.setattr(libraries, "_digest", lambda target: "0")
    return tmp_path


@needs_kernel
@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("how", ["everyone can write", "its group can write", "belongs to another user"])
def test_a_library_that_others_can_write_is_not_loaded(
    what: str, how: str, unloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unloaded / "sqrtdk"
    folder.mkdir(mode=0o700)
    (new := folder / "new").write_text("no library")
    library = new.rename(folder / libraries.file_name(new, libraries.this_target()))
    library.chmod(0o755)
    bad = library if what == "file" else folder
    if how != "belongs to another user":
        bad.chmod(0o777 if how == "everyone can write" else 0o775)
    else:
        real = Path.stat
        mode = 0o40700 if what == "folder" else 0o100755
        other = os.stat_result((mode, 0, 0, 1, 4242, 0, 0, 0, 0, 0))
        monkeypatch.setattr(Path, "stat", lambda path, **more: other if path == bad else real(path, **more))
    with pytest.raises(UnsupportedError, match=f"is not loaded: .*{how}"):
        load.load_kernel()
    assert not load.loaded()
    monkeypatch.setenv("CXX", "/bin/false")
    refused = "the compiler failed" if what == "file" else f"can't be kept safely: .*{how}"
    with pytest.raises(UnsupportedError, match=refused):
        build.build_kernel()


THREADS = """
import os, shutil, sys, threading, torch, sqrtdk
from sqrtdk.impl.kernel import libraries, load
assert not load.loaded()
os.mkdir(libraries.cache_folder(), 0o700)
shutil.copy(sys.argv[1], libraries.cache_folder())
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
def test_many_threads_load_it_once(tmp_path: Path, warm: Warm) -> None:
    done = warm(THREADS, str(built()), verb="-c", **settings(tmp_path, CXX="/bin/false"))
    assert (done.returncode, done.stderr) == (0, "")


def test_many_threads_build_it_once(unloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def slow(folder: Path, target: str) -> Path:
        time.sleep(0.2)
        made.append(folder / target)
        return made[-1]

    monkeypatch.setattr(libraries, "unsupported", lambda: None)
    monkeypatch.setattr(load, "_attempt", lambda: (made[0], None) if made else (None, "not built"))
    monkeypatch.setattr(build, "compile_into", slow)
    threads = [threading.Thread(target=build.ready) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(made) == 1
    assert load.loaded()


PREBUILT = """
import sys
from pathlib import Path
from sqrtdk.impl.kernel import build, libraries, load
load.PREBUILT = libraries.PREBUILT = Path(sys.argv[1])
try:
    print(build.build_kernel() if sys.argv[2] == "build" else load.load_kernel() or load.library())
except NotImplementedError as error:
    print(error)
"""


@needs_kernel
def test_a_prebuilt_library_serves_unless_the_cache_has_one(tmp_path: Path, warm: Warm) -> None:
    given = settings(tmp_path / "cache", CXX=str(quick(tmp_path / "cxx")))
    shipped, kept = tmp_path / "prebuilt" / built().name, tmp_path / "cache/sqrtdk" / built().name

    def run(verb: str, **more: str) -> str:
        done = warm(PREBUILT, str(shipped.parent), verb, verb="-c", **(given | more))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    shipped.parent.mkdir()
    shutil.copy(built(), shipped)
    shipped.chmod(0o664)  # as pip leaves it where the user's mask is 002
    assert run("load") == run("build") == str(shipped)
    assert run("load", SQRTDK_CACHE="~no-such-user-as-this/x") == str(shipped)
    planted(tmp_path / "cache").write_text("no library")
    assert run("load") == str(shipped)
    kept.unlink()
    shipped.write_bytes(shipped.read_bytes()[:200_000])
    assert f"the library is not loaded: {shipped} is damaged: `sqrtdk build` builds it again" in run("load")
    assert run("build") == run("load") == str(kept)


@pytest.mark.parametrize("given", ["~/x", "x"])
def test_the_cache_s_name_is_made_whole(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SQRTDK_CACHE", given)
    assert libraries.cache_folder() == tmp_path / "x/sqrtdk"


def test_auto_leaves_a_kernel_that_was_not_looked_for(unloaded: Path) -> None:
    large = torch.randn(1, 8, 512, 64)
    choice = sqrtdk.explain(large, large, large, softcap=5.0)
    assert choice.impl != "cpu"
    assert "not the compiled kernel: not yet" in choice.reason


@needs_kernel
def test_the_library_s_name_follows_source_torch_and_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = libraries.stem("avx512")
    names = {here, libraries.stem("avx512_bf16")}
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    libraries._digest.cache_clear()
    names.add(libraries.stem("avx512"))
    monkeypatch.undo()
    copy = tmp_path / "attention.cpp"
    copy.write_text(libraries.cpp_sources()[0].read_text() + "\n// changed\n")
    monkeypatch.setattr(libraries, "cpp_sources", lambda: [copy])
    libraries._digest.cache_clear()
    names.add(libraries.stem("avx512"))
    monkeypatch.undo()
    libraries._digest.cache_clear()
    assert len(names) == 4
    assert built().name.startswith(libraries.stem(libraries.this_target()))


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
    assert sqrtdk.explain(large, large, large, bias=learned).impl == "cpu"
    assert sqrtdk.explain(large, large, large, dropout_p=0.1).impl == "cpu"
    assert torch.equal(sqrtdk.attention(large, large, large), sqrtdk.attention(large, large, large, impl="cpu"))


def test_the_reason_says_what_could_not_be_looked_at() -> None:
    real, small = torch.randn(1, 2, 512, 64), torch.empty(1, 2, 8, 64, device="meta")
    large = torch.empty(8, 32, 4096, 64, device="meta")
    assert "not looked at" not in sqrtdk.explain(real, real, real, is_causal=True, dropout_p=0.1).reason
    assert "not looked at" not in sqrtdk.explain(small, small, small).reason
    found = sqrtdk.explain(small, small, small, is_causal=True)
    assert found.impl == "fused"
    assert "; not looked at: whether NaN or infinity stands at a hidden key" in found.reason
    assert "; not looked at: whether torch would hold all pairs at once" in sqrtdk.explain(large, large, large).reason
