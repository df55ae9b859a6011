"""A model larger than the memory that is left runs from disk through accelerate, and is refused without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

pytest.importorskip("resource", reason="needs Unix resource limits")

RUN = """
import resource, sys
import torch
from sqrtdk.errors import ModelError
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.memory import available_memory
from sqrtdk.models.run import call
import accelerate, transformers
torch.set_num_threads(1)
resolve_model("demo")
where, folder, out, size = sys.argv[1:]
size = int(size)
transformers.LlamaForCausalLM
used = next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmData:"))
resource.setrlimit(resource.RLIMIT_DATA, (used + size + 96 * 2**20, resource.RLIM_INFINITY))
assert 0 < available_memory(mapped=size) <= 96 * 2**20
try:
    resolve_model(where, LoadOptions(seq_len=8))
    print("fits")
except ModelError as error:
    print(error)
loaded = resolve_model(where, LoadOptions(seq_len=8, offload_folder=folder))
print(sorted({str(place) for place in loaded.module.hf_device_map.values()}))
torch.save(call(loaded.module, loaded.inputs).logits, out)
"""


@pytest.mark.full
def test_a_model_larger_than_memory_runs_from_disk(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        pad_token_id=0,
        architectures=["LlamaForCausalLM"],
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    size = sum(p.numel() for p in model.parameters()) * 4
    assert size > 120 * 2**20
    model.save_pretrained(tmp_path / "model", max_shard_size="20MB")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            RUN,
            str(tmp_path / "model"),
            str(tmp_path / "offload"),
            str(tmp_path / "out.pt"),
            str(size),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refused, places = done.stdout.strip().splitlines()
    assert "GiB for its weights" in refused
    assert places == "['cpu', 'disk']"
    from sqrtdk.models.load import resolve_model
    from sqrtdk.models.options import LoadOptions

    inputs = resolve_model(str(tmp_path / "model"), LoadOptions(seq_len=8, static=True)).inputs
    assert inputs["input_ids"].shape == (1, 8)
    plain = resolve_model(str(tmp_path / "model"), LoadOptions(seq_len=8))
    with torch.no_grad():
        torch.testing.assert_close(torch.load(tmp_path / "out.pt"), plain.module(**plain.inputs).logits)
