"""Writers for results, such as `json.to_json` and `html.to_html` for a check. Nothing is computed here."""

from __future__ import annotations

from sqrtdk._extras import lazy_rooms

__getattr__, __dir__ = lazy_rooms(__name__, ("html", "json"))
