"""Whatever lies where the compiled kernel is looked for: right numbers or our error, no signal's death, no waiting."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.attention.building import built, call, planted, quick, settings
from tests.support.kernel_here import needs_kernel
from tests.support.program import Warm

pytestmark = needs_kernel
Damage = Callable[[Path], None]  # of the file that has the library's name


def cut(length: int) -> Damage:
    return lambda path: path.write_bytes(path.read_bytes()[:length]) and None


def turned(at: int, bits: int = 0xFF) -> Damage:
    def damage(path: Path) -> None:
        whole = bytearray(path.read_bytes())
        whole[at] ^= bits
        path.write_bytes(whole)

    return damage


def instead(make: Damage) -> Damage:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def huge(path: Path) -> None:
    os.truncate(path, 2**42)


def named(name: str) -> Damage:
    """The whole library, its checksum another one, or none."""
    return lambda path: path.rename(path.with_name(path.name.rpartition("-")[0] + name)) and None


DAMAGES: dict[str, Damage] = {
    "empty": cut(0),
    "header only": cut(64),
    "a page": cut(4096),
    "half": cut(200_000),
    "a byte less": cut(-1),
    "magic number": turned(0),
    "entry of a segment": turned(80),
    "symbols": turned(0x1000),
    "a bit of the code": turned(0x20000, 1),
    "the last byte": turned(-1),
    "a byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0") and None,
    "text": lambda path: path.write_text("no library") and None,
    "another library": lambda path: shutil.copy(shutil.which("true") or "", path) and None,
    "as large as a disk": huge,
    "a folder": instead(Path.mkdir),
    "a pipe": instead(os.mkfifo),
    "a device": instead(lambda path: path.symlink_to("/dev/zero")),
    "a link to nothing": instead(lambda path: path.symlink_to("nothing")),
    "a link to itself": instead(lambda path: path.symlink_to(path.name)),
    "no checksum": named(".so"),
    "an empty checksum": named("-.so"),
    "the checksum of another": named("-0123456789abcdef.so"),
}

ATTEMPTS = """
import json, os, sys, torch, sqrtdk
from sqrtdk.impl.kernel import build, load
q = torch.randn(1, 8, 512, 64)
for name in json.loads(sys.argv[1]):
    os.environ["SQRTDK_CACHE"] = name
    load.load_if_built()
    explained = sqrtdk.explain(q, q, q, softcap=30.0)
    try:
        sqrtdk.attention(q, q, q, impl="cpu")
        named = "runs"
    except NotImplementedError as error:
        named = f"{error} | {error.hint}"
    print(json.dumps([name, load.kernel_state().built, explained.impl, explained.reason, named]), flush=True)
"""


def attempts(warm: Warm, caches: list[Path]) -> Iterator[tuple[Path, bool, str, str, str]]:
    """What one process finds in each: whether a whole library, what "auto" takes, why, and what `impl="cpu"` does."""
    names = json.dumps([str(cache) for cache in caches])
    done = warm(ATTEMPTS, names, verb="-c", **settings(Path("/nowhere"), CXX="/bin/false"))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for line in done.stdout.splitlines():
        name, *found = json.loads(line)
        yield Path(name), *found


def judge(warm: Warm, damages: dict[str, Damage], folder: Path) -> None:
    """One process meets them all: that it is there at the end, and says so of each, shows that it opened none."""
    for name, damage in damages.items():
        damage(planted(folder / name))
    tried = []
    for cache, whole, impl, reason, named_error in attempts(warm, [folder / name for name in damages]):
        assert (whole, impl) == (False, "tiled"), cache
        assert "not the compiled kernel: " in reason, cache
        assert any(why in reason for why in ("sqrtdk build", "can't be read")), reason
        assert named_error.startswith("the compiler failed: it exited with 1 | The compiler has to be GCC 11"), cache
        tried.append(cache.name)
    assert tried == list(damages)


def test_no_damaged_library_is_opened(tmp_path: Path, warm: Warm) -> None:
    judge(warm, DAMAGES, tmp_path)


@pytest.mark.slow
def test_no_damage_of_many_ends_a_process(tmp_path: Path, warm: Warm) -> None:
    size, rng = built().stat().st_size, random.Random(0)
    many = {f"cut at {length}": cut(length) for length in (*range(1, size, size // 100), size - 4096, size - 1)}
    for at in sorted(rng.randrange(size) for _ in range(100)):
        many[f"a bit turned at {at}"] = turned(at, 1 << rng.randrange(8))
    judge(warm, many, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", ["a pipe", pytest.param("a folder", marks=pytest.mark.full)])
def test_a_build_puts_a_whole_library_in_its_place(name: str, tmp_path: Path, warm: Warm) -> None:
    (path := planted(tmp_path)).touch()
    DAMAGES[name](path)
    if name == "a folder":
        (path / "within").touch()
    assert call(warm, settings(tmp_path, CXX=str(quick(tmp_path / "cxx"))))["named"] == "runs"
    (left,) = (tmp_path / "sqrtdk").iterdir()
    assert stat.S_ISREG(left.lstat().st_mode)
    assert left.read_bytes() == built().read_bytes()


def test_a_whole_library_beside_a_damaged_one_is_taken(tmp_path: Path, warm: Warm) -> None:
    planted(tmp_path / "cache")
    named("-0123456789abcdef.so")(planted(tmp_path / "other"))
    (damaged,) = (tmp_path / "other/sqrtdk").iterdir()
    newer = damaged.rename(tmp_path / "cache/sqrtdk" / damaged.name)
    os.utime(newer)
    ((_, whole, impl, _, named_error),) = attempts(warm, [tmp_path / "cache"])
    assert (whole, impl, named_error) == (True, "cpu", "runs")


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


ODD: dict[str, Damage] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": bound,
    "a file": Path.touch,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing that can be made": lambda path: path.symlink_to("/proc/nothing/there"),
}


@pytest.mark.parametrize("within", [False, True], ids=["named", "within"])
def test_a_cache_of_an_odd_kind_is_named(within: bool, warm: Warm) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # a socket's name has to be
        for name, make in ODD.items():
            cache = Path(short) / name
            if within:
                cache.mkdir()
            make(cache / "sqrtdk" if within else cache)
        tried = 0
        for cache, whole, impl, reason, named_error in attempts(warm, [Path(short) / name for name in ODD]):
            assert (whole, impl) == (False, "tiled"), cache
            assert any(why in reason for why in ("can't be read: ", "it is not built", "directory is unknown")), reason
            assert "kept in" in named_error or "directory is unknown" in named_error, named_error
            assert "SQRTDK_CACHE names" in named_error
            tried += 1
        assert tried == len(ODD)


def test_a_cache_that_can_t_be_listed_or_written_is_named(warm: Warm) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        Path(top).chmod(0o755)
        modes = {"unreadable": 0o111, "read-only": 0o555}
        for name, mode in modes.items():
            planted(Path(top) / name)
            (Path(top) / name / "sqrtdk").chmod(mode)
        someone = ATTEMPTS.replace(
            "q = ", "if not os.geteuid(): os.seteuid(65534)  # who may read no file of this Python\nq = "
        )
        caches = json.dumps([f"{top}/unreadable", f"{top}/read-only"])
        done = warm(someone, caches, verb="-c", **settings(Path("/nowhere"), CXX="/bin/false"))
        assert (done.returncode, done.stderr) == (0, "")
        unreadable, read_only = (json.loads(line) for line in done.stdout.splitlines())
        assert "unreadable/sqrtdk can't be read: Permission denied" in unreadable[3]
        assert "can't be kept in" in unreadable[4]
        assert (read_only[1], read_only[2], read_only[4]) == (True, "cpu", "runs")  # nothing is written to load it
        for name in modes:
            (Path(top) / name / "sqrtdk").chmod(0o700)
