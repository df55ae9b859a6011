"""A learned sink: one more term in the softmax's denominator, which takes weight from the keys.

As in gpt-oss (arXiv:2508.10925, section 2.2). The sinks of Xiao et al. 2023 (arXiv:2309.17453) are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.steps._step import Step


@dataclass(frozen=True, slots=True)
class Sink(Step):
    """Sinks; `column` where they stand beside the logits, as a key would.

    The formula names them last, after the masks.
    """

    column: bool = True

    def stage(self) -> Stage | None:
        return Stage("logits", "sinks", "sinks") if self.column else None
