"""A GGUF file, run by llama.cpp, as a torch module that computes the same operations."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError, ModelError
from sqrtdk.frontends.ggml.graph import GgmlRun
from sqrtdk.frontends.ggml.llama import LlamaFile
from sqrtdk.frontends.ggml.walk import walk_ggml
from sqrtdk.frontends.judge import beyond_rounding
from sqrtdk.frontends.module import Bound, ForeignModule, TracedProgram, foreign_module
from sqrtdk.messages import Message

INPUT = "input_ids"
# Architectures of which llama.cpp reads `attention.scale`; of all others it takes a number of its own code.
READS_SCALE = ("granite", "granitemoe", "granitehybrid")
MADE_LENGTH = 32  # tokens of made-up ids


def from_gguf(
    path: str | os.PathLike[str], input_ids: Any = None, *, flash: bool | None = None, seed: int = 0
) -> nn.Module:
    """Return a GGUF file as a torch module that computes what llama.cpp computes.

    llama.cpp runs the file on the CPU, and shows each operation of its graph. The module runs the same operations with
    torch's, with the rounding of ggml. Its forward takes token ids, and returns the logits; for ids of another length
    llama.cpp runs again. The outputs for these ids are compared with llama.cpp's own.

    Args:
        path: The file.
        input_ids: Token ids of shape (B, T); None draws one row of 32.
        flash: Whether attention is ggml's one operation (flash attention); None: llama.cpp's own choice.
        seed: For ids that are drawn.

    Returns:
        The module, in eval mode. Its parameters have the names of the file's tensors, in float32.

    Raises:
        MissingExtraError: llama-cpp-python is not installed, or too old.
        ModelError: llama.cpp refuses the file, it has operations that are not read, or our outputs are not llama.cpp's.
        InvalidTypeError: `input_ids` are no whole numbers.
        InvalidValueError: They do not have two axes.

    Example:
        The page "Port to llama.cpp" (docs/en/llama-cpp.md) has one that runs.
    """
    source = GgmlSource(LlamaFile(path, flash))
    ids = made_ids(source.vocabulary, seed=seed) if input_ids is None else as_ids(input_ids)
    return ggml_module(source, ids)


def made_ids(vocabulary: int, rows: int = 1, length: int | None = None, seed: int = 0) -> Tensor:
    """Return random token ids.

    Args:
        vocabulary: Number of tokens.
        rows: Rows.
        length: Tokens in each; None: 32.
        seed: Seed.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, max(vocabulary, 1), (rows, length or MADE_LENGTH), generator=generator)


def as_ids(given: Any) -> Tensor:
    """Return token ids as a tensor of shape (B, T).

    Raises:
        InvalidTypeError: They are no whole numbers.
        InvalidValueError: They do not have two axes, or none of a token.
    """
    ids = torch.as_tensor(given)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise InvalidTypeError(
            Message("frontends.no_ids", kind=str(ids.dtype).removeprefix("torch.")), hint=Message("frontends.hint.ids")
        )
    ids = ids.unsqueeze(0) if ids.dim() == 1 else ids
    if ids.dim() != 2 or not ids.numel():
        raise InvalidValueError(
            Message("frontends.ids_shape", shape=str(tuple(ids.shape))), hint=Message("frontends.hint.ids")
        )
    return ids.long()


class GgmlSource:
    """A file that llama.cpp runs for ids of any length, or the dump of one run.

    Args:
        model: The file; or the run of a dump, which has one length.

    Attributes:
        signature: Of the forward: `(input_ids)`.
        tensors: The file's tensors by name, in float32.
        vocabulary: Number of tokens; 0 if it is not known.
        title: Name of the file.
        architecture: As the file says.
        metadata: Of the file, as text by key.
        producer: What ran it.
        types: ggml's names of the dtypes of the file's tensors, by their names.
    """

    def __init__(self, model: LlamaFile | GgmlRun) -> None:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.signature = inspect.Signature([inspect.Parameter(INPUT, kind)])
        self.tensors: Mapping[str, Tensor] = {}
        self.types: Mapping[str, str] = {}
        self.vocabulary, self.architecture = model.vocabulary, model.architecture
        self.producer, self.metadata = model.producer, model.metadata
        self.title = model.title if isinstance(model, GgmlRun) else model.path.name
        self._model = model
        self._outputs: dict[tuple[int, ...], Tensor] = {}

    def bind(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> Bound:
        """Return the token ids of a call.

        Args:
            args: Inputs by position.
            named: Inputs by name.

        Raises:
            TypeError: They are not one tensor, `input_ids`.
            ModelError: An id is beyond the vocabulary.
        """
        ids = as_ids(self.signature.bind(*args, **named).arguments[INPUT])
        if self.vocabulary and (int(ids.max()) >= self.vocabulary or int(ids.min()) < 0):
            largest = int(ids.max() if int(ids.max()) >= self.vocabulary else ids.min())
            raise ModelError(
                Message("frontends.beyond_vocabulary", id=largest, title=self.title, last=self.vocabulary - 1),
                hint=Message("frontends.hint.vocabulary"),
            )
        return Bound((ids,), (torch.int64,), ids.shape[1], None)

    def trace(self, bound: Bound, dtypes: Mapping[str, torch.dtype]) -> TracedProgram:
        """Return the program for ids of this length; the first row of them runs in llama.cpp.

        Args:
            bound: The ids.
            dtypes: Dtypes of parameters in place of their own: none can be had.

        Raises:
            ModelError: llama.cpp can't run it, an operation is not read, or other dtypes are asked for.
        """
        if dtypes:
            raise ModelError(Message("frontends.other_dtypes"), hint=Message("frontends.hint.other_dtypes"))
        ids = bound.tensors[0]
        run = self._run(ids[0])
        program = walk_ggml(run)
        if not self.tensors:
            weights = {leaf.name: run.data[key] for key, leaf in run.leaves.items() if leaf.is_weight}
            self.types = {leaf.name: leaf.type for leaf in run.leaves.values() if leaf.is_weight}
            self.tensors = {name: _parameter(weights[name]) for name in dict.fromkeys(program.parameters.values())}
        origins = {name: (name, ()) for name in program.parameters.values()}
        return TracedProgram(program, lambda made: made[0], origins)

    def output(self, row: Tensor) -> Tensor:
        """Return llama.cpp's own output for one row of ids.

        Raises:
            ModelError: llama.cpp can't run it; or a dump holds another length.
        """
        key = tuple(row.tolist())
        return self._outputs[key] if key in self._outputs else torch.from_numpy(self._run(row).output)

    def _run(self, row: Tensor) -> GgmlRun:
        if isinstance(self._model, LlamaFile):
            run = self._model.run(row.tolist(), weights=not self.tensors)
            self._outputs = {tuple(row.tolist()): torch.from_numpy(run.output)}  # the last one is asked for again
            return run
        ids = ids_of(self._model)
        if row.numel() != ids.shape[1]:
            raise ModelError(
                Message("frontends.dump_length", title=self.title, length=ids.shape[1], asked=row.numel()),
                hint=Message("frontends.hint.dump_length"),
            )
        return self._model

    def tensor(self, name: str, indices: tuple[int, ...]) -> Tensor:
        """Return a tensor of the file, which the module then owns; `indices` are those of the layer in it."""
        return self.tensors[name][indices].clone()


def ids_of(run: GgmlRun) -> Tensor:
    """Return the token ids of a run, of shape (1, T).

    Raises:
        ModelError: It has none: it is of embeddings.
    """
    from sqrtdk.frontends.ggml.graph import original_name
    from sqrtdk.frontends.ggml.walk import TOKEN_LEAF

    keys = [key for key, leaf in run.leaves.items() if original_name(leaf.name) == TOKEN_LEAF and key in run.data]
    if not keys:
        raise ModelError(Message("frontends.dump_no_ids", title=run.title), hint=Message("frontends.hint.dump"))
    return torch.from_numpy(run.data[keys[0]].reshape(1, -1).astype("int64"))


def ggml_module(source: GgmlSource, ids: Tensor) -> ForeignModule:
    """Return a module of a source, whose outputs for these ids are llama.cpp's.

    Raises:
        ModelError: See `from_gguf`.
    """
    module, _ = foreign_module(source, source.bind((ids,), {}), source.architecture or "ggml")
    module.config = ggml_config(source)
    module.stored_types = dict(source.types)
    module.framework, module.example = source.producer, {"input_ids": ids}
    _judge(module, source, ids)
    return module


def ggml_config(source: GgmlSource) -> Any:
    """Return what a file declares, with the names that a config of transformers has.

    The scale of an attention may be declared by `attention.scale`, of architectures of which llama.cpp reads it; and
    YaRN multiplies cosine and sine, which shows as a factor on the scale.
    """
    family = source.architecture

    def number(name: str) -> float | None:
        try:
            return float(source.metadata[f"{family}.{name}"])
        except (KeyError, ValueError):
            return None

    fields: dict[str, Any] = {"model_type": family.replace("-", "_"), "vocab_size": source.vocabulary}
    kind, factor = source.metadata.get(f"{family}.rope.scaling.type"), number("rope.scaling.factor")
    if kind is not None and factor is not None:
        fields["rope_parameters"] = {"rope_type": kind, "factor": factor, "attention_factor": None}
        if (gain := number("rope.scaling.attn_factor")) is not None:
            fields["rope_parameters"]["attention_factor"] = gain
    if family in READS_SCALE and (scale := number("attention.scale")) is not None:
        fields["attention_multiplier"] = scale
    return SimpleNamespace(**fields)


def _judge(module: ForeignModule, source: GgmlSource, ids: Tensor) -> None:
    """Raises a `ModelError` unless the module's outputs are llama.cpp's up to rounding."""
    with torch.no_grad():
        ours = module(ids)
        exact = copy.deepcopy(module).double()(ids)
    for at, row in enumerate(ids):
        theirs = source.output(row).reshape(ours[at].shape)
        off = beyond_rounding(theirs, ours[at], exact[at])
        gap = (theirs - exact[at]).abs().max() / exact[at].abs().max().clamp(min=1e-30)
        module.own_rounding = max(module.own_rounding, float(gap))
        if off is not None:
            raise ModelError(
                Message("frontends.other_logits", title=source.title, gap=f"{off:.3g}", producer=source.producer),
                hint=Message("frontends.hint.report_file"),
            )


def _parameter(values: Any) -> Tensor:
    tensor = torch.from_numpy(values)
    shape: Sequence[int] = tensor.shape
    first = next((at for at, size in enumerate(shape) if size > 1), len(shape) - 1)
    return tensor.reshape(tuple(shape[first:])).float()
