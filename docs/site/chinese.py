"""What the Chinese tree needs: a search without a dictionary, and the theme's words."""

from __future__ import annotations

import re
from gettext import NullTranslations

from sphinx.application import Sphinx
from sphinx.search import languages
from sphinx.search.zh import SearchChinese

RUN = re.compile(r"[\u3400-\u9fff]+")

# Words of the theme that Sphinx has no translation of.
WORDS = {
    "Back to top": "回到顶部",
    "Copyright &#169; %(copyright)s": "版权所有 &#169; %(copyright)s",
    "Home": "首页",
    "Made with ": "制作工具：",
    "Next": "下一页",
    "On this page": "本页内容",
    "Previous": "上一页",
    "Skip to content": "跳到正文",
}

# The same in the browser, for what is typed: every pair has to be on the page. Sphinx calls it by this name.
SPLIT = r"""
function splitQuery(query) {
  const pairs = [];
  for (const run of query.match(/[\u3400-\u9fff]+/g) || []) {
    if (run.length === 1) pairs.push(run);
    for (let at = 0; at + 2 <= run.length; at++) pairs.push(run.slice(at, at + 2));
  }
  return pairs.concat(query.match(/[a-zA-Z0-9_]+/g) || []);
}
"""


class Pairs(SearchChinese):
    """Chinese by pairs of characters, what is in Latin letters by words."""

    language_name = "English"  # of the stemmer, by which Sphinx calls it in the page: there is no "ChineseStemmer"
    js_splitter_code = SPLIT

    def split(self, input: str) -> list[str]:
        """The terms of a text."""
        pairs = [run[at : at + 2] for run in RUN.findall(input) for at in range(max(1, len(run) - 1))]
        latin = self.latin1_letters.findall(input)
        self.latin_terms.update(latin)
        return [*pairs, *latin]


class Words(NullTranslations):
    """Asked for what the others have no translation of."""

    def gettext(self, message: str) -> str:
        """The word itself where there is none here either."""
        return WORDS.get(message.strip("\n "), message)


def _say(app: Sphinx) -> None:
    if app.srcdir.name == "zh" and app.translator is not None:
        app.translator.add_fallback(Words())


def setup(app: Sphinx) -> dict[str, bool]:
    """Take the place of Sphinx's own Chinese search, and add the rest."""
    languages["zh"] = Pairs
    app.connect("builder-inited", _say)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
