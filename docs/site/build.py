"""Build both trees of the documentation, strictly: `python docs/site/build.py [FOLDER]`; without one, into out/docs."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from sphinx.cmd.build import main

import sqrtdk
from languages import EXPLORER, TREES
from public import TOP, names
from sqrtdk_lab.app.static import explorer_page

SITE = Path(__file__).parent
ROOT = SITE.parents[1]


def build(tree: str, folder: Path) -> int:
    """The exit code of Sphinx; the pages of docs/en go into FOLDER/en, and with them the explorer without a server."""
    code, language, _, title = TREES[tree]
    settings = ["-D", f"language={language}", "-D", f"html_title={title}"]
    options = ["-b", "html", "-q", "-E", "-W", "--keep-going", "-c", str(SITE), "-d", str(folder / ".doctrees" / tree)]
    failed = main([*options, *settings, str(ROOT / "docs" / tree), str(folder / tree)])
    (folder / tree / EXPLORER).write_text(explorer_page(code), encoding="utf-8")
    return failed


def build_site(folder: Path) -> int:
    """Both trees, beside a first page that leads to them; 0 where no page has a warning."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(SITE / "first.html", folder / "index.html")
    for room in sqrtdk._ROOMS:  # once, before the two processes part
        names(f"{TOP}.{room}")
    with ProcessPoolExecutor(max_workers=len(TREES), mp_context=get_context("fork")) as pool:
        return max(pool.map(build, TREES, [folder] * len(TREES)))


if __name__ == "__main__":
    sys.exit(build_site(Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT / "out" / "docs"))
