"""Rebuilds the SVG and MathML of other libraries from lists of allowed elements and attributes.

The output is built from the lists rather than filtered from the input: an element, attribute or reference that is not
listed never gets in, and every text is escaped. So a formula or a label can't carry a script, a link or a style.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from markupsafe import Markup, escape

from sqrtdk.extending import load_extra
from sqrtdk.report.plain import plain
from sqrtdk_lab.report.axes import INK, LINE, PAPER, SERIES_COLOURS, SOFT

_MATH = {
    *("math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "mstyle", "mpadded", "mphantom", "mfrac", "msqrt", "mroot"),
    *("msub", "msup", "msubsup", "munder", "mover", "munderover", "mtable", "mtr", "mtd"),
}
_MATH_ATTRIBUTES = {
    *("display", "displaystyle", "scriptlevel", "mathvariant", "linethickness", "accent", "form", "fence", "stretchy"),
    *("symmetric", "largeop", "movablelimits", "minsize", "maxsize", "lspace", "rspace", "width", "height", "depth"),
    *("columnalign", "columnspacing", "rowspacing"),
}
_SVG = {"svg", "g", "defs", "path", "use", "clipPath", "rect", "circle"}
_SVG_ATTRIBUTES = {"viewBox", "d", "transform", "x", "y", "width", "height", "r", "cx", "cy"}
_SVG_STYLES = {
    *("fill", "fill-opacity", "fill-rule", "opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray"),
    *("stroke-dashoffset", "stroke-linecap", "stroke-linejoin", "stroke-miterlimit"),
}
# our matplotlib colours -> the page's CSS variables, which have lighter values in dark mode
_PAGE_COLOURS = {PAPER: "none", INK: "currentColor", SOFT: "var(--soft)", LINE: "var(--line)"} | {
    colour: f"var(--c{index})" for index, colour in enumerate(SERIES_COLOURS)
}
# values of attributes: without quotes, colons and slashes they can neither end the attribute nor name an address
_PLAIN_ATTRIBUTE = re.compile(r"[\w\s.,+%()#-]*")


def math(latex: str) -> Markup | None:
    """Return a formula as MathML.

    Args:
        latex: the formula in LaTeX, without dollar signs.

    Returns:
        A `math` element in display style, or None if any part of the formula can't be converted.

    Raises:
        MissingExtraError: latex2mathml is not installed.

    Example:
        >>> print(math("d_k"))
        <math display="block"><mrow><msub><mi>d</mi><mi>k</mi></msub></mrow></math>
        >>> math(r"\\frac{") is None, math(r"\\nonsense{x}") is None
        (True, True)
    """
    converter = load_extra("latex2mathml.converter")
    try:
        # \mathrm{T} -> \text{T}: the library sets a single \mathrm letter in italics and splits longer words
        root = converter.convert_to_element(re.sub(r"\\mathrm\{([A-Za-z]+)\}", r"\\text{\1}", latex), display="block")
    except Exception:  # the library documents no errors: bad input raises whatever it runs into, even RecursionError
        return None
    texts = [html.unescape(element.text or "") for element in root.iter()]
    # the library leaves a command that it does not know as text: \nonsense{x}
    if any(element.tag not in _MATH for element in root.iter()) or any("\\" in text for text in texts):
        return None
    return Markup("".join(_math(root)))


def _math(element: ElementTree.Element) -> Iterator[str]:
    attributes = {key: value for key, value in element.attrib.items() if key in _MATH_ATTRIBUTES}
    yield _opening(element.tag, attributes)
    yield str(escape(plain(html.unescape(element.text or ""))))  # the library leaves entities in its texts
    for child in element:
        yield from _math(child)
    yield f"</{element.tag}>"


def plot_svg(drawing: str, prefix: str, labelled_by: str) -> Markup:
    """Return a plot of `sqrtdk_lab.report.plots` as an element of the page, in the page's colours.

    Args:
        drawing: a complete SVG document.
        prefix: prefix of all ids in the drawing, so that the ids of several plots differ.
        labelled_by: id of the plot's caption.

    Returns:
        An `svg` element without styles, names and metadata.
    """
    root = ElementTree.fromstring(drawing)
    # ids that a <use> or a clip path refers to; all other ids are dropped
    wanted = set(re.findall(r'(?:xlink:href="#|url\(#)([\w-]+)', drawing))
    attributes = {"role": "img", "aria-labelledby": labelled_by, "viewBox": root.attrib["viewBox"]}
    ids = {name: f"{prefix}{index}" for index, name in enumerate(sorted(wanted))}
    children = "".join(part for child in root for part in _svg(child, ids))
    return Markup(f"{_opening('svg', attributes)}{children}</svg>")


def _svg(element: ElementTree.Element, ids: dict[str, str]) -> Iterator[str]:
    tag = element.tag.rpartition("}")[2]
    if tag not in _SVG:
        return
    attributes = {key: _compact(key, value) for key, value in element.attrib.items() if key in _SVG_ATTRIBUTES}
    for entry in element.get("style", "").split(";"):
        name, _, value = (part.strip() for part in entry.partition(":"))
        if name in _SVG_STYLES:
            attributes[name] = _PAGE_COLOURS.get(value, value)
    link = element.get("{http://www.w3.org/1999/xlink}href", "").removeprefix("#")
    clip = re.fullmatch(r"url\(#([\w-]+)\)", element.get("clip-path", ""))
    own = element.get("id", "")
    marks = {"id": own, "href": link, "clip-path": clip[1] if clip else ""}
    forms = {"id": "{}", "href": "#{}", "clip-path": "url(#{})"}
    references = {name: forms[name].format(ids[value]) for name, value in marks.items() if value in ids}
    children = "".join(part for child in element for part in _svg(child, ids))
    if children:
        yield f"{_opening(tag, attributes)[:-1]}{_attributes(references)}>{children}</{tag}>"
    elif tag not in ("g", "defs"):  # empty groups show nothing
        yield f"{_opening(tag, attributes)[:-1]}{_attributes(references)}/>"


def _compact(name: str, value: str) -> str:
    """Round coordinates to a hundredth of a point to save bytes. A transform keeps its digits, as it multiplies."""
    if name == "transform":
        return value
    return re.sub(r"-?\d+\.\d{3,}", lambda digits: f"{float(digits[0]):.2f}", " ".join(value.split()))


def _opening(tag: str, attributes: dict[str, str]) -> str:
    harmless = {key: value for key, value in attributes.items() if _PLAIN_ATTRIBUTE.fullmatch(value)}
    return f"<{tag}{_attributes(harmless)}>"


def _attributes(attributes: dict[str, str]) -> str:
    return "".join(f' {key}="{escape(value)}"' for key, value in attributes.items())
