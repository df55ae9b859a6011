"""Every family builds from a directory that holds config.json only, gets inputs and runs, with values and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sqrtdk.models.load import iter_attn, resolve_model
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.run import call
from tests.hf.families import ATTENTION_CALLS, EAGER_ONLY, FAMILIES


class CountSoftmax(TorchDispatchMode):
    """Count softmaxes over (batch, head, query, key): a router's has two dimensions."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._softmax.default and args[0].ndim == 4:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    FAMILIES[request.param]().save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    return str(tmp_path)


def test_the_tables_name_the_same_families() -> None:
    assert list(FAMILIES) == list(ATTENTION_CALLS)
    assert len(FAMILIES) == 29


@pytest.mark.sampled(9)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize(("directory", "name"), [(n, n) for n in FAMILIES], indirect=["directory"], ids=list(FAMILIES))
def test_builds_and_runs_with_every_attention_it_has(directory: str, name: str, static: bool) -> None:
    builds = {build.attn: build for build in iter_attn(directory, LoadOptions(static=static, seq_len=12, batch=2))}
    assert set(builds) == {"eager", "sdpa"}
    assert (builds["sdpa"].loaded is None) == (name in EAGER_ONLY)
    for attn, build in builds.items():
        if build.loaded is None:
            assert build.reason is not None
            assert "sdpa" in build.reason
            continue
        loaded = build.loaded
        assert loaded.kind == "directory"
        assert loaded.attn == attn
        assert type(loaded.module).__name__ == loaded.config.architectures[0]
        assert not loaded.module.training
        assert all(p.is_meta == static for p in loaded.module.parameters())
        assert all(value.is_meta == static for value in loaded.inputs.values())
        with CountSoftmax() as softmax:
            call(loaded.module, loaded.inputs)
        if attn == "eager":
            assert softmax.count == ATTENTION_CALLS[name]


@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_both_attentions_get_the_same_weights_and_inputs(directory: str) -> None:
    eager, sdpa = (build.loaded for build in iter_attn(directory, LoadOptions(seed=3)))
    assert eager is not None
    assert sdpa is not None
    for one, other in zip(eager.module.parameters(), sdpa.module.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(eager.inputs["input_ids"], sdpa.inputs["input_ids"])
    other_seed = resolve_model(directory, LoadOptions(seed=4))
    assert not torch.equal(next(eager.module.parameters()), next(other_seed.module.parameters()))


@pytest.mark.parametrize("directory", ["gpt2"], indirect=True)
def test_the_random_state_of_the_caller_is_kept(directory: str) -> None:
    before = torch.random.get_rng_state()
    resolve_model(directory, LoadOptions(seed=5))
    resolve_model("demo")
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_dtype_of_the_config_is_kept_and_float16_on_a_cpu_is_not(directory: str) -> None:
    config = FAMILIES["llama"]()
    for stored, run in (("bfloat16", torch.bfloat16), ("float16", torch.float32)):
        config.dtype = stored
        config.save_pretrained(directory)
        loaded = resolve_model(directory)
        assert next(loaded.module.parameters()).dtype == run
        assert any("float16" in note for note in loaded.notes) == (stored == "float16")
    assert next(resolve_model(directory, LoadOptions(dtype="float64")).module.parameters()).dtype == torch.float64
