"""Quantised checkpoints, packed here as their formats say: the weights that are read are those that were packed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from sqrtdk import check
from sqrtdk.errors import ModelError, SqrtdkError
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.packed_formats import unpacked
from tests.models.adapted import base_model, written_base

GROUP = 16
SHORT = LoadOptions(seq_len=8)
Packed = tuple[Tensor, dict[str, Tensor]]  # the weight, and the tensors that stand for it


def words(numbers: Tensor, bits: int = 4) -> Tensor:
    """Pack whole numbers along the last axis, the lowest bits first; numbers of 3 bits run on into the next word."""
    ones = numbers.long()[..., None] >> torch.arange(bits) & 1
    whole = functional.pad(ones.flatten(-2), (0, -numbers.shape[-1] * bits % 32))
    parts = whole.reshape(*numbers.shape[:-1], -1, 32)
    packed = (parts << torch.arange(32)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def affine(weight: Tensor, bits: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round in groups along the inputs: codes, zero points, scales (out, groups), and the weight."""
    most = 2**bits - 1
    groups = weight.view(weight.shape[0], -1, GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / most).half().float()
    zeros = (-low / scales).round().clamp(1, most)
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, most)
    rounded = ((codes - zeros[..., None]) * scales[..., None]).view(weight.shape)
    return codes.view(weight.shape), zeros, scales, rounded


def gptq(weight: Tensor, bits: int = 4) -> Packed:
    codes, zeros, scales, rounded = affine(weight, bits)
    tensors = {
        "qweight": words(codes, bits).mT, "qzeros": words(zeros.mT - 1, bits), "scales": scales.mT.half(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }  # fmt: skip
    return rounded, tensors


def gptq_act_order(weight: Tensor) -> Packed:
    """The inputs of a group are not neighbours, but those of one size of their activations."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    rounded, tensors = gptq(weight[:, order])
    back = order.argsort()
    codes = affine(weight[:, order])[0][:, back]
    return rounded[:, back], tensors | {"qweight": words(codes).mT, "g_idx": tensors["g_idx"][back]}


def hqq(weight: Tensor) -> Packed:
    """4 bits as HQQ packs them: the first half of the groups in the upper bits, and settings as tensors."""
    groups = weight.view(-1, GROUP)
    low = groups.amin(1, keepdim=True)
    scales = (groups.amax(1, keepdim=True) - low) / 15
    zeros = -low / scales
    codes = (groups / scales + zeros).round().to(torch.uint8)
    upper, lower = codes.chunk(2)
    settings = {"nbits": 4, "quant_scale": 0, "quant_zero": 0, "view_as_float": 0}
    tensors = {name: torch.tensor(value, dtype=torch.int32) for name, value in settings.items()}
    packing = torch.tensor(list(b"4bit_u8"), dtype=torch.uint8)
    tensors |= {"W_q": upper << 4 | lower, "scale": scales, "zero": zeros, "packing": packing}
    return ((codes - zeros) * scales).view(weight.shape), tensors | {"shape": torch.tensor(weight.shape)}


def quanto_int8(weight: Tensor) -> Packed:
    scales = weight.abs().amax(-1, keepdim=True) / 127
    codes = (weight / scales).round()
    return codes * scales, {"weight._data": codes.to(torch.int8), "weight._scale": scales}


def quanto_int4(weight: Tensor) -> Packed:
    groups = weight.view(-1, GROUP)
    low = groups.amin(1, keepdim=True)
    scales = (groups.amax(1, keepdim=True) - low) / 15
    codes = ((groups - low) / scales).round().to(torch.uint8)
    first, second = codes.chunk(2)
    packed = {"weight._data._data": first | second << 4, "weight._scale": scales, "weight._shift": -low}
    return (codes * scales + low).view(weight.shape), packed


def awq(weight: Tensor) -> Packed:
    codes, zeros, scales, rounded = affine(weight)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    packs = [words(x.mT.reshape(x.shape[1], -1, 8)[..., order].reshape(x.shape[1], -1)) for x in (codes, zeros)]
    return rounded, {"qweight": packs[0], "qzeros": packs[1], "scales": scales.mT.half()}


def compressed(weight: Tensor) -> Packed:
    groups = weight.view(weight.shape[0], -1, GROUP)
    scales = (groups.abs().amax(-1) / 7).bfloat16()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    rounded = (codes * scales.float()[..., None]).view(weight.shape)
    packed = words(codes.view(weight.shape) + 8)
    return rounded, {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}


def compressed_int8(weight: Tensor) -> Packed:
    scales = weight.abs().amax(-1, keepdim=True) / 127
    codes = (weight / scales).round()
    return codes * scales, {"weight": codes.to(torch.int8), "weight_scale": scales}


def fp8(weight: Tensor) -> Packed:
    size = 16
    blocks = weight.view(weight.shape[0] // size, size, -1, size)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    rounded = (codes.float() * scales[:, None, :, None]).view(weight.shape)
    return rounded, {"weight": codes.view(weight.shape), "weight_scale_inv": scales}


def int8(weight: Tensor) -> Packed:
    most = weight.abs().amax(-1)
    codes = (weight / most[:, None] * 127).round()
    return codes * most[:, None] / 127, {"weight": codes.to(torch.int8), "SCB": most}


def four_bits(weight: Tensor) -> Packed:
    table = torch.linspace(-1, 1, 16)
    blocks = weight.view(-1, 64)
    most = blocks.abs().amax(-1, keepdim=True)
    codes = ((blocks / most)[..., None] - table).abs().argmin(-1)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    pairs = codes.view(-1, 2)
    tensors = {
        "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8),
        "weight.absmax": most.flatten(),
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return (table[codes] * most).view(weight.shape), tensors


CASES: dict[str, tuple[Callable[[Tensor], Packed], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4}),
    "gptq 3 bits": (partial(gptq, bits=3), {"quant_method": "gptq", "bits": 3}),
    "gptq act-order": (gptq_act_order, {"quant_method": "gptq", "bits": 4, "desc_act": True}),
    "hqq": (hqq, {"quant_method": "hqq"}),
    "quanto int8": (quanto_int8, {}),
    "quanto int4": (quanto_int4, {}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "compressed-tensors": (
        compressed, {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
    ),
    "compressed-tensors int8": (compressed_int8, {"quant_method": "compressed-tensors"}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    "bitsandbytes int8": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "bitsandbytes nf4": (four_bits, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}  # fmt: skip


def packed_checkpoint(path: Path, kind: str) -> dict[str, Tensor]:
    """Write the base model with its projections packed, and return what they stand for."""
    pack, fields = CASES[kind]
    written_base(path)
    file = path / "model.safetensors"
    state, expected = load_file(file), {}
    for name in [name for name in state if "_proj" in name]:
        weight, tensors = pack(state.pop(name).float())
        expected[name] = weight
        state |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in tensors.items()}
    save_file(state, file, {"format": "pt"})
    if "quanto" in kind:  # says so in a file of its own
        weights = {"weights": kind.replace("quanto ", "q"), "activations": "none"}
        kinds = {name.removesuffix(".weight"): weights for name in expected}
        (path / "quanto_qmap.json").write_text(json.dumps(kinds))
        return expected
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
    return expected


@pytest.mark.parametrize("kind", CASES)
def test_each_format_is_read_as_the_weights_that_were_packed(tmp_path: Path, kind: str) -> None:
    expected = packed_checkpoint(tmp_path, kind)
    loaded = resolve_model(str(tmp_path), SHORT)
    assert not any("random" in note and "tensor" in note for note in loaded.notes)
    for name, weight in expected.items():
        got = loaded.module.get_parameter(name).detach()
        assert float((got - weight).abs().max()) <= 2**-22 * float(weight.abs().max()), name
        # and the rounding is one: half a step is far below the numbers
        assert float((got - base_model().get_parameter(name).detach()).norm() / weight.norm()) < (
            0.3 if "3 bits" in kind else 0.15
        )
    assert any("run dequantised" in note for note in loaded.notes)


def test_check_audits_a_quantised_checkpoint(tmp_path: Path) -> None:
    packed_checkpoint(tmp_path, "gptq")
    report = check(str(tmp_path), seq_len=8, laws="none")
    assert [call.verdict for call in report.calls] == ["exact", "exact"]


def test_a_checkpoint_whose_tensors_do_not_fit_is_refused_by_the_module(tmp_path: Path) -> None:
    packed_checkpoint(tmp_path, "gptq")
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["model.layers.1.mlp.up_proj.scales"] = torch.ones(3, 5)
    save_file(state, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"quantised weight of 'model.layers.1.mlp.up_proj' can't be read"):
        resolve_model(str(tmp_path), SHORT)


def test_what_needs_a_library_or_is_its_own_object_is_refused_with_what_helps(tmp_path: Path) -> None:
    written_base(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    kinds = {
        "torchao": "torchao is not installed.*pip install torchao.*sqrtdk.diff.original, model",
        "vptq": "quantised by 'vptq', which is not read here.*hqq",
    }
    if find_spec("torchao"):
        del kinds["torchao"]
    for method, words in kinds.items():
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
        with pytest.raises(SqrtdkError) as caught:
            resolve_model(str(tmp_path), SHORT)
        assert re.search(words, f"{caught.value.message} {caught.value.hint}", re.DOTALL)
    (tmp_path / "model.safetensors").rename(tmp_path / "qmodel.pt")
    with pytest.raises(ModelError, match="pickled") as caught:
        resolve_model(str(tmp_path), SHORT)
    assert "load the model with the library that wrote it" in str(caught.value.hint)


def test_words_hold_numbers_in_both_directions() -> None:
    numbers = torch.randint(0, 16, (8, 16))
    assert torch.equal(unpacked(words(numbers), 4, 1).long(), numbers)
    assert torch.equal(unpacked(words(numbers.mT).mT.contiguous(), 4, 0).long(), numbers)
    three = torch.randint(0, 8, (2, 96))
    assert torch.equal(unpacked(words(three, 3), 3, 1), three)
