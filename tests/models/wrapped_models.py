"""A small decoder of transformers inside each wrapper that people put around a model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))


def decoder() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**sizes, vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0)
    ).eval()


def never(graph: Any, inputs: Any) -> Any:
    raise AssertionError("compiled")


def _mesh() -> Any:
    return torch.distributed.init_device_mesh("cpu", (1,))


def _compiled(model: Any) -> nn.Module:
    wrapped: nn.Module = torch.compile(model, backend=never, fullgraph=True)  # type: ignore[assignment]
    return wrapped


def _each_layer(wrap: Callable[[nn.Module], Any]) -> Callable[[Any], nn.Module]:
    def wrapped(model: Any) -> nn.Module:
        for at, layer in enumerate(model.model.layers):
            model.model.layers[at] = wrap(layer)
        assert isinstance(model, nn.Module)
        return model

    return wrapped


def _compiled_in_place(model: Any) -> nn.Module:
    for layer in model.model.layers:
        layer.compile(backend=never)
    assert isinstance(model, nn.Module)
    return model


def _checkpointed(layer: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped = checkpoint_wrapper(layer)
    assert isinstance(wrapped, nn.Module)
    return wrapped


def _ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _averaged(model: nn.Module) -> nn.Module:
    from torch.optim.swa_utils import AveragedModel

    return AveragedModel(model).eval()


def _fsdp(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def _fsdp_layers(model: Any) -> nn.Module:
    return _fsdp(_each_layer(lambda layer: _fsdp(layer, use_orig_params=True))(model), use_orig_params=True)


def _fsdp2(model: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=_mesh())
    return fully_shard(model, mesh=_mesh())


def _tensor_parallel(model: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.model.layers:
        plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        parallelize_module(layer.self_attn, _mesh(), plan | {"o_proj": RowwiseParallel()})
    assert isinstance(model, nn.Module)
    return model


def _cpu_offload(model: nn.Module) -> nn.Module:
    offloaded: nn.Module = pytest.importorskip("accelerate").cpu_offload(model, execution_device=torch.device("cpu"))
    return offloaded


def _disk_offload(model: nn.Module) -> nn.Module:
    folder = tempfile.mkdtemp()
    offloaded: nn.Module = pytest.importorskip("accelerate").disk_offload(
        model, folder, execution_device=torch.device("cpu")
    )
    return offloaded


def _hooked(model: nn.Module) -> nn.Module:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(model, hooks.AlignDevicesHook(io_same_device=True))
    return model


def _q_parametrized(register: Callable[[nn.Module], Any]) -> Callable[[Any], nn.Module]:
    def wrapped(model: Any) -> nn.Module:
        for layer in model.model.layers:
            register(layer.self_attn.q_proj)
        assert isinstance(model, nn.Module)
        return model

    return wrapped


class Same(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 1.0


def _lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4)).eval()
    return adapted


def _fabric(model: nn.Module) -> nn.Module:
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    prepared: nn.Module = fabric.setup_module(model)
    return prepared


class Functional(nn.Module):
    """Runs a model with parameters that are handed in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Any:
        weights = dict(self.model.named_parameters())
        return torch.func.functional_call(self.model, weights, (), {"input_ids": input_ids})


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


class Replayed(nn.Module):
    """Copies its input into a buffer and its output into another, as a captured CUDA graph does."""

    ids: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = Logits(model)
        self.register_buffer("ids", torch.zeros_like(IDS), persistent=False)
        self.register_buffer("logits", torch.zeros(*IDS.shape, 64), persistent=False)

    def forward(self, input_ids: Tensor) -> Any:
        self.ids.copy_(input_ids)
        return self.logits.detach().copy_(self.model(self.ids))


def _exported(model: nn.Module) -> nn.Module:
    return torch.export.export(Logits(model), (), {"input_ids": IDS}, strict=False).module()


def _traced(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        traced = torch.jit.trace(Logits(model), IDS)
    assert isinstance(traced, nn.Module)
    return traced


@dataclass(frozen=True)
class Wrapped:
    """A wrapper, and where its answers are other than the plain model's.

    Attributes:
        wrap: Wraps the decoder.
        inside: What stands before the names of sites.
        unasked: Laws that are kept by the plain model and not asked here.
        without_gradients: Whether a watch says that it can't measure the gradients of q or k.
        trains: Whether the wrapper can be trained.
        ranks: Whether it needs a process group.
    """

    wrap: Callable[[Any], nn.Module]
    inside: str = ""
    unasked: frozenset[str] = frozenset()
    without_gradients: bool = False
    trains: bool = True
    ranks: bool = False


_ALL = frozenset({"samples", "left_padding", "cache", "shift", "place", "heads", "configured", "modes"})
_OF_ARGUMENTS = frozenset({"left_padding", "cache", "shift"})  # its forward has other arguments
_HEADS = frozenset({"heads"})  # q is not known to be rows of a weight

WRAPPED = {
    "compiled": Wrapped(_compiled),
    "layers compiled": Wrapped(_each_layer(_compiled)),
    "layers compiled in place": Wrapped(_compiled_in_place),
    "checkpointed": Wrapped(_each_layer(_checkpointed)),
    "data parallel": Wrapped(nn.DataParallel),
    "DDP": Wrapped(_ddp, ranks=True),
    "compiled DDP": Wrapped(lambda model: _compiled(_ddp(model)), ranks=True),
    "DDP of compiled": Wrapped(lambda model: _ddp(_compiled(model)), ranks=True),
    "averaged": Wrapped(_averaged),
    "FSDP": Wrapped(_fsdp, unasked=_HEADS, ranks=True),
    "FSDP of layers": Wrapped(_fsdp_layers, unasked=_HEADS, ranks=True),
    "FSDP2": Wrapped(_fsdp2, unasked=_HEADS, ranks=True),
    "DTensor": Wrapped(_tensor_parallel, unasked=_HEADS, ranks=True),
    "accelerate's hook": Wrapped(_hooked),
    "on the CPU": Wrapped(_cpu_offload, unasked=_ALL),
    "on the disk": Wrapped(_disk_offload, unasked=_ALL, trains=False),
    "weight norm": Wrapped(_q_parametrized(parametrizations.weight_norm), unasked=_HEADS),
    "parametrized": Wrapped(
        _q_parametrized(lambda layer: parametrize.register_parametrization(layer, "weight", Same())), unasked=_HEADS
    ),
    "LoRA": Wrapped(_lora, unasked=_HEADS, without_gradients=True),
    "Fabric": Wrapped(_fabric),
    "functional call": Wrapped(Functional, "model.", _OF_ARGUMENTS),
    "static buffers": Wrapped(Replayed, "model.model.", _OF_ARGUMENTS | {"samples"}, trains=False),
    "exported": Wrapped(_exported, "model.", _OF_ARGUMENTS | {"samples", "configured"}, without_gradients=True),
    "TorchScript": Wrapped(
        _traced, "model.", _OF_ARGUMENTS | {"place", "heads", "configured"}, without_gradients=True
    ),
}  # fmt: skip
