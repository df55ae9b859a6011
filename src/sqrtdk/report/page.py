"""Renders the HTML pages. Each is one file that needs no network, no web font and no library.

Everything that comes from a model or a record is untrusted text: it passes `plain` and the template's autoescape. As a
second barrier, the page's content security policy runs only the one script whose hash it names, and fetches nothing.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import jinja2
from jinja2.runtime import Context
from markupsafe import Markup, escape

from sqrtdk._language import Choice, Language
from sqrtdk._sites import ROOT_NAME
from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Message, Text, named
from sqrtdk.messages import text_of_value as text_of
from sqrtdk.report import figures
from sqrtdk.report.plain import plain
from sqrtdk.report.speaker import Speaker

HOME = "sqrtdk.report"
# "</script>" and "<!--" would end or open something in HTML; U+2028 and U+2029 break lines in older JavaScript
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(
    name: str,
    context: Mapping[str, Any],
    languages: bool = False,
    before: Sequence[str] = (),
    opens: Choice = "auto",
    asks: bool = False,
    home: str = HOME,
    styles: Sequence[str] = (),
) -> str:
    """Render a page's template with the shared style and scripts (`base.css`, `print.js`, `cut.js`) and the page's own.

    Args:
        name: name of the template, style and script, without ending.
        context: values that the template shows, and functions that only this page has. Every template also has
            `say(id)`, `said(sentence)` and `named(section, name)`, in the languages of the page, and the formats of
            numbers.
        languages: whether the page is in two languages and needs the style and script that switch between them.
        before: names of scripts that the page's own script uses.
        opens: the language that a bilingual page opens in; "auto" follows the reader's browser. The template's
            `html` element receives it as `opening`.
        asks: whether the page's script may ask the server that the page came from.
        home: package whose folder `templates` has the page's own files.
        styles: names of other pages whose style this one uses, before its own.
    """
    names = ["languages", name] if languages else [name]
    style = "".join(_asset(f"{one}.css", home) for one in ("base", *names[:-1], *styles, name))
    script = "".join(_asset(f"{one}.js", home) for one in ("print", "cut", *names[:-1], *before, name))
    if opens not in (choices := get_args(Choice)):
        raise InvalidValueError(f"language must be one of {', '.join(choices)}, not {opens!r}")
    assets = {
        "opening": Markup('lang="en"' if opens == "auto" else f'lang="{opens}" data-opens="{opens}"'),
        "style": Markup(style),
        "script": Markup(script),
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "connects": "'self'" if asks else "'none'",
        "colon": both(Message("words.mark.colon")),
        "verb": both(Message(f"pages.verb.{name}")),
        "version": importlib.metadata.version("sqrtdk"),
        "languages": both(Message("pages.languages")),
        "more_below": both(Message("pages.more_below", count="{count}")),
    }
    # a page of another package may bring a `said` of its own, as for formulas inside sentences
    return _environment(home).get_template(f"{name}.html").render({"said": both, **context, **assets})


def fragment(name: str, context: Mapping[str, Any], language: Language, home: str = HOME) -> str:
    """Render a template as the output of a notebook's cell: HTML with its own style and without a script.

    Args:
        name: Name of the template in `notebook/`, without ".html".
        context: Values that the template uses.
        language: "en" or "zh".
        home: Package that holds the template.
    """
    style = Markup(_asset("notebook/notebook.css", home))
    words = {"said": Speaker(language).said, "style": style}
    return _environment(home).get_template(f"notebook/{name}.html").render({**words, **context})


def both(text: Text | str) -> Markup:
    """Return a text in both languages, of which the page shows one. A plain `str` is the same in both.

    Example:
        >>> print(both(Text("a < b", "a < b")), both(Text("mask", "掩码")))
        a &lt; b <span class="en" lang="en">mask</span><span class="zh" lang="zh-CN">掩码</span>
    """
    text = text_of(text)
    if text.en == text.zh:
        return prose(text.en)
    return Markup('<span class="en" lang="en">{}</span><span class="zh" lang="zh-CN">{}</span>').format(
        prose(text.en), prose(text.zh)
    )


def prose(text: str) -> Markup:
    """Return a text as markup in which what stands between backticks is code.

    Example:
        >>> print(prose("`a` < `b"))
        <code>a</code> &lt; `b
    """
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(plain(text)))))


def script_json(value: Any) -> str:
    r"""Return a value as compact JSON that is safe inside a script element of HTML.

    Raises:
        ValueError: A number is NaN or infinite.

    Example:
        >>> script_json("</script>")
        '"\\u003c/script\\u003e"'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for char, escaped in _UNSAFE.items():
        text = text.replace(char, escaped)
    return text


@functools.cache
def _environment(home: str) -> jinja2.Environment:
    """Return the environment of the templates of a package; it falls back to the templates of this one."""
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(one, "templates") for one in dict.fromkeys((home, HOME))]),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,  # a misspelt name raises instead of printing nothing
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # what every template calls stands here once; a room adds only what it alone draws
    environment.globals |= {
        "root": ROOT_NAME,
        "say": _say,
        "named": _named,
        "number": figures.format_number,
        "ratio": figures.format_ratio,
        "percent": figures.format_percent,
    }
    environment.filters["prose"] = prose
    return environment


# the environment is one for all pages, so only the context knows in which languages a page speaks
@jinja2.pass_context
def _say(context: Context, id: str, /, **values: str | float) -> str:
    """Return a sentence of the catalogue in the languages of the page."""
    return cast(str, context["said"](Message(id, **values)))


@jinja2.pass_context
def _named(context: Context, section: str, name: str) -> str:
    """Return the word for a name; see `sqrtdk.messages.named`."""
    return cast(str, context["said"](named(section, name)))


def _visible(value: Any) -> Any:
    """Pass every text that a template prints through `plain`, except our own markup."""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _asset(name: str, home: str) -> str:
    own, shared = (importlib.resources.files(one).joinpath("templates").joinpath(name) for one in (home, HOME))
    return (own if own.is_file() else shared).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
