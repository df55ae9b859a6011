"""Runs every path with shapes checked, then what has to be refused; prints what was said, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def said(run: Callable[[], Any]) -> str:
    """The error of a call; empty where there is none."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    import checked

    checked.install()  # before anything imports the package

    import paths
    import wrong

    answer = {
        "right": {name: said(run) for name, run in paths.every_path()},
        "never called": sorted(checked.SHAPED - checked.CALLED),
        "wrong shapes": {name: said(run) for name, run in wrong.CALLS.items()},
        "wrong annotations": {plant.function: said(plant.run) for plant in wrong.PLANTS},
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS / name) for name in ("shapes", "attention", "nn", "positions", "")]
    main()
