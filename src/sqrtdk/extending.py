"""What another distribution builds on: files, JSON, languages, progress, and records that save themselves.

A distribution adds verbs to `sqrtdk` by entry points of the group `sqrtdk.verbs`, each a group or command of
`sqrtdk.cli.verbs`. Its sentences come from a folder of catalogues, `sqrtdk.messages.add_words`, its pages from a folder
of templates, `sqrtdk.report.page.render(home=...)`. Names are imported on first use: most need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqrtdk._extras import lazy_names

if TYPE_CHECKING:
    from sqrtdk._environment import code_hash as code_hash
    from sqrtdk._environment import cpu_name as cpu_name
    from sqrtdk._environment import numbers_from as numbers_from
    from sqrtdk._extras import load_extra as load_extra
    from sqrtdk._files import check_writable as check_writable
    from sqrtdk._files import os_reason as os_reason
    from sqrtdk._files import write_bytes as write_bytes
    from sqrtdk._files import write_text as write_text
    from sqrtdk._guesses import no_attribute as no_attribute
    from sqrtdk._json import exact_data as exact_data
    from sqrtdk._json import json_document as json_document
    from sqrtdk._json import numbers_back as numbers_back
    from sqrtdk._json import plain_data as plain_data
    from sqrtdk._language import Choice as Choice
    from sqrtdk._language import Language as Language
    from sqrtdk._modes import EagerMode as EagerMode
    from sqrtdk._progress import Tell as Tell
    from sqrtdk._progress import progress_bar as progress_bar
    from sqrtdk._progress import progress_counted as progress_counted
    from sqrtdk._records import parse_json as parse_json
    from sqrtdk._records import quote as quote
    from sqrtdk._records import record_from_json as record_from_json
    from sqrtdk._shown import Saved as Saved
    from sqrtdk._shown import Shown as Shown

_NAMES = {
    "_environment": ("code_hash", "cpu_name", "numbers_from"),
    "_extras": ("load_extra",),
    "_files": ("check_writable", "os_reason", "write_bytes", "write_text"),
    "_guesses": ("no_attribute",),
    "_json": ("exact_data", "json_document", "numbers_back", "plain_data"),
    "_language": ("Choice", "Language"),
    "_modes": ("EagerMode",),
    "_progress": ("Tell", "progress_bar", "progress_counted"),
    "_records": ("parse_json", "quote", "record_from_json"),
    "_shown": ("Saved", "Shown"),
}
_HOME = {name: f"sqrtdk.{module}" for module, names in _NAMES.items() for name in names}
__all__ = [*_HOME]
__getattr__, __dir__ = lazy_names(__name__, _HOME)
