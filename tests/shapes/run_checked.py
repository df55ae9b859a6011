"""Runs every path with shapes checked, then what has to be refused; prints what was said, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def said(run: Callable[[], Any]) -> str:
    """The error of a call; empty where there is none."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    from tests.shapes import checked

    checked.install()  # before anything imports the package

    from tests.shapes import paths, wrong

    answer = {
        "right": {name: said(run) for name, run in paths.every_path()},
        "never called": sorted(checked.SHAPED - checked.CALLED),
        "wrong shapes": {name: said(run) for name, run in wrong.CALLS.items()},
        "wrong annotations": {plant.function: said(plant.run) for plant in wrong.PLANTS},
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
