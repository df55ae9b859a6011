"""Runs a GGUF file in llama.cpp, through llama-cpp-python, and notes every operation of its graph.

llama.cpp calls an evaluation callback before and after each operation. What an operation reads is copied before it
runs: ggml gives the memory of a tensor that is no longer needed to a later one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sqrtdk import _extras
from sqrtdk.errors import INTERRUPTS, MissingExtraError, ModelError
from sqrtdk.frontends.arrays import load_framework
from sqrtdk.frontends.ggml.graph import GGML_EXTRA, GgmlRun, GgmlTensor, bytes_of, plain_array
from sqrtdk.frontends.ggml.metadata import odd_file
from sqrtdk.messages import Message

OLDEST_LLAMA = (0, 3, 36)  # of llama-cpp-python: `struct ggml_tensor` and its parameters are those of this one
_ERROR, _CONTINUED = 4, 5  # levels of a log's line
_KEYS_A_PAD = 256  # llama.cpp makes caches of multiples of this
_LONGEST_VALUE = 256  # bytes of a value of the metadata; a longer one, such as a chat template, is cut off
FLASH_TYPES = {None: -1, False: 0, True: 1}  # its own choice, off, on


class _Tensor(ctypes.Structure):
    """`struct ggml_tensor` of ggml.h."""


_Tensor._fields_ = [
    ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int), ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(_Tensor) * 10), ("view_src", ctypes.POINTER(_Tensor)), ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p), ("name", ctypes.c_char * 64), ("extra", ctypes.c_void_p),
    ("padding", ctypes.c_char * 8),
]  # fmt: skip


def llama_cpp() -> Any:
    """Return the module `llama_cpp`.

    Raises:
        MissingExtraError: It is not installed, or too old.
    """
    package = load_framework("llama_cpp", GGML_EXTRA, OLDEST_LLAMA, "frontends.old_llama")
    _extras.load_extra("gguf", GGML_EXTRA)
    return package


class LlamaFile:
    """A GGUF file that llama.cpp has loaded, on the CPU.

    Args:
        path: The file.
        flash: Whether the attention is ggml's one operation, `FLASH_ATTN_EXT`; None: llama.cpp's own choice.

    Attributes:
        path: The file.
        vocabulary: Number of its tokens.
        trained: Number of positions that the file says the model was trained with.
        architecture: As the file says, "llama".
        metadata: Numbers and texts of the file by their keys, as text.
        producer: Name and version of what runs it.

    Raises:
        MissingExtraError: llama-cpp-python is not installed, or too old.
        ModelError: llama.cpp refuses the file; if it is no GGUF file, for the reason that reading its metadata gives.
    """

    def __init__(self, path: str | os.PathLike[str], flash: bool | None = None) -> None:
        self.path, self._flash = Path(path), flash
        package = llama_cpp()
        self.producer = f"llama-cpp-python {package.__version__}"
        params = package.llama_model_default_params()
        # Blocks stay as the file has them: other buffers hold them in an order of the CPU.
        params.n_gpu_layers, params.use_extra_bufts, params.check_tensors = 0, False, True
        with _Log() as log:
            model = package.llama_model_load_from_file(os.fspath(self.path).encode(), params)
        if not model:
            if self.path.is_file() and (odd := odd_file(path)) is not None:
                raise odd
            raise ModelError(
                Message("frontends.not_loaded", path=repr(str(path)), reason=log.said()),
                hint=Message("frontends.hint.gguf"),
            )
        self._model, self._free = model, package.llama_model_free
        self.metadata = _metadata(package, model)
        self.architecture = self.metadata.get("general.architecture", "")
        vocabulary = package.llama_model_get_vocab(model)
        self.vocabulary = int(package.llama_vocab_n_tokens(vocabulary))
        self.trained = int(package.llama_model_n_ctx_train(model))

    def __del__(self) -> None:
        if hasattr(self, "_free"):
            self._free(self._model)

    def run(self, ids: Sequence[int], *, weights: bool = True) -> GgmlRun:
        """Run one row of token ids through llama.cpp, with an empty cache, and return what was evaluated.

        Args:
            ids: Token ids, each below `vocabulary`.
            weights: Whether the values of weights are returned too, unpacked.

        Raises:
            ModelError: llama.cpp can't run it.
        """
        package, count = llama_cpp(), len(ids)
        tape = _Tape(weights)
        watch = package.llama_cpp.ggml_backend_sched_eval_callback(tape.watch)
        params = package.llama_context_default_params()
        params.n_ctx = -(-count // _KEYS_A_PAD) * _KEYS_A_PAD
        params.n_batch = params.n_ubatch = params.n_outputs_max = max(count, 32)
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        params.n_seq_max, params.flash_attn_type, params.cb_eval = 1, FLASH_TYPES[self._flash], watch
        with _Log() as log:
            context = package.llama_init_from_model(self._model, params)
            if not context:
                raise self._not_run(log)
            batch = package.llama_batch_init(count, 0, 1)
            try:
                tape.clear()  # llama.cpp runs a graph of its own to find out what it can do
                batch.n_tokens = count
                for at, token in enumerate(ids):
                    batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, at, 1, 1
                    batch.seq_id[at][0] = 0
                state = package.llama_decode(context, batch)
                if tape.error is not None:
                    raise tape.error
                if state != 0 or tape.output is None:
                    raise self._not_run(log)
            finally:
                package.llama_batch_free(batch)
                package.llama_free(context)
        return GgmlRun(
            self.path.name, self.metadata, tuple(tape.nodes), tape.leaves, tape.data, tape.output, self.vocabulary,
            self.producer,
        )  # fmt: skip

    def _not_run(self, log: _Log) -> ModelError:
        return ModelError(
            Message("frontends.llama_not_run", path=repr(str(self.path)), reason=log.said()),
            hint=Message("frontends.hint.gguf"),
        )


def _metadata(package: Any, model: Any) -> dict[str, str]:
    text = ctypes.create_string_buffer(_LONGEST_VALUE)
    found = {}
    for at in range(package.llama_model_meta_count(model)):
        package.llama_model_meta_key_by_index(model, at, text, _LONGEST_VALUE)
        key = text.value.decode("utf-8", "replace")
        package.llama_model_meta_val_str_by_index(model, at, text, _LONGEST_VALUE)
        found[key] = text.value.decode("utf-8", "replace")
    return found


class _Tape:
    """What the evaluation callback saw."""

    def __init__(self, weights: bool) -> None:
        self._weights = weights
        self.error: BaseException | None = None
        self._base = ctypes.CDLL(_library("ggml-base"))
        self._base.ggml_op_desc.restype = self._base.ggml_type_name.restype = ctypes.c_char_p
        self._base.ggml_op_desc.argtypes = [ctypes.c_void_p]
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.nodes: list[GgmlTensor] = []
        self.leaves: dict[int, GgmlTensor] = {}
        self.data: dict[int, Any] = {}
        self.output: Any = None
        self._known: set[int] = set()

    def watch(self, tensor: int, ask: bool, user: Any) -> bool:
        """Note a node: before it runs, what it reads; afterwards, the output if it is the last."""
        try:
            held = ctypes.cast(tensor, ctypes.POINTER(_Tensor)).contents
            if not ask:
                node = self.nodes[-1]
                if node.name.startswith("result_") and node.type == "f32":
                    self.output = _values(node, held)
                return True
            node = self._noted(held)
            for source in held.src:
                if source:
                    self._leaf(source.contents)
            if held.view_src:
                self._leaf(held.view_src.contents)
            self.nodes.append(node)
            self._known.add(node.key)
        except INTERRUPTS as error:
            self.error = error
            return False
        except Exception as error:  # an exception would end in ctypes, without a word to the caller
            self.error = error
            return False
        return True

    def _leaf(self, held: Any) -> None:
        key = ctypes.addressof(held)
        if key in self._known or key in self.leaves:
            return
        leaf = self.leaves[key] = self._noted(held)
        if held.view_src:
            self._leaf(held.view_src.contents)
        elif not leaf.is_cache and held.data and (self._weights or not leaf.is_weight):
            self.data[key] = _values(leaf, held)

    def _noted(self, held: Any) -> GgmlTensor:
        key = ctypes.addressof(held)
        return GgmlTensor(
            key, held.name.decode("utf-8", "replace"), self._base.ggml_op_desc(key).decode(),
            self._base.ggml_type_name(held.type).decode().lower(), tuple(held.ne), tuple(held.nb),
            bytes(bytearray(held.op_params)), tuple(ctypes.addressof(s.contents) for s in held.src if s),
            ctypes.addressof(held.view_src.contents) if held.view_src else None, int(held.view_offs),
        )  # fmt: skip


def _values(tensor: GgmlTensor, held: Any) -> Any:
    memory = (ctypes.c_char * bytes_of(tensor)).from_address(held.data)
    return plain_array(tensor, memoryview(memory))


def _library(name: str) -> str:
    folder = Path(llama_cpp().__file__).parent / "lib"
    found = sorted(folder.glob(f"*{name}.*"), key=lambda path: len(path.name))
    if not found:
        raise MissingExtraError(
            Message("frontends.no_library", name=name), hint=Message("errors.hint.install", extra=GGML_EXTRA)
        )
    return str(found[0])


class _Log:
    """Takes what llama.cpp writes to its log, and returns the errors of it."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._level = 0

    def __enter__(self) -> _Log:
        package = llama_cpp()
        self._callback: Callable[..., None] = package.llama_log_callback(self._take)
        package.llama_log_set(self._callback, None)
        return self

    def __exit__(self, *_: object) -> None:
        package = llama_cpp()
        from llama_cpp import _logger  # the callback that the package itself sets

        package.llama_log_set(_logger.llama_log_callback, None)

    def _take(self, level: int, text: bytes, user: Any) -> None:
        self._level = self._level if level == _CONTINUED else level
        if self._level == _ERROR:
            self._lines.append(text.decode("utf-8", "replace"))

    def said(self) -> str:
        """Return the first error, in one line."""
        lines = [line.strip() for line in "".join(self._lines).splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
        return first.rpartition(": error ")[2].removeprefix("llama_model_load: ")[:300]
