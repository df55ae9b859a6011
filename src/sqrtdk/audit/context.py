"""The input of a rule: the judged calls, the model, the padding of its inputs, and a function that runs it again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from dataclasses import field as default
from typing import Any

from torch import Tensor, nn

from sqrtdk.audit.configs import field, module_at
from sqrtdk.audit.declared import config_at
from sqrtdk.audit.records import Finding, JudgedCall
from sqrtdk.models.modules import forward_arguments
from sqrtdk.models.records import Inputs
from sqrtdk.tracing.records import AttentionCall, NotMeasured
from sqrtdk.tracing.tape.nonfinite import Origin

_TRUE_IS_PADDING = {  # torch's names -> transformers' names; in torch True marks padding
    "key_padding_mask": "attention_mask",
    "src_key_padding_mask": "attention_mask",
    "tgt_key_padding_mask": "decoder_attention_mask",
    "memory_key_padding_mask": "encoder_attention_mask",
}
_TRUE_IS_TOKEN = ("attention_mask", "decoder_attention_mask", "encoder_attention_mask")
# Modules that read no text. A length that equals the text's by chance says nothing about their padding.
_NOT_TEXT = re.compile(r"vision|visual|image|audio|speech|video|pixel|patch|backbone|qformer|perceiver|resampler")


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """Masks of padded inputs by transformers' names, True at a token; `two` if there is an encoder and a decoder."""

    masks: Mapping[str, Tensor] = default(default_factory=dict)
    two: bool = False

    def of(
        self, site: str, batch: int, rows: int, columns: int, self_attention: bool | None
    ) -> tuple[Tensor, Tensor] | None:
        """Return the token masks of the queries and of the keys of an attention, or None if no padding is known.

        Args:
            site: Module path of the attention; "encoder" or "decoder" in it says which inputs it reads.
            batch: Batch size B.
            rows: Number of queries L.
            columns: Number of keys S.
            self_attention: Whether q and k come from the same states; None if that is unknown.

        Returns:
            Two bool tensors (B, L) and (B, S), True at tokens and False at padding. Queries without a mask are all
            tokens.
        """
        if not self.masks or _NOT_TEXT.search(site.lower()):
            return None
        across = self_attention is False or rows != columns
        # The first word of the path says whose tokens the rows are: `model.decoder.layers.0.encoder_attn`.
        part = re.search(r"encoder|decoder|encdec", site.lower()) if self.two else None
        here = there = "decoder_attention_mask" if part is not None and part[0] == "decoder" else "attention_mask"
        if across:
            if not self.two or here == "attention_mask":
                return None
            there = "encoder_attention_mask" if "encoder_attention_mask" in self.masks else "attention_mask"
        keys, queries = self._mask(there, batch, columns), self._mask(here, batch, rows)
        if keys is None:
            return None
        # Rows without a mask of their own count as tokens.
        return (keys.new_ones(batch, rows) if queries is None else queries), keys

    def keys(self, call: AttentionCall) -> Tensor | None:
        """Return the token mask of a call's keys, or None if no padding is known.

        The mask is bool of shape (B, S), True at tokens and False at padding.
        """
        both = self.of(call.site, call.batch, call.query_len, call.key_len, call.self_attention)
        return None if both is None else both[1]

    def longest(self, call: AttentionCall) -> int:
        """Return the largest number of keys without padding in one sequence of the batch; S if no padding is known."""
        keys = self.keys(call)
        return call.key_len if keys is None else int(keys.sum(-1).max())

    def _mask(self, name: str, batch: int, length: int) -> Tensor | None:
        mask = self.masks.get(name)
        return mask if mask is not None and mask.shape == (batch, length) else None


def tokens_of(module: nn.Module, inputs: Inputs) -> TokenMasks:
    """Return the padding masks among a model's inputs, all turned so that True marks a token.

    Args:
        module: The model; the signature of its forward gives the names of positional inputs.
        inputs: Inputs by name, or in the order of the arguments of forward.

    Returns:
        The masks by name. Masks that hide nothing, or that hold other numbers than 0 and 1, are left out.
    """
    named = inputs if isinstance(inputs, dict) else dict(zip(forward_arguments(module), inputs, strict=False))
    masks: dict[str, Tensor] = {}
    for name, value in named.items():
        if name in _TRUE_IS_TOKEN and (mask := _zero_one(value)) is not None:
            masks[name] = mask
        elif name in _TRUE_IS_PADDING and (mask := _zero_one(value)) is not None:
            masks[_TRUE_IS_PADDING[name]] = ~mask
    two = field(module, "config.is_encoder_decoder") is True or bool({"tgt", "decoder_input_ids"} & set(named))
    return TokenMasks({name: mask for name, mask in masks.items() if not bool(mask.all())}, two)


def _zero_one(value: Any) -> Tensor | None:
    """Return a (B, L) mask as bool, or None if the value is no such mask or holds no numbers."""
    if not isinstance(value, Tensor) or value.dim() != 2 or value.is_meta or value.is_nested:
        return None
    square = 1 < value.shape[0] == value.shape[1]  # B == L: it may as well be a mask of (queries, keys)
    return value.bool() if not square and bool(((value == 0) | (value == 1)).all()) else None


@dataclass(frozen=True, slots=True)
class Rerun:
    """Another run of the same model on the same inputs."""

    calls: tuple[AttentionCall, ...]
    outputs: tuple[Any, ...]  # the floating-point tensors that the model returned
    missed: int = 0  # attentions that could not be read


@dataclass(frozen=True, slots=True)
class Context:
    """The input of every rule."""

    model: nn.Module
    calls: tuple[JudgedCall, ...]
    mode: str  # "static" or "dynamic"
    # Runs the model again under a trace, with the q of these calls enlarged; None in static mode.
    rerun: Callable[[Mapping[tuple[str, int], float] | None], Rerun] | None = None
    # The same with the first tokens of the inputs alone, which raises if it did not do the same; None if they may not
    # stand for all of them. What it shows is only believed if it is nothing to report.
    rerun_first: Callable[[Mapping[tuple[str, int], float] | None], Rerun] | None = None
    ran: frozenset[str] | None = None  # paths of modules whose forward ran; None if nobody watched
    compare: str = "auto"  # when to run eager against sdpa: "auto" unless it is costly, "always", or "never"
    dtype: str = ""
    lost: tuple[NotMeasured, ...] = ()  # attentions that ran and could not be read
    idle_or_doubtful: tuple[NotMeasured, ...] = ()  # attentions that did not run, and softmaxes that may be attentions
    unread: frozenset[str] = frozenset()  # parameters that nothing read
    tokens: TokenMasks = default(default_factory=TokenMasks)  # which positions of the inputs are tokens
    spoiled: tuple[str, ...] = ()  # outputs of the model that hold NaN or infinity
    infinite: tuple[str, ...] = ()  # those of `spoiled` without a NaN
    # Runs the model once more to find the first number that is not finite; raises a `SqrtdkError` if that run fails.
    origin: Callable[[], Origin | None] | None = None

    @property
    def whole_rows(self) -> list[JudgedCall]:
        """The calls whose rows are whole: of a row of several ranks, one rank's mask is no mistake."""
        return [judged for judged in self.calls if not judged.call.part_of_row]

    def module(self, site: str) -> nn.Module | None:
        """Return the module at a site, or None."""
        return module_at(self.model, site)

    def config(self, site: str) -> Any:
        """Return the config that governs a site."""
        return config_at(self.model, site)


Rule = Callable[[Context], Iterable[Finding | NotMeasured]]
