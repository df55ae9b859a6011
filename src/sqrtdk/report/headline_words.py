"""The fixed words of a check's headline, in English and Chinese."""

from __future__ import annotations

from collections.abc import Iterable

from sqrtdk.messages import Text

HEADLINE = {
    # between and around the parts
    "joint": Text("; ", "；"),
    "also": Text("; also: ", "；另外："),
    "but": Text("; something else is wrong: ", "；但另有错误："),
    "warned": Text("; with a warning: ", "；另有警告："),
    "at site": Text("{told} ({site})", "{told}（{site}）"),
    "more": Text("{count} more", "另有 {count} 项"),
    # NaN
    "not finite": Text("not finite from {site} on: {why}", "从 {site} 起不再是有限值：{why}"),
    "not finite, all": Text("not finite: {why}", "不是有限值：{why}"),
    # which attentions
    "in all": Text("in {count} of {total}", "全部 {count} 次注意力调用"),
    "in the one": Text("in {count} of {total}", "唯一一次注意力调用"),
    "in some": Text("in {count} of {total}", "{number} 次注意力调用中有 {count} 次"),
    "all": Text("all {count} attentions have", "全部 {count} 次注意力调用"),
    "the one": Text("the one attention has", "唯一一次注意力调用"),
    "some": Text("{count} of {total} have", "{number} 次注意力调用中有 {count} 次"),
    # a wrong scale
    "blocks": Text("blocks of keys have unlike scales {where}", "{where}各块键的缩放因子不一致"),
    "wrong": Text("the scale is {size} {where}: {happened}", "{where}的缩放因子{size}：{happened}"),
    "not as declared": Text("it is not what was declared", "与声明不符"),
    "size unknown": Text("wrong", "有误"),
    "too large": Text("{times} times too large", "是应有值的 {times} 倍"),
    "too small": Text("{times} times too small", "只有应有值的 {parts}"),
    "from to": Text(" to ", " 到 "),
    # a right one
    "no attention": Text("no attention was seen", "没有发现注意力"),
    "none judged": Text("no scale could be judged", "没有任何缩放因子可以判定"),
    "right": Text("{who} {which}", "{who}的缩放因子{which}"),
    "right alone": Text(
        "{who} {which} (scales and formulas alone: nothing else was looked at)",
        "{who}的缩放因子{which}（只检查了缩放因子和公式）",
    ),
    "textbook": Text("the textbook scale", "都是教科书的值"),
    "textbook, the one": Text("the textbook scale", "是教科书的值"),
    "as declared": Text("the declared scale", "都与声明一致"),
    "as declared, the one": Text("the declared scale", "与声明一致"),
    "either": Text(
        "the right scale, {exact} the textbook's and {declared} as declared",
        "都正确：{exact} 次是教科书的值，{declared} 次与声明一致",
    ),
    # what was not judged
    "lost": Text("{count} of {total} could not be judged", "{where}未能判定"),
    "not run": Text("{total} not measured", "{count} 处注意力未测量"),
}


def phrase(key: str, /, **parts: object) -> Text:
    """Return a phrase of the headline with its braces filled; a filling may be bilingual itself.

    Example:
        >>> phrase("at site", told=Text("a head", "一个头"), site="h.0").zh
        '一个头（h.0）'
    """
    return HEADLINE[key].filled(**parts)


def joined(parts: Iterable[Text], between: Text) -> Text:
    """Join phrases with a separator.

    Example:
        >>> joined([Text("8", "8"), Text("16", "16")], HEADLINE["from to"]).en
        '8 to 16'
    """
    told = tuple(parts)
    return Text(between.en.join(part.en for part in told), between.zh.join(part.zh for part in told))
