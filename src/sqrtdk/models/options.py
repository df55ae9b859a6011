"""The options of loading a model and making its inputs, for `resolve_model`, `check` and the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # the command line reads these options before it may import torch

ATTN = ("eager", "sdpa")  # attention implementations that can be asked for
# Options that a user's own module has settled already, in the order in which they are named when they are refused.
_FOR_NAMES = ("text", "input_file", "device_map", "offload_folder", "device", "dtype", "revision")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The options of loading; None leaves the choice to the model or to this package.

    Attributes:
        static: Build on the meta device, without memory for weights and without values.
        attn: "eager" or "sdpa" for a Hugging Face model; None takes its default. See `iter_attn` for both.
        text: A UTF-8 file to run through the model's tokenizer.
        input_file: A safetensors file whose tensors are named like forward's arguments; wins over `text`.
        batch: Rows of the inputs that are made; None is 1.
        seq_len: Tokens per row, at most the number of the model's positions; None is 128 or that limit.
        device: Where the model runs; None is "cpu". Unused with `static` and `device_map`.
        dtype: Dtype of parameters and floating-point inputs; None keeps the model's own (a config's float16 becomes
            float32 on a CPU).
        seed: Seed of random weights, random inputs, the factory and the run.
        revision: Branch, tag or commit of a hub id.
        trust_remote_code: Let the model's own Python files run. Off unless you have read them.
        device_map: "auto" spreads a checkpoint over devices, memory and disk through accelerate.
        offload_folder: Directory for weights that fit nowhere else; implies `device_map="auto"`.
        base: Base model of an adapter's directory; None takes the directory that the adapter names, or its neighbour.
    """

    static: bool = False
    attn: str | None = None
    text: str | Path | None = None
    input_file: str | Path | None = None
    batch: int | None = None
    seq_len: int | None = None
    device: str | None = None
    dtype: str | torch.dtype | None = None
    seed: int = 0
    revision: str | None = None
    trust_remote_code: bool = False
    device_map: str | None = None
    offload_folder: str | Path | None = None
    base: str | Path | None = None

    @property
    def rows(self) -> int:
        """Batch size of the inputs that are made for a model; 1 if `batch` is None."""
        return 1 if self.batch is None else self.batch

    @property
    def for_names(self) -> list[str]:
        """Names of the options that are set but only apply to a model given by name.

        Example:
            >>> LoadOptions(dtype="bf16", seq_len=8).for_names
            ['dtype']
        """
        return [name for name in _FOR_NAMES if getattr(self, name) is not None]
