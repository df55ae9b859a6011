"""What a graph holds is counted whole, random numbers are read, and no softmax but that of an attention is one."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from tests.graphs.files import D, L, attention_model, model_of, onnx, write
from tests.support.program import called

make = onnx.helper.make_node
FLOAT = onnx.TensorProto.FLOAT


def test_constants_of_every_dtype_are_counted(tmp_path: Path) -> None:
    model = attention_model(
        extra=[make("Constant", [], ["c"], value=onnx.numpy_helper.from_array(np.ones(5, np.float32), "c"))]
    )
    int4 = onnx.helper.make_tensor("four", onnx.TensorProto.INT4, [3, 8], [1] * 24)
    more = {"eight": np.ones((7, 9), np.int8), "half": np.ones(11, np.float16), "at": np.ones(2, np.int64)}
    before = sum(int(np.prod(tensor.dims)) for tensor in model.graph.initializer)
    model.graph.initializer.extend([int4, *(onnx.numpy_helper.from_array(a, name) for name, a in more.items())])
    report = sqrtdk.check(str(write(model, tmp_path / "g.onnx")))
    assert report.model.parameters == before + 5 + 24 + 7 * 9 + 11 + 2


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_are_counted_unpacked(bits: int, tmp_path: Path) -> None:
    packed = np.zeros((D, 1, 32 * bits // 8), np.uint8)  # K of 32, in one block
    constants = {"w": packed, "s": np.ones(D, np.float32)}
    node = make("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=32, N=D, bits=bits, block_size=32)
    model = model_of([node], [("x", FLOAT, [1, L, 32])], constants)
    report = sqrtdk.check(str(write(model, tmp_path / "g.onnx")))
    assert report.model.parameters == 32 * D + D


class Nibbles(nn.Module):
    """Two numbers in a byte, as bitsandbytes and AWQ keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.randint(0, 255, (32, 16), dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (torch.stack([self.w & 15, self.w >> 4], -1).flatten(1).float() - 8).T


class Words(nn.Module):
    """Eight numbers in an int32, as GPTQ keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.randint(0, 2**31 - 1, (4, 32), dtype=torch.int32))
        self.register_buffer("shifts", torch.arange(0, 32, 4, dtype=torch.int32)[None, :, None])

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.bitwise_right_shift(self.w[:, None].expand(-1, 8, -1), self.shifts) & 15
        return x @ (numbers.reshape(32, 32).float() - 8)


class Kernel(nn.Module):
    """Packed for torch's own kernel."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.randint(0, 16, (32, 32), dtype=torch.int32)
        self.register_buffer("w", torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1))
        self.register_buffer("sizes", torch.rand(1, 32, 2, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1).bfloat16()
        return torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.w, 32, self.sizes).float().view(x.shape)


class Attending(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.q, self.k, self.v = kind(), kind(), kind()

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).mT * 32**-0.5).softmax(-1) @ self.v(x)


class Tied(Attending):
    """One projection for q and v, and constants that no parameter holds."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(32, 32))
        self.v = self.q
        self.register_buffer("mask", torch.ones(L, L, dtype=torch.bool).tril())
        self.register_buffer("last", torch.ones(7), persistent=False)
        self.register_buffer("odd", torch.arange(9))
        self.register_buffer("places", torch.arange(11))  # hashed by their bits, and not packed
        self.plain = torch.arange(L)

    def forward(self, x: Tensor) -> Tensor:
        logits = (self.q(x) @ self.k(x).mT * 32**-0.5).masked_fill(~self.mask, -math.inf)
        more = self.last.sum() + self.plain[:, None] + (self.odd & 1).sum()
        more = more + ((self.places >> 4) + (self.places & 15)).sum()
        return (logits + torch.tensor([1.0, 2, 3, 4, 5])).softmax(-1) @ self.v(x) + more


WHOLE = 32 * 32
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "tied, and constants": (Tied, 2 * (WHOLE + 32) + L * L + 7 + 9 + 11 + L + 5),
    "int4 in bytes": (lambda: Attending(Nibbles), 3 * WHOLE),
    "int4 in words": (lambda: Attending(Words), 3 * (WHOLE + 8)),
    "int4 in a kernel's order": (lambda: Attending(Kernel), 3 * (WHOLE + 2 * 32)),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_program_is_counted_like_a_graph(case: str, tmp_path: Path) -> None:
    build, expected = PROGRAMS[case]
    path = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(build().eval(), (torch.randn(2, L, 32),)), path)
    report = sqrtdk.check(str(path))
    assert report.model.parameters == expected
    assert [judged.verdict for judged in report.calls] == ["exact"]


def test_a_program_on_the_meta_device_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    model = Attending(lambda: nn.Linear(32, 32)).to("meta").eval()
    torch.export.save(torch.export.export(model, (torch.randn(2, L, 32, device="meta"),)), path)
    assert sqrtdk.check(str(path)).model.parameters == sum(p.numel() for p in model.parameters())


RANDOM: dict[str, tuple[list[str], dict[str, Any]]] = {
    "RandomNormalLike": (["x"], {}),
    "RandomUniformLike": (["x"], {"dtype": FLOAT}),
    "RandomNormal": ([], {"shape": [1, L, D]}),
    "RandomUniform": ([], {"shape": [1, L, D], "low": 0.1, "high": 0.2}),
    "Bernoulli": (["x"], {}),
}


@pytest.mark.parametrize("op", RANDOM)
def test_random_numbers_before_an_attention_are_read(op: str, tmp_path: Path) -> None:
    inputs, attributes = RANDOM[op]
    model = attention_model()
    for node in model.graph.node:
        node.input[:] = ["noised" if name == "x" else name for name in node.input]
    for node in (make("Add", ["x", "noise"], ["noised"]), make(op, inputs, ["noise"], **attributes)):
        model.graph.node.insert(0, node)
    report = sqrtdk.check(str(write(model, tmp_path / "g.onnx")))
    assert [judged.call.formula for judged in report.calls] == ["softmax(0.5 * q.k + causal)"]
    assert not report.not_measured


def test_the_bins_of_a_spline_are_no_attention(tmp_path: Path) -> None:
    # the widths of the bins of a rational-quadratic spline, behind an operator that is not read
    spline = [
        make("NonZero", ["y"], ["places"]),
        make("Transpose", ["places"], ["rows"], perm=[1, 0]),
        make("GatherND", ["y", "rows"], ["picked"]),
        make("Softmax", ["picked"], ["widths"], "/spline/Softmax", axis=-1),
        make("Mul", ["widths", "scale"], ["wide"]),
        make("CumSum", ["wide", "zero"], ["knots"]),
    ]
    model = attention_model(extra=spline)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0), "zero"))
    report = sqrtdk.check(str(write(model, tmp_path / "g.onnx")))
    assert len(report.calls) == 1
    assert not report.not_measured
    assert not [finding for finding in report.findings if finding.rule == "unmeasured"]


class Coupling(nn.Module):
    """Neural spline flow (Durkan et al. 2019): a rational-quadratic spline whose bins the other half of x gives."""

    bins, reach = 8, 3.0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4 * (3 * self.bins - 1))

    def forward(self, x: Tensor) -> Tensor:
        kept, moved = x.chunk(2, -1)
        params = self.net(kept).unflatten(-1, (4, -1))
        widths, at = self.knots(params[..., : self.bins])
        heights, up = self.knots(params[..., self.bins : -self.bins + 1])
        slopes = nn.functional.pad(nn.functional.softplus(params[..., 1 - self.bins :]), (1, 1), value=1.0)
        place = ((moved.clamp(-3, 3)[..., None] >= at).sum(-1, keepdim=True) - 1).clamp(0, self.bins - 1)
        x0, w, y0, h, s0, s1 = (t.gather(-1, place)[..., 0] for t in (at, widths, up, heights, slopes, slopes[..., 1:]))
        t = (moved - x0) / w
        made = y0 + h * (h / w * t**2 + s0 * t * (1 - t)) / (h / w + (s1 + s0 - 2 * h / w) * t * (1 - t))
        return torch.cat([torch.where(moved.abs() <= self.reach, made, moved), kept], -1)

    def knots(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = 1e-3 + (1 - 1e-3 * self.bins) * (x / 32**0.5).softmax(-1)
        knots = 2 * self.reach * nn.functional.pad(shares.cumsum(-1), (1, 0)) - self.reach
        return knots[..., 1:] - knots[..., :-1], knots


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Coupling(), Coupling()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x + 0.8 * torch.randn_like(x)))
        return out


@pytest.mark.parametrize("kind", [".onnx", ".pt2"])
def test_a_flow_of_splines_has_no_attention(kind: str, tmp_path: Path) -> None:
    path, x = tmp_path / f"flow{kind}", (torch.randn(2, L, 8),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == ".onnx":
            torch.onnx.export(Flow().eval(), x, path, dynamo=False)
            assert b"RandomNormalLike" in path.read_bytes()
        else:
            torch.export.save(torch.export.export(Flow().eval(), x), path)
    result = called("check", path, "--json")
    assert result.returncode == 0
    document = json.loads(result.stdout)
    assert (document["calls"], document["not_measured"], document["findings"]) == ([], [], [])
    assert "torch.compile" not in result.stdout + result.stderr


def test_a_graph_without_attention_is_said_in_one_sentence(tmp_path: Path) -> None:
    nodes = [make("MatMul", ["x", "w"], ["h"]), make("Relu", ["h"], ["y"])]
    model = model_of(nodes, [("x", FLOAT, [1, L, D])], {"w": np.ones((D, D), np.float32)})
    result = called("check", write(model, tmp_path / "g.onnx"))
    assert result.returncode == 0
    assert "No attention was seen" in result.stdout
    assert "torch.compile" not in result.stdout + result.stderr
