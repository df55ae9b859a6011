"""Integrations with other libraries. Each module imports its library on first use."""

from __future__ import annotations

from sqrtdk._extras import lazy_rooms

__getattr__, __dir__ = lazy_rooms(__name__, ("lightning", "trainer", "transformers"))
