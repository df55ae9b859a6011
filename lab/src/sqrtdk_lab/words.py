"""The words of a claim, in English and Chinese: one TOML file beside its experiment, with placeholders for figures.

Each text is a table with `en` and `zh`; `{name}` in it is a placeholder. The experiment decides how a number is
written, so a placeholder is a name and nothing else; `{{` is a brace.
"""

from __future__ import annotations

import importlib.resources
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Text, entries, faults, placeholders, quoted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REQUIRED_TEXTS = ("statement", "method", "control", "why")  # texts that every claim must have


@dataclass(frozen=True, slots=True)
class ClaimWords:
    """The texts of one file by key; keys of nested tables are joined by dots, as "part.mean".

    Attributes:
        source: name of the file.
        texts: with their placeholders.

    Example:
        >>> words = ClaimWords("x.toml", {"why": Text("It is {peak}.", "它是 {peak}。")})
        >>> words("why", peak=0.5).zh
        '它是 0.5。'
    """

    source: str
    texts: Mapping[str, Text]

    def __call__(self, key: str, **values: object) -> Text:
        """Return a text with its placeholders filled in.

        Args:
            key: of the text.
            values: one for each placeholder; a `Text` gives each language its own.

        Raises:
            InvalidValueError: There is no such text, or the values are not those of its placeholders.
        """
        if key not in self.texts:
            raise _error(self.source, [f"there is no text {key!r} among {', '.join(self.texts)}"])
        wanted = placeholders(self.texts[key].en)
        if wanted != set(values):
            raise _error(self.source, [f"{key} has the placeholders {quoted(wanted)}, and got {quoted(set(values))}"])
        return self.texts[key].filled(**values)


def words_of(module: str) -> ClaimWords:
    """Read the words beside a module, in the TOML file of its name.

    Args:
        module: its `__name__`.

    Raises:
        InvalidValueError: See `parse_words`; or there is no such file.
    """
    package, _, name = module.rpartition(".")
    source = f"{name}.toml"
    try:
        content = importlib.resources.files(package).joinpath(source).read_text(encoding="utf-8")
    except OSError as error:
        raise _error(source, [f"it cannot be read: {error}"]) from error
    return parse_words(content, source)


def parse_words(content: str, source: str) -> ClaimWords:
    """Read the words of a claim.

    Args:
        content: TOML.
        source: name of the file, for errors.

    Raises:
        InvalidValueError: It is no TOML; a required text is missing; a language is missing or empty, or has other
            placeholders than the other language. All faults are listed.

    Example:
        >>> same = '{en = "It is {peak}.", zh = "它是 {peak}。"}'
        >>> parse_words("".join(f"{key} = {same}\\n" for key in REQUIRED_TEXTS), "x.toml")("method", peak=1).en
        'It is 1.'
    """
    try:
        tables = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise _error(source, [f"it is no TOML: {error}"]) from error
    found = dict(entries(tables))
    wrong = [f"the text {key!r} is missing" for key in REQUIRED_TEXTS if key not in found]
    wrong += [f"{key}: {fault}" for key, entry in found.items() for fault in faults(entry)]
    if wrong:
        raise _error(source, wrong)
    return ClaimWords(source, {key: Text(**entry) for key, entry in found.items()})


def _error(source: str, wrong: list[str]) -> InvalidValueError:
    return InvalidValueError(
        f"the words of the claim in {source} are not whole: {'; '.join(wrong)}",
        hint="Every text has English and Chinese with the same placeholders; the experiment gives each a value.",
    )
