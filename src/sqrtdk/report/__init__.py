"""How records are shown: `json.to_json` and `html.to_html` write the report of a check; nothing here computes."""

from __future__ import annotations

from sqrtdk._extras import lazy_rooms

__getattr__, __dir__ = lazy_rooms(__name__, ("html", "json"))
