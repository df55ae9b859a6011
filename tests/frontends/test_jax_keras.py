"""Layers and models of Keras on JAX in place of a function: formula, verdict, sites, lines, names of parameters."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from tests.frontends.programs import CAUSAL, PLAIN
from tests.support.paths import ROOT

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not all(map(find_spec, ("jax", "keras"))), reason="needs jax and keras"),
]

# program: formula, sites, key heads
EXPECTED = {
    "mha": (PLAIN, [""], 4),
    "mha_causal": (CAUSAL, [""], 4),
    "mha_padded": ("softmax(0.3536 * q.k + padding)", [""], 4),
    "mha_dropout": (PLAIN, [""], 4),
    "gqa": (PLAIN, [""], 2),
    "gqa_causal": (CAUSAL, [""], 1),
    "subclassed": (CAUSAL, ["block_0.attn", "block_1.attn"], 2),
    "functional": ("softmax(0.3536 * q.k + causal)", ["attn"], 4),
}


def _run(backend: str, *command: str) -> str:
    environment = os.environ | {"KERAS_BACKEND": backend}
    command = (sys.executable, *command)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def _answers() -> dict[str, Any]:
    answers: dict[str, Any] = json.loads(_run("jax", "-m", "tests.frontends.keras_programs"))
    return answers


@pytest.mark.parametrize("name", EXPECTED)
def test_check_reads_formula_verdict_and_sites(name: str) -> None:
    formula, sites, heads = EXPECTED[name]
    answer = _answers()["programs"][name]
    assert answer["calls"] == [[site, formula, "exact", heads] for site in sites]
    assert answer["at"].startswith("keras/src/layers/")


def test_variables_have_their_paths() -> None:
    names = _answers()["programs"]["functional"]["parameters"]
    assert {"embed.embeddings", "attn.query.kernel", "attn.attention_output.bias", "head.kernel"} <= set(names)


def test_a_layer_without_variables_is_refused() -> None:
    assert "no variables yet" in _answers()["unbuilt"]
    assert "build()" in _answers()["unbuilt"]


def test_another_backend_is_refused() -> None:
    script = (
        "import keras, numpy as np, sqrtdk\n"
        "layer = keras.layers.Dense(3)\n"
        "layer.build((2, 4))\n"
        "try: sqrtdk.frontends.from_jax(layer, None, np.ones((2, 4), 'float32'))\n"
        "except sqrtdk.errors.ModelError as error: print(error, error.hint)"
    )
    assert "KERAS_BACKEND=jax" in _run("torch", "-c", script)
