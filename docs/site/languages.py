"""What each tree has of its own: language and title, and on every page a link to the same page of the other."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

# The folder of a tree: its language to HTML and to Sphinx, its name in itself, the title of the site.
TREES = {
    "en": ("en", "en", "English", "sqrtdk documentation"),
    "zh": ("zh-CN", "zh_CN", "中文", "sqrtdk 文档"),
}

EXPLORER = "explorer-page.html"  # the explorer as one file, in each tree


def _other_tree(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    (other,) = TREES.keys() - {app.srcdir.name}
    up = "../" * (page.count("/") + 1)
    code, _, name, _ = TREES[other]
    context["other_tree"] = {"href": f"{up}{other}/{page}.html", "lang": code, "name": name}


def _files_of_the_repository(app: Sphinx, page: str, source: list[str]) -> None:
    """A Markdown file outside of the tree, as CONTRIBUTING.md, is no page: the site has it as a file."""
    source[0] = re.sub(r"\]\((?=(?:\.\./){2,}[^)]*\.md\))", "](path:", source[0])


def _pages_of_the_site(app: Sphinx, page: str, source: list[str]) -> None:
    """A page that is made with the site, [text](page:NAME), is in no folder of the sources: its link stays as it is."""
    source[0] = re.sub(r"\]\(page:([^)]*)\)", r"](\1){.external}", source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the link to each page's context, the files and the pages that are made with the site."""
    app.connect("html-page-context", _other_tree)
    app.connect("source-read", _files_of_the_repository)
    app.connect("source-read", _pages_of_the_site)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
