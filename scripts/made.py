"""What the scripts that make committed files share: write them, or with `--check` name those that are not current."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def is_text(path: Path, text: str) -> bool:
    """Whether a file is there and holds this text."""
    return path.exists() and path.read_text(encoding="utf-8") == text


def with_part(page: Path, text: str, name: str, part: str) -> str:
    """The text of a page with this part between `<!-- NAME -->` and `<!-- end of NAME -->`, which stand there once."""
    frame = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    text, times = frame.subn(lambda found: f"{found[1]}\n{part}\n\n{found[2]}", text)
    if times != 1:
        raise SystemExit(f"{page}: {name} stands there {times} times")
    return text


def settle(description: str | None, stale: Collection[Path], write: Callable[[Path], object]) -> None:
    """The command: write the files that are not current, or exit with 1 and their names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1: a file is not current")
    if not parser.parse_args().check:
        for path in stale:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
    elif stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"{names}: run python scripts/{Path(sys.argv[0]).name}")


def settle_texts(description: str | None, wanted: Mapping[Path, str]) -> None:
    """The command of a script that makes texts."""
    stale = [path for path, text in wanted.items() if not is_text(path, text)]
    settle(description, stale, lambda path: path.write_text(wanted[path], encoding="utf-8"))
