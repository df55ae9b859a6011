"""Writes how sqrtdk is installed into README and the first pages, by what is true of the package index.

    python scripts/install_lines.py [--check]

What stands between `<!-- install -->` and `<!-- end of install -->` is written here. A release sets PUBLISHED to True,
which is the only line to change by hand, and `make pages` does the rest.
"""

from __future__ import annotations

from pathlib import Path

from made import ROOT, settle_texts

PUBLISHED = False  # whether `pip install sqrtdk` finds a release
START, END = "<!-- install -->\n", "<!-- end of install -->"
PAGES = {"en": ("README.md", "docs/en/start.md"), "zh": ("README.zh-CN.md", "docs/zh/start.md")}
FRONT = {language: f"docs/{language}/index.md" for language in PAGES}

CLONE = {
    "en": """```console
$ make demo                    # makes .venv with torch and sqrtdk (minutes), checks a small model
$ source .venv/bin/activate    # from here on `sqrtdk` is that of .venv
$ sqrtdk check demo:unscaled   # a model without its scale; exit code 1
```
""",
    "zh": """```console
$ make demo                    # 建立 .venv，安装 torch 和 sqrtdk（几分钟），并检查一个小模型
$ source .venv/bin/activate    # 此后的 `sqrtdk` 就是 .venv 中的
$ sqrtdk check demo:unscaled   # 没有缩放的模型；退出码 1
```
""",
}
INDEX = {
    "en": """```console
$ pip install sqrtdk           # Python 3.10 or newer; brings torch
$ sqrtdk check demo:unscaled   # a model without its scale; exit code 1
```
""",
    "zh": """```console
$ pip install sqrtdk           # 需要 Python 3.10 或更新的版本；会一并安装 torch
$ sqrtdk check demo:unscaled   # 没有缩放的模型；退出码 1
```
""",
}
EXTRAS = {
    "en": """Where sqrtdk is installed, `pip install 'sqrtdk[hf]'` adds transformers for Hugging Face models,
`'sqrtdk[watch]'` the records of a training run, and `'sqrtdk[lab]'` the experiments.
""",
    "zh": "在装好的环境中，`pip install 'sqrtdk[hf]'` 会加上 transformers，用于 Hugging Face 模型；"
    "`'sqrtdk[watch]'` 用于保存训练记录，`'sqrtdk[lab]'` 用于实验。\n",
}
NOT_YET = {
    "en": "sqrtdk is not on the package index yet, so `pip install sqrtdk` finds nothing. In a clone of this\n"
    "repository, with Python 3.11 or newer:\n",
    "zh": "sqrtdk 尚未发布到 PyPI，`pip install sqrtdk` 会提示找不到该包。请在本仓库的克隆中运行，"
    "需要 Python 3.11 或更新的版本：\n",
}
OWN_ENVIRONMENT = {
    "en": "In an environment of your own, with Python 3.10 and torch 2.6 or newer, run `pip install PATH` with the\n"
    "path of the clone in place of `make demo`, and `pip install PATH/lab` for the experiments.\n",
    "zh": "若要装进自己的环境（Python 3.10、torch 2.6 或更新的版本），用 `pip install PATH` 代替 `make demo`，"
    "PATH 是克隆所在的路径；实验另需 `pip install PATH/lab`。\n",
}
OR_CLONE = {"en": "Or in a clone of this repository:\n", "zh": "或者在本仓库的克隆中：\n"}
FRONT_LINE = {
    ("en", True): "`pip install sqrtdk` installs it; [Start here](start.md#install) says more.\n",
    ("zh", True): "用 `pip install sqrtdk` 安装；详见[从这里开始](start.md#安装)。\n",
    ("en", False): "sqrtdk is not on the package index yet; [Start here](start.md#install) installs it from a clone.\n",
    ("zh", False): "sqrtdk 尚未发布到 PyPI：怎样从克隆安装，见[从这里开始](start.md#安装)。\n",
}


def install_lines(language: str, published: bool = PUBLISHED) -> str:
    """The section of README and of the first page."""
    parts = (INDEX, EXTRAS, OR_CLONE, CLONE) if published else (NOT_YET, CLONE, OWN_ENVIRONMENT, EXTRAS)
    return "\n".join(part[language] for part in parts)


def wanted(published: bool = PUBLISHED) -> dict[Path, str]:
    """Each page as it should be."""
    lines = {ROOT / name: install_lines(language, published) for language, names in PAGES.items() for name in names}
    lines |= {ROOT / name: FRONT_LINE[language, published] for language, name in FRONT.items()}
    pages = {}
    for path, text in lines.items():
        before, rest = path.read_text(encoding="utf-8").split(START)
        pages[path] = f"{before}{START}\n{text}\n{END}{rest.split(END)[1]}"
    return pages


if __name__ == "__main__":
    settle_texts(__doc__, wanted())
