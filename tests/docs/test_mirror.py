"""The Chinese pages mirror the English ones: the same pages, headings, code, tables, links and pictures.

Code may have its comments and what it prints in Chinese, and may ask for that; all else of it is equal.
"""

from __future__ import annotations

import ast
import doctest
import re
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, pages, read_page

ENGLISH, CHINESE = pages("en"), pages("zh")
TITLES = ":caption:"


def _pairs() -> dict[str, tuple[Path, Path]]:
    pairs = {name: (ENGLISH[name], CHINESE[name]) for name in sorted(ENGLISH.keys() & CHINESE.keys())}
    if (ROOT / "README.zh-CN.md").is_file():
        pairs["README"] = (ROOT / "README.md", ROOT / "README.zh-CN.md")
    return pairs


PAIRS = _pairs()


def _navigation(tree: str) -> list[str]:
    blocks = [block for path in pages(tree).values() for block in read_page(path).blocks]
    lines = "\n".join(text for info, text in blocks if info == "{toctree}").splitlines()
    return [line for line in lines if line and not line.startswith(":")]


def test_both_trees_have_the_same_pages() -> None:
    assert ENGLISH.keys() ^ CHINESE.keys() == set()


def test_the_navigation_has_every_page_once() -> None:
    listed = _navigation("en")
    assert len(listed) == len(set(listed))
    assert _navigation("zh") == listed
    assert {"index", *listed} == ENGLISH.keys()


HAN = re.compile("[\u3000-\u303f\u3400-\u9fff\uff00-\uffef]")  # with full-width punctuation


def _numbers(text: str) -> str:
    return " ".join(re.findall(r"\d+(?:\.\d+)?", text))


class _WithoutChoice(ast.NodeTransformer):
    """Calls without `language="zh"`, and the message itself in place of `message.said("zh")`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "said":
            return node.func.value
        node.keywords = [word for word in node.keywords if ast.unparse(word) != "language='zh'"]
        return node


def _programs(english: str, chinese: str) -> tuple[str, str]:
    """Two programs without comments, and without the words of the texts that one of them has in Chinese."""
    trees = [_WithoutChoice().visit(ast.parse(text)) for text in (english, chinese)]
    sides = ([node for node in ast.walk(tree) if isinstance(node, ast.Constant)] for tree in trees)
    for pair in zip(*sides, strict=False):  # where their numbers differ, so do the programs
        one, other = (node.value for node in pair)
        if isinstance(one, str) and isinstance(other, str) and HAN.search(other):
            pair[0].value, pair[1].value = _numbers(one), _numbers(other)
    return ast.dump(trees[0]), ast.dump(trees[1])


COMMENT = re.compile(r"(?:^| +)# .*$", re.MULTILINE)
IN_CHINESE = " --lang zh-CN"


def _shown(english: str, chinese: str) -> tuple[list[str], list[str]]:
    """What a command prints: of output in Chinese only which numbers it has, as other words are in another order."""
    if HAN.search(chinese):
        return sorted({*_numbers(english).split()}), sorted({*_numbers(chinese).split()})
    return english.splitlines(), chinese.splitlines()


def _sessions(english: str, chinese: str) -> tuple[list[object], list[object]]:
    """Two blocks with prompts, statement by statement, as `_programs` and `_shown` leave them."""
    parts: tuple[list[object], list[object]] = ([], [])
    sides = (doctest.DocTestParser().get_examples(text) for text in (english, chinese))
    nothing = doctest.Example("", "")
    for one, other in zip_longest(*sides, fillvalue=nothing):
        for pair in (_programs(one.source, other.source), _shown(one.want, other.want)):
            for side, text in zip(parts, pair, strict=True):
                side.append(text)
    return parts


def _code(block: tuple[str, str]) -> tuple[str, str]:
    """A block as both languages have it: of a directive that holds prose, its name."""
    info, text = block
    if not info.startswith("{"):
        return block
    literal = info.split("}")[0] in ("{toctree", "{eval-rst", "{public")
    lines = [line for line in text.splitlines() if not line.startswith(TITLES)]
    return (info, "\n".join(lines)) if literal else (info.split("}")[0], "")


def _console(text: str) -> tuple[list[str], str]:
    """The commands without their comments and without the choice of Chinese, and what they print."""
    lines = text.splitlines()
    commands = [COMMENT.sub("", line).removesuffix(IN_CHINESE) for line in lines if line.startswith("$ ")]
    return commands, "\n".join(line for line in lines if not line.startswith("$ "))


def _same_code(english: tuple[str, str], chinese: tuple[str, str]) -> bool:
    """Whether two blocks do the same, but for comments and for words that are shown; other blocks are equal."""
    (info, one), (other_info, other) = english, chinese
    if info != other_info or info.startswith("{"):
        return _code(english) == _code(chinese)
    if info in ("python", "pycon"):
        alike = _sessions(one, other) if ">>> " in one else _programs(one, other)
    elif info == "console":
        (commands, printed), (other_commands, other_printed) = _console(one), _console(other)
        alike = (commands, _shown(printed, other_printed)[0]), (other_commands, _shown(printed, other_printed)[1])
    elif info == "text":
        alike = _shown(one, other)
    else:
        alike = COMMENT.sub("", one), COMMENT.sub("", other)
    return alike[0] == alike[1]


def _targets(path: Path) -> list[str]:
    """Where links and pictures lead: the anchor is of the heading's own language."""
    page = read_page(path)
    tree = "zh" if path.is_relative_to(DOCS / "zh") or path.name == "README.zh-CN.md" else "en"
    ways = [
        target
        for target in (*(link.split("#")[0] for link in page.links), *page.pictures)
        if target not in ("README.md", "README.zh-CN.md")
    ]
    return sorted(re.sub(rf"(?<=[./]){tree}(?=[./])", "LANG", target) for target in ways)


@pytest.mark.parametrize("name", PAIRS)
def test_a_page_mirrors_the_english_one(name: str) -> None:
    """Headings, code, tables, formulas, links and pictures; words inside a formula may be translated."""
    english, chinese = map(read_page, PAIRS[name])
    assert english.headings == chinese.headings
    pairs = zip(english.blocks, chinese.blocks, strict=True)
    assert [pair for pair in pairs if not _same_code(*pair)] == []
    assert english.tables == chinese.tables
    formulas = [sorted(re.sub(r"\\text\{.*?\}|\s", "", text) for text in page.formulas) for page in (english, chinese)]
    assert formulas[0] == formulas[1]
    english_targets, chinese_targets = map(_targets, PAIRS[name])
    assert english_targets == chinese_targets


ENGLISH_CODE = """
>>> table = ["keys   at 10"]  # a line for each
>>> for n in (8, 32):
...     table.append(f"{n:<6} no {n + 1:.2f}")
>>> print(*table, sep="; ")
keys   at 10; 8      no 9.00; 32     no 33.00
"""
CHINESE_CODE = """
>>> table = ["键数   在 10 处"]  # 每个一行
>>> for n in (8, 32):
...     table.append(f"{n:<6} 否 {n + 1:.2f}")
>>> print(*table, sep="; ")
键数   在 10 处; 8      否 9.00; 32     否 33.00
"""


def test_words_and_comments_may_be_chinese() -> None:
    assert _same_code(("python", ENGLISH_CODE), ("python", CHINESE_CODE))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(8, 32)", "(8, 33)"),
        ("n + 1", "n + 2"),
        (":<6", ":<7"),
        ("n + 1:.2f}", "n + 1:.3f}"),
        ('sep="; "', 'sep=", "'),
        ("8      否 9.00", "8      否 9.01"),
        ("在 10 处", "在 11 处"),
        ("print(*table", "print(*表"),
        (">>> print", ">>> len(table)\n2\n>>> print"),
    ],
)
def test_other_code_is_seen(right: str, wrong: str) -> None:
    assert right in CHINESE_CODE
    assert not _same_code(("python", ENGLISH_CODE), ("python", CHINESE_CODE.replace(right, wrong)))


ENGLISH_CONSOLE = """
$ sqrtdk check demo      # the right scale
3 attentions: 2 exact, 1 not
"""
CHINESE_CONSOLE = """
$ sqrtdk check demo --lang zh-CN      # 正确的缩放
2 次相符、1 次不符，共 3 次注意力
"""


def test_comments_and_output_of_commands_may_be_chinese() -> None:
    assert _same_code(("console", ENGLISH_CONSOLE), ("console", CHINESE_CONSOLE))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("check demo", "check demo:unscaled"),
        ("zh-CN ", "en "),
        ("2 次", "1 次"),
        ("$ sqrtdk", "$ make test\n$ sqrtdk"),
        ("共 3 次", "共三次"),
    ],
)
def test_another_command_is_seen(right: str, wrong: str) -> None:
    assert right in CHINESE_CONSOLE
    assert not _same_code(("console", ENGLISH_CONSOLE), ("console", CHINESE_CONSOLE.replace(right, wrong)))


def test_other_blocks_differ_in_comments_alone() -> None:
    block = "id: 3 # the first\n"
    assert _same_code(("yaml", block), ("yaml", "id: 3 # 第一个\n"))
    assert not _same_code(("yaml", block), ("yaml", "id: 4 # 第一个\n"))
    assert not _same_code(("yaml", block), ("toml", block))


def test_code_may_ask_for_chinese() -> None:
    english = ">>> print(report.fix, to_text(report))\nscale once, of 2\n"
    chinese = '>>> print(report.fix.said("zh"), to_text(report, language="zh"))\n2 次中只缩放一次\n'
    assert _same_code(("python", english), ("python", chinese))
    assert not _same_code(("python", english), ("python", chinese.replace('language="zh"', "width=80")))
