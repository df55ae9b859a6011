"""A dump that llama.cpp wrote of a small Llama, without flash attention: read, judged, and run, without llama.cpp.

`examples/llama_cpp_dump` wrote it; the tests of files that llama.cpp runs are in `make rest`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import sqrtdk
from sqrtdk.errors import ModelError
from sqrtdk.frontends.ggml.dump import read_dump
from sqrtdk.frontends.ggml.front import GgmlSource, ggml_module, ids_of

DUMP = Path(__file__).parent / "small.ggmldump"


def test_formula_site_and_place() -> None:
    report = sqrtdk.check(str(DUMP), laws="causal")
    (call,) = report.calls
    assert (call.site, call.formula, call.verdict) == (
        "blk.0.attn", "softmax(0.3536 * rope(q).rope(k) + causal)", "exact"
    )  # fmt: skip
    assert call.call.product_at.startswith("<MUL_MAT kq-0>:")
    assert not report.findings
    assert report.kv_bytes_per_token == 2 * 2 * 8 * 4  # of float32 here, float16 in the cache


def test_rounding_is_what_a_wider_run_lacks() -> None:
    run = read_dump(DUMP)
    module = ggml_module(GgmlSource(run), ids_of(run))
    theirs = torch.from_numpy(run.output).reshape(1, 6, 16)
    ids = ids_of(run)
    with torch.no_grad():
        rounded = float((module(ids) - theirs).abs().max())
        exact = float((module.double()(ids) - theirs).abs().max())
    assert rounded < exact / 10  # float16 products and caches, repeated
    assert module.own_rounding == pytest.approx(exact / float(theirs.abs().max()), rel=0.1)


def test_a_graph_that_gives_other_outputs_is_refused(tmp_path: Path) -> None:
    """The judge: the factor of the softmax is changed in the dump, and the outputs are llama.cpp's still."""
    content = DUMP.read_bytes()
    begin = content.index(b'"op": "SOFT_MAX"')
    line = content[content.rindex(b'{"node"', 0, begin) : content.index(b"\n", begin)]
    record = json.loads(line)
    record["params"][0] += 2**23  # the exponent: twice the scale
    (tmp_path / "other.ggmldump").write_bytes(content.replace(line, json.dumps(record).encode()))
    with pytest.raises(ModelError, match="gives other outputs than llama"):
        sqrtdk.check(str(tmp_path / "other.ggmldump"), laws="none")
