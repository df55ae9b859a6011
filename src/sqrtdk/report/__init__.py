"""Writers for results, such as `json.to_json` and `html.to_html` for a check. Nothing is computed here.

Each kind of result has a room: `check`, `diff`, `watch` and `kv`. The files beside the rooms are used by all of them.
"""

from __future__ import annotations

from sqrtdk._extras import lazy_rooms
from sqrtdk._leads import says_if_called as _says_if_called

__getattr__, __dir__ = lazy_rooms(__name__, ("html", "json"))

_says_if_called(__name__)
