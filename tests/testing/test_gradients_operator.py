"""`assert_gradients` on an operator of `torch.library` that is written in C++: its planted mistakes are named.

The trace can't see into such an operator, so the formula is the one that its author states.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sqrtdk import laws
from sqrtdk.errors import ModelError
from sqrtdk.testing import assert_gradients

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]

# Causal, float32, q (B, Hq, L, E), k and v (B, H, L, E). The backward pass recomputes p from lse.
SOURCE = """
#include <cmath>
#include <cstdint>
#include <vector>

struct Sizes { int64_t batch, query_heads, heads, rows, width; };

static float dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
  for (int64_t e = 0; e < n; e++) sum += a[e] * b[e];
  return sum;
}

extern "C" void forward(const float* q, const float* k, const float* v, float* o, float* lse, const Sizes* s) {
  const int64_t L = s->rows, E = s->width, group = s->query_heads / s->heads;
  const float scale = 1 / std::sqrt(float(E));
  std::vector<float> p(L);
  for (int64_t h = 0; h < s->batch * s->query_heads; h++)
    for (int64_t i = 0; i < L; i++) {
      const float *keys = k + h / group * L * E, *values = v + h / group * L * E;
      float most = -INFINITY, sum = 0;
      for (int64_t j = 0; j <= i; j++) most = std::fmax(most, p[j] = scale * dot(q + (h * L + i) * E, keys + j * E, E));
      for (int64_t j = 0; j <= i; j++) sum += p[j] = std::exp(p[j] - most);
      for (int64_t e = 0; e < E; e++) {
        float x = 0;
        for (int64_t j = 0; j <= i; j++) x += p[j] * values[j * E + e];
        o[(h * L + i) * E + e] = x / sum;
      }
      lse[h * L + i] = most + std::log(sum);
    }
}

enum { RIGHT, ENTRIES, SCALE, LAST_HEAD, LAST_BLOCK };

extern "C" void backward(const float* q, const float* k, const float* v, const float* o, const float* lse,
                         const float* go, float* dq, float* dk, float* dv, const Sizes* s, int mistake) {
  const int64_t L = s->rows, E = s->width, group = s->query_heads / s->heads;
  const int64_t rows = mistake == LAST_BLOCK ? L / 16 * 16 : L;
  const float scale = 1 / std::sqrt(float(E));
  for (int64_t h = 0; h < s->batch * s->query_heads; h++)
    for (int64_t i = 0; i < rows; i++) {
      const int64_t row = (h * L + i) * E;
      const float delta = dot(go + row, o + row, E);
      for (int64_t j = 0; j <= i; j++) {
        const int64_t column = (h / group * L + j) * E;
        const float p = std::exp(scale * dot(q + row, k + column, E) - lse[h * L + i]);
        const float dp = dot(go + row, v + column, E);
        const float ds = p * (dp - (mistake == ENTRIES ? p * dp : delta));
        for (int64_t e = 0; e < E; e++) {
          dq[row + e] += scale * ds * k[column + e];
          if (mistake != LAST_HEAD || h % group == group - 1)
            dk[column + e] += (mistake == SCALE ? 1 : scale) * ds * q[row + e];
          dv[column + e] += p * go[row + e];
        }
      }
    }
}
"""
MISTAKES = {
    "entries": (1, "the gradient of q, k is the formula's with p * dp in place of D, its row sum"),
    "scale": (2, "the gradient of k is 2.828 times the formula's: the scale is missing"),
    "last head": (3, "the gradient of k is that of query head 1 of each group alone: the sum over the group"),
    "last block": (4, "the gradient of q, k, v is the formula's without rows 32-36 of q"),
}

Operator = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("operator")
    (folder / "attention.cpp").write_text(SOURCE, encoding="utf-8")
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", "attention.cpp", "-o", "attention.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "attention.so"))


def operator(library: ctypes.CDLL, name: str, mistake: int) -> Operator:
    """The operator as its author registers it; it returns (output, lse), and lse has no gradient."""

    def run(function: Any, tensors: list[Tensor], *more: int) -> None:
        q, k = tensors[:2]
        sizes = (ctypes.c_int64 * 5)(q.shape[0], q.shape[1], k.shape[1], *q.shape[2:])
        function(*(ctypes.c_void_p(x.data_ptr()) for x in tensors), sizes, *more)

    @torch.library.custom_op(f"sqrtdk_test::{name}", mutates_args=())
    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
        run(library.forward, [q, k, v, out, lse])
        return out, lse

    @torch.library.custom_op(f"sqrtdk_test::{name}_backward", mutates_args=())
    def gradients(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, d_out = (x.contiguous() for x in (q, k, v, out, d_out))
        found = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        run(library.backward, [q, k, v, out, lse, d_out, *found], mistake)
        return found

    def setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output)

    attention.register_autograd(lambda ctx, d_out, _: gradients(*ctx.saved_tensors, d_out), setup_context=setup)
    return attention


def vectors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 37, 8), (2, 2, 37, 8), (2, 2, 37, 8)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def test_a_right_operator_passes_and_an_lse_without_a_gradient_is_named(library: ctypes.CDLL) -> None:
    attention = operator(library, "right", 0)
    report = assert_gradients(lambda q, k, v: attention(q, k, v)[0], *vectors(), is_causal=True)
    assert all(case.kept == ("q", "k", "v") for case in report.cases)
    with pytest.raises(AssertionError) as failed:
        assert_gradients(attention, *vectors(), is_causal=True)
    assert str(failed.value).splitlines() == [
        "gradients of sqrtdk_test::right in float32: wrong in 10 of 10 cases",
        "  as given and 9 more: the gradient of q, k is the formula's without the gradient of lse",
    ]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_named_though_lse_has_no_gradient_either(name: str, library: ctypes.CDLL) -> None:
    mistake, sentence = MISTAKES[name]
    attention = operator(library, name.replace(" ", "_"), mistake)
    for function in (attention, lambda q, k, v: attention(q, k, v)[0]):
        with pytest.raises(AssertionError) as failed:
            assert_gradients(function, *vectors(), is_causal=True)
        assert str(failed.value).splitlines()[1].partition(": ")[2].startswith(sentence)
    with pytest.raises(AssertionError) as failed:
        assert_gradients(attention, *vectors(), is_causal=True, grid=False)
    assert len(str(failed.value).splitlines()) == 2


def test_a_model_that_calls_it_is_refused_with_its_name(library: ctypes.CDLL) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(32, 96)
            self.attend = operator(library, "of_a_model", 0)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            return self.attend(q, k, v)[0].transpose(1, 2).flatten(2)

    with pytest.raises(ModelError, match="sqrtdk_test::of_a_model is opaque"):
        laws.ask(Model(), {"x": torch.randn(2, 19, 32)}, "gradient")
