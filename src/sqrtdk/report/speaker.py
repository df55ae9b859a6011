"""Says sentences in one language. A report makes one speaker for its language and hands it to its functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqrtdk._language import Language
from sqrtdk._sites import ROOT_NAME
from sqrtdk.messages import Text, said, word
from sqrtdk.report.plain import plain

_MOST_SITES_NAMED = 3  # of a longer list a reader looks up the rest in JSON


@dataclass(frozen=True, slots=True)
class Speaker:
    """Says sentences and words of the catalogue in one language.

    Example:
        >>> english, chinese = Speaker("en"), Speaker("zh")
        >>> english.word("words.findings"), chinese.word("words.findings")
        ('Findings', '问题')
        >>> chinese.said("h.0")  # a name is the same in every language
        'h.0'
    """

    language: Language

    def word(self, id: str, /, **values: str | float) -> str:
        """Return the sentence with an id of the catalogue, in the speaker's language, with its parts filled in."""
        return word(id, self.language, **values)

    def said(self, sentence: Text | str) -> str:
        """Return a sentence in the speaker's language.

        Args:
            sentence: A `Message` or a `Text`, which have both languages, or a plain `str`, which is returned as it is.
        """
        return sentence.of(self.language) if isinstance(sentence, Text) else said(sentence, self.language)

    def mark(self, name: str) -> str:
        """Return a punctuation mark of the speaker's language, with the blank that follows it.

        Args:
            name: "comma", "colon", "semicolon", "stop" or "list".
        """
        return self.word(f"words.mark.{name}")

    def join(self, sentences: Iterable[str], mark: str = "comma") -> str:
        """Return sentences with a mark between them.

        Example:
            >>> Speaker("zh").join(["h.0", "h.1"]), Speaker("zh").join(["h.0", "h.1"], "list")
            ('h.0，h.1', 'h.0、h.1')
        """
        return self.mark(mark).join(map(self.said, sentences))

    def sites(self, sites: Sequence[str]) -> str:
        """Return the names of sites without repetition: the first few, then the number of the rest.

        Example:
            >>> Speaker("en").sites(["h.0", "", "h.0", "h.2", "h.4", "h.6"])
            'h.0, (root), h.2 and 2 more'
        """
        names = list(dict.fromkeys(plain(site) or ROOT_NAME for site in sites))
        shown = self.join(names[:_MOST_SITES_NAMED], "list")
        left = len(names) - _MOST_SITES_NAMED
        return self.word("terminal.listed_more", sites=shown, count=left) if left > 0 else shown

    def bracketed(self, sentence: str) -> str:
        """Return a sentence in brackets, to be put behind another; the root's name has brackets already.

        Example:
            >>> Speaker("en").bracketed("h.0, h.1"), Speaker("en").bracketed("(root)")
            (' (h.0, h.1)', ' (root)')
        """
        return f" {ROOT_NAME}" if sentence == ROOT_NAME else self.word("terminal.in_brackets", sites=sentence)
