"""The words of a verdict, by the name that `baseline` still calls them by."""

from __future__ import annotations

from sqrtdk.messages import unfilled

VERDICT_WORDS = unfilled("words.verdict")
