"""When the Triton kernel is taken, when it is not and why, and that nothing of Triton is there where it is not used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk import _measure
from sqrtdk.errors import InvalidValueError, UnsupportedError
from sqrtdk.impl import choice
from sqrtdk.impl.choice import IMPLEMENTATIONS, Choice
from sqrtdk.impl.gpu import load, look
from sqrtdk.stats._partial import ROW_STATS_FIELDS
from tests.tolerances import allowed

B, HQ, H, L, S, E = 2, 4, 2, 9, 13, 16
TORCH_DOES_IT = "torch's kernels do all of it"
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
needs_interpreter = pytest.mark.skipif(not load.interpreted(), reason="a GPU is there; its tests are marked gpu")


def tensors(**options: Any) -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(B, h, n, E, generator=drawn) for h, n in ((HQ, L), (H, S), (H, S)))
    return tuple(t.to(**options) for t in (q, k, v))  # type: ignore[return-value]


def python(code: str, *arguments: str, path: list[Path] | None = None, interpret: bool = False) -> str:
    """What a fresh process prints, with other folders to import from before, or in place of, its own."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, *(("-S",) if path else ()), "-W", "error", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is taken for a GPU, on which Triton's interpreter runs the kernel, and no compiled one does."""
    monkeypatch.setattr(choice, "GPUS", ("cpu",))
    monkeypatch.setattr(choice, "interpreted", lambda: False)
    monkeypatch.setattr(choice, "loaded", lambda: False)
    monkeypatch.setattr(choice, "why_not_loaded", lambda: "it is a GPU")
    monkeypatch.setattr(_measure, "GPUS", ("cpu",))


# -- nothing of Triton where it is not used ----------------------------------------------------------------------------

UNUSED = """
import json
import sys
import torch
import sqrtdk
from sqrtdk._environment import environment

q = torch.randn(1, 2, 5, 8)
everything = sqrtdk.AuxRequest.all()
for impl in ("auto", "dense", "fused", "tiled"):
    sqrtdk.attention(q, q, q, return_aux=everything, impl=impl)
sqrtdk.attention(q, q, q)
sqrtdk.explain(q, q, q, return_aux=everything)
sqrtdk.measure(q, q, rows=2)
try:
    sqrtdk.attention(q, q, q, impl="triton")
except NotImplementedError as error:
    print(error)
if not torch.cuda.is_available() and not torch.xpu.is_available():
    print(json.dumps(environment()["triton"]))
print([name for name in sys.modules if name.split(".")[0] == "triton" or name == "sqrtdk.impl.gpu.look"])
"""


@pytest.mark.full
def test_nothing_is_imported_for_calls_on_a_cpu() -> None:
    refused, *state, imported = python(UNUSED).splitlines()
    assert refused == "impl='triton' can't run this call: Triton runs on GPUs, and the tensors are on cpu"
    assert imported == "[]"
    for triton in map(json.loads, state):  # where there is no GPU
        assert triton.pop("version") is not None
        assert triton == {"available": False, "interpreted": False, "reason": "torch sees no GPU"}


def test_nothing_is_imported_for_the_help() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "sqrtdk", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    imported = {line.rsplit("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"triton", "torch"}


# -- why it can't run --------------------------------------------------------------------------------------------------

ASKED = """
import os
import sys
import torch

def asked():
    import sqrtdk
    from sqrtdk._environment import environment
    q = torch.randn(1, 2, 5, 8)
    triton = environment()["triton"]
    try:
        sqrtdk.attention(q, q, q, impl="triton")
    except NotImplementedError as error:
        print(error)
    print(triton["version"], triton["available"], triton["interpreted"], triton["reason"])
    print(sqrtdk.attention(q, q, q, return_aux=sqrtdk.AuxRequest(lse=True))[1].lse.shape, flush=True)

for folder in ("", *sys.argv[1:]):  # each in a fork, which has torch behind it
    child = os.fork()
    if child == 0:
        sys.path[:0] = filter(None, [folder])
        asked()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
# what stands for the package, and what is then said of it
TRITONS = {
    "old": ("__version__ = '3.5.1'", "Triton 3.5.1 is installed, and 3.6 or newer is needed"),
    "broken": ("raise OSError('no libcuda.so\\nlook elsewhere')", "Triton can't be imported: no libcuda.so"),
    "wordless": ("raise RuntimeError", "Triton can't be imported: RuntimeError"),
    "another": ("", "the module `triton` that is imported here bears no version"),
}


@pytest.mark.full
def test_without_triton_and_with_one_that_does_not_do(tmp_path: Path) -> None:
    home = tmp_path / "all_else"
    home.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith("triton"):
            (home / entry.name).symlink_to(entry)
    for name, (source, _) in TRITONS.items():
        package = tmp_path / name / "triton"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(source)
        (package / "language.py").touch()
    path = [Path(sqrtdk.__file__).parents[1], home]
    lines = python(ASKED, *(str(tmp_path / name) for name in TRITONS), path=path, interpret=True).splitlines()
    reasons = ["Triton is not installed; torch's builds for GPUs bring it", *(reason for _, reason in TRITONS.values())]
    for reason, refused, state, rest in zip(reasons, lines[::3], lines[1::3], lines[2::3], strict=True):
        assert refused == f"impl='triton' can't run this call: {reason}"
        assert state.endswith(f" False True {reason}")
        assert rest == "torch.Size([1, 2, 5])"
    assert lines[1].startswith("None ")


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [
        ((7, 5), None, "the GPU has compute capability 7.5, and 8.0 or newer is needed"),
        ((8, 0), None, None),
        ((12, 0), None, None),
        ((7, 0), "6.4", None),
    ],
)
def test_gpus_that_are_too_old(
    capability: tuple[int, int], hip: str | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert look._against_device("cuda", 0) == reason
    monkeypatch.setattr(look, "DEVICES", {("cuda", 0): reason})
    monkeypatch.setattr(load, "interpreted", lambda: False)
    assert load.unavailable(torch.device("cuda", 0)) == load.unavailable(torch.device("cuda")) == reason
    assert load.unavailable(torch.device("cuda", 1)) == "torch can't use cuda 1 here"
    assert load.unavailable(torch.device("meta")) == "Triton runs on GPUs, and the tensors are on meta"


def test_the_reason_can_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `attention` asks for it under torch.compile, on a GPU."""
    monkeypatch.setattr(look, "DEVICES", {("cuda", 0): None})

    def plus(x: Tensor) -> Tensor:
        return x + 1.0 if load.unavailable(torch.device("cuda", 0)) is None else x

    assert torch.compile(plus, fullgraph=True, backend="eager")(torch.zeros(2)).tolist() == [1.0, 1.0]


# -- what "auto" takes -------------------------------------------------------------------------------------------------

SEEN = torch.ones(L, S).tril().bool()
ALIBI = sqrtdk.positions.alibi(HQ)
TAKEN: dict[str, dict[str, Any]] = {
    "statistics": {"return_aux": sqrtdk.AuxRequest(peak=True)},
    "softcap": {"softcap": 5.0},
    "learned scale": {"scale": torch.tensor(0.2, requires_grad=True)},
    "scale a head": {"scale": torch.full((HQ, 1, 1), 0.2)},
    "log n": {"scale": sqrtdk.scales.log_n()},
    "sinks": {"sinks": 0.0},
    "window": {"window": (3, 0)},
    "lower right": {"causal_lower_right": True},
    "alibi": {"bias": ALIBI},
    "causal and a mask": {"is_causal": True, "attn_mask": SEEN},
    "causal and a bias": {"is_causal": True, "bias": torch.zeros(L, S)},
}
LEFT: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": SEEN},
    "float mask": {"attn_mask": torch.zeros(L, S)},
    "bias": {"bias": torch.zeros(L, S)},
    "scale": {"scale": 0.3},
    "rule": {"scale": sqrtdk.scales.none()},
    "dropout": {"dropout_p": 0.1},
}


@needs_interpreter
@pytest.mark.usefixtures("as_gpu")
@pytest.mark.parametrize("name", TAKEN)
def test_taken_where_torch_alone_would_not_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    assert sqrtdk.explain(q, k, v, enable_gqa=True, **TAKEN[name]) == Choice("triton", "the Triton kernel runs it")
    ran = []
    monkeypatch.setitem(IMPLEMENTATIONS, "triton", lambda call: ran.append(call) or IMPLEMENTATIONS["dense"](call))
    sqrtdk.attention(q, k, v, enable_gqa=True, **TAKEN[name])
    assert len(ran) == 1


@needs_interpreter
@pytest.mark.usefixtures("as_gpu")
@pytest.mark.parametrize("name", LEFT)
def test_left_where_torch_does_it(name: str) -> None:
    taken = sqrtdk.explain(*tensors(), enable_gqa=True, **LEFT[name])
    assert taken.impl == "fused"
    assert taken.reason.startswith("torch's kernels run it")
    assert taken.reason.endswith(f"; not the Triton kernel: {TORCH_DOES_IT}")


@needs_interpreter
@pytest.mark.usefixtures("as_gpu")
@pytest.mark.parametrize(
    ("options", "impl", "reason"),
    [
        ({"softcap": 5.0, "dropout_p": 0.1}, "dense", "it has no dropout"),
        ({"score": sqrtdk.scores.keras_additive()}, "dense", "the score is no dot product"),
        ({"return_aux": sqrtdk.AuxRequest(lse=True), "dropout_p": 0.1}, "fused", "it has no dropout"),
    ],
    ids=["dropout", "score", "statistics and dropout"],
)
def test_the_reason_is_said_where_it_can_t_run(options: dict[str, Any], impl: str, reason: str) -> None:
    taken = sqrtdk.explain(*tensors(), enable_gqa=True, **options)
    assert taken.impl == impl
    assert taken.reason.endswith(f"; not the Triton kernel: {reason}")


@needs_interpreter
@pytest.mark.usefixtures("as_gpu")
def test_other_things_it_is_not_taken_for(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    asked: dict[str, Any] = {"enable_gqa": True, "softcap": 5.0}
    kept = sqrtdk.explain(*(t.double() for t in (q, k, v)), **asked)
    assert kept.reason.endswith("; not the Triton kernel: it takes float32, bfloat16, float16")
    own = q.as_subclass(type("Own", (Tensor,), {}))
    assert sqrtdk.explain(own, k, v, **asked).reason.endswith("the tensors are of a class of their own")
    monkeypatch.setattr(choice, "LARGEST_MASK", 0)
    assert sqrtdk.explain(q, k, v, enable_gqa=True, bias=ALIBI).impl == "triton"  # from a table
    kept = sqrtdk.explain(q, k, v, torch.zeros(L, S), enable_gqa=True, bias=ALIBI)
    assert kept.reason.endswith(f"it would need the position term as a bias of {HQ * L * S} elements")
    assert sqrtdk.explain(q, k, v, enable_gqa=True, attn_mask=SEEN).impl == "triton"  # where torch's mask is too large
    monkeypatch.setattr(choice, "interpreted", lambda: True)
    kept = sqrtdk.explain(q, k, v, **asked)
    assert kept.reason.endswith("TRITON_INTERPRET is set, and its interpreter is slow")


@needs_interpreter
@pytest.mark.usefixtures("as_gpu")
def test_an_exported_program_holds_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Capped(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = sqrtdk.attention(q, k, v, enable_gqa=True, softcap=5.0)
            assert isinstance(out, Tensor)
            return out

    assert sqrtdk.explain(*tensors(), enable_gqa=True, softcap=5.0).impl == "triton"
    program = torch.export.export(Capped(), tensors())
    assert "sqrtdk_gpu" not in str(program.graph)


@pytest.mark.parametrize("name", [*TAKEN, *LEFT])
def test_on_a_cpu_nothing_is_said_of_it(name: str) -> None:
    """Nor is it ever taken, though Triton's interpreter could."""
    taken = sqrtdk.explain(*tensors(), enable_gqa=True, **(TAKEN | LEFT)[name])
    assert taken.impl != "triton"
    assert "riton" not in taken.reason


# -- by name -----------------------------------------------------------------------------------------------------------


@needs_interpreter
def test_by_name_it_runs_or_raises() -> None:
    q, k, v = tensors()
    assert sqrtdk.explain(q, k, v, enable_gqa=True, impl="triton") == Choice("triton", "asked for")
    with pytest.raises(UnsupportedError, match="impl='triton' can't run this call: it has no dropout"):
        sqrtdk.attention(q, k, v, enable_gqa=True, dropout_p=0.1, impl="triton")
    with pytest.raises(InvalidValueError, match="impl is 'cuda'") as refused:
        sqrtdk.attention(q, k, v, enable_gqa=True, impl="cuda")
    assert refused.value.hint == "Use one of: auto, cpu, dense, fused, tiled, triton."


# -- measure -----------------------------------------------------------------------------------------------------------


@needs_interpreter
@pytest.mark.sampled(5)
@pytest.mark.parametrize("which", [None, "spread", "named"])
@pytest.mark.parametrize("name", ["statistics", "softcap", "scale a head", "log n", "window", "lower right", "alibi"])
def test_measure(name: str, which: str | None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel, of all rows or of some, as without it."""
    q, k, _ = tensors()
    rows: Any = {None: None, "spread": 4, "named": torch.tensor([8, 0, 5])}[which]
    options = {key: value for key, value in TAKEN[name].items() if key != "return_aux"}
    without = sqrtdk.measure(q, k, enable_gqa=True, rows=rows, **options)
    request.getfixturevalue("as_gpu")
    ran = []
    kernel = _measure.on_gpu
    monkeypatch.setattr(_measure, "on_gpu", lambda call: ran.append(call) or kernel(call))
    found = sqrtdk.measure(q, k, enable_gqa=True, rows=rows, **options)
    assert len(ran) == 1
    room = allowed(torch.float32, length=max(S, E), logit=float(without.max_logit.abs().max()), magnitude=1.0)
    for field in ROW_STATS_FIELDS:
        one, two = getattr(without, field), getattr(found, field)
        assert two.shape == (B, HQ, {None: L, "spread": 4, "named": 3}[which])
        size = max(1.0, float(one.abs().max()))
        torch.testing.assert_close(two, one, rtol=0.0, atol=room * size, msg=f"{field}: {one} and {two}")
