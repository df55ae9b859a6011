"""Several ranks that run one model: what they tell one another, and their attentions put together."""

from __future__ import annotations
