"""Write the table of versions in docs/en/limits.md and docs/zh/limits.md from benchmarks/results/versions.json.

What stands between `<!-- versions -->` and `<!-- end of versions -->` is written here. `--check` writes nothing, and
exits 1 where a page says something else than the record.

    python scripts/versions_page.py [--check]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cost_page import LANGUAGES, caption, record, table
from made import ROOT, settle_texts, with_part
from versions import ENVIRONMENTS

NAMES = {
    "pinned": ("pinned", "固定的版本"),
    "newest-transformers": ("newest transformers", "最新的 transformers"),
    "newest-torch": ("newest torch", "最新的 torch"),
    "newest-python": ("newest Python", "最新的 Python"),
    "middle": ("middle", "中间的版本"),
    "oldest": ("oldest of all", "全部最旧"),
    "newest-jax": ("newest JAX", "最新的 JAX"),
    "oldest-jax": ("oldest JAX", "最旧的 JAX"),
}
HEADS = (
    ("environment", "环境"),
    ("Python", "Python"),
    ("torch", "torch"),
    ("transformers", "transformers"),
    ("numpy", "numpy"),
    ("passed", "通过"),
    ("failed", "失败"),
    ("skipped", "跳过"),
    ("minutes", "分钟"),
)
COLUMNS = ("python", "torch", "transformers", "numpy", "passed", "failed", "skipped", "minutes")
SAME = ("The {name} is the one of the environment {other}.", "{name} 与环境“{other}”中的相同。")
PART = ("In the row {name} these are not run: {folders}.", "“{name}”一行未运行：{folders}。")
MISSING = ("Not run, {name}: `{reason}`.", "未运行，{name}：`{reason}`。")


def versions(language: str, found: Mapping[str, Any]) -> str:
    """The environments that ran; beneath them, which folders of tests did not, and why other environments did not."""
    at = LANGUAGES.index(language)
    ran = [entry for entry in found["environments"] if "minutes" in entry]
    rows = [
        (NAMES[entry["name"]][at], *(str(entry.get(column, "")).split("+")[0] for column in COLUMNS)) for entry in ran
    ]
    notes = []
    for entry in found["environments"]:
        name, reason = NAMES[entry["name"]][at], entry.get("reason", "")
        if entry["outcome"] == "same":
            notes.append(SAME[at].format(name=name, other=NAMES[reason][at]))
        elif entry["outcome"] == "not available":
            notes.append(MISSING[at].format(name=name, reason=reason))
        elif left := [folder for folder in folders_of(entry["name"]) if folder not in entry["folders"]]:
            commas = (", ", "、")[at].join(f"`{folder}`" for folder in left)
            notes.append(PART[at].format(name=name, folders=commas))
    text = table(language, HEADS, rows) + "\n" + caption(language, "versions", found["cpu"], found["date"])
    return "\n".join((text, *notes))


def folders_of(name: str) -> tuple[str, ...]:
    """The folders of tests that are run in an environment."""
    return next(environment.folders for environment in ENVIRONMENTS if environment.name == name)


def page(language: str) -> Path:
    """The page with the table."""
    return ROOT / "docs" / language / "limits.md"


def written(language: str, found: Mapping[str, Any]) -> str:
    """The page with the table as the record has it."""
    path = page(language)
    return with_part(path, path.read_text(encoding="utf-8"), "versions", versions(language, found))


def main() -> None:
    """The command."""
    settle_texts(__doc__, {page(language): written(language, record("versions")) for language in LANGUAGES})


if __name__ == "__main__":
    main()
