"""The table of public kernels in docs/en/gradients.md and docs/zh/gradients.md, from public_kernels.json.

    python scripts/public_kernels_page.py            # writes both pages
    python scripts/public_kernels_page.py --check    # exit code 1 where a page is not what the record says

The record is of `python benchmarks/public_kernels.py --json benchmarks/results/public_kernels.json`.
"""

from __future__ import annotations

import json
from typing import Any

from made import ROOT, settle_texts

RECORD = ROOT / "benchmarks" / "results" / "public_kernels.json"
BEGIN, END = "<!-- public kernels: begin -->", "<!-- public kernels: end -->"

# What is said in words: English, Chinese.
WORDS = {
    "header": (
        "| package | call | dtype | cases | wrong | refused |",
        "| 软件包 | 调用 | 数据类型 | 情形 | 有误 | 拒绝 |",
    ),
    "said": (
        "Its answers ([record](../../benchmarks/results/public_kernels.json); {date}, torch {torch}, Triton {triton}):",
        "报告的内容（[记录](../../benchmarks/results/public_kernels.json)；{date}，torch {torch}，Triton {triton}）：",
    ),
}


def table(record: dict[str, Any], language: int) -> str:
    """Return a row for each kernel and dtype, and below what was said of those that are not right, once each."""
    rows = [WORDS["header"][language], "|---|---|---|---|---|---|"]
    said: dict[str, list[str]] = {}
    for one in record["kernels"]:
        cells = one["package"], one["name"], one["dtype"], one["cases"], one["wrong"], one["refused"]
        rows.append(f"| {' | '.join(map(str, cells))} |")
        text = "\n".join(f"  {line}" for line in one["said"])
        if text:
            said.setdefault(text, []).append(f"{one['package']}, {one['name']}, {one['dtype']}")
    about = {name: str(record[name]).partition("+")[0] for name in ("date", "torch", "triton")}
    blocks = "\n".join("\n".join([*names, text]) for text, names in said.items())
    return "\n".join([*rows, "", WORDS["said"][language].format(**about), "", "```text", blocks, "```"])


def filled(page: str, text: str) -> str:
    """Return the page with the text between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main() -> None:
    """The command."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    pages = [ROOT / "docs" / tree / "gradients.md" for tree in ("en", "zh")]
    texts = [filled(page.read_text(encoding="utf-8"), table(record, number)) for number, page in enumerate(pages)]
    settle_texts(__doc__, dict(zip(pages, texts, strict=True)))


if __name__ == "__main__":
    main()
