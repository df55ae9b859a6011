"""The page's layout and events in Gradio; the content comes from the other modules."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from markupsafe import Markup

from sqrtdk.errors import SqrtdkError, text_of
from sqrtdk.extending import Language, load_extra
from sqrtdk.messages import named, said, word
from sqrtdk_lab import CLAIMS
from sqrtdk_lab.app import claims, figures, tables
from sqrtdk_lab.app.settings import (
    CONTROL_BY_RULE,
    CONTROLS,
    ExplorerSettings,
    RefusedValueError,
    address,
    parse_settings,
    slider_words,
    texts,
)

LANGUAGE_CHOICES: tuple[Language, ...] = get_args(Language)
TAGS: Mapping[Language, str] = {"en": "en", "zh": "zh-CN"}
_TEMPLATES = str.maketrans({char: f"&#{ord(char)};" for char in "{}$`\\"})  # Gradio's templates interpret these
# The element is missing for a moment while a new drawing replaces it, hence the retries.
_KEEP_ADDRESS = """() => {
  const keep = (tries) => {
    const query = document.getElementById("address")?.dataset.query;
    if (query === undefined) {
      if (tries) setTimeout(keep, 100, tries - 1);
      return;
    }
    history.replaceState(null, "", location.pathname + (query ? "?" + query : ""));
    for (const link of document.querySelectorAll("a.language")) link.search = query;
  };
  keep(50);
}"""


def page_look(language: Language) -> dict[str, Any]:
    """Return theme, style and head of the page: system fonts, and the page's language announced to the browser."""
    themes = load_extra("gradio.themes", "app")
    font = load_extra("gradio.themes.utils.fonts", "app").Font
    sans = [font(name) for name in ("system-ui", "Noto Sans", "PingFang SC", "Microsoft YaHei", "sans-serif")]
    mono = [font(name) for name in ("ui-monospace", "Menlo", "DejaVu Sans Mono", "monospace")]
    files = importlib.resources.files("sqrtdk_lab.app").joinpath("templates")
    css = "".join(files.joinpath(name).read_text(encoding="utf-8") for name in ("shared.css", "gradio.css"))
    tag = json.dumps(TAGS[language])
    head = (
        f"<script>document.documentElement.lang = {tag};"
        f'Object.defineProperty(navigator, "language", {{ get: () => {tag} }});'
        f'Object.defineProperty(navigator, "languages", {{ get: () => [{tag}] }});</script>'
        f"<script>{files.joinpath('sliders.js').read_text(encoding='utf-8')}</script>"
    )
    theme = themes.Base(primary_hue="blue", neutral_hue="slate", font=sans, font_mono=mono)
    return {"theme": theme, "css": css, "head": head}


def build_page(language: Language) -> Any:
    """Return the page in one language as Gradio Blocks."""
    gradio = load_extra("gradio", "app")
    with gradio.Blocks(title=word("app.page.title", language), analytics_enabled=False) as blocks:
        _header(gradio, language)
        with gradio.Tabs():
            with gradio.Tab(word("app.tab.explore", language), id="explore"):
                _explore(gradio, blocks, language)
            with gradio.Tab(word("app.tab.claims", language), id="claims"):
                _claims(gradio, language)
    return blocks


def error_text(error: SqrtdkError, language: Language) -> str:
    """Return an error in the page's language; errors of the library stay English."""
    if not isinstance(error, RefusedValueError):
        return word("app.error.library", language, reason=text_of(error))
    return said(error.message, language)


def _html(markup: Markup) -> str:
    return str(markup).translate(_TEMPLATES)


def _refused(error: SqrtdkError, language: Language) -> str:
    return _html(tables.notice(f"{word('app.error.title', language)} {error_text(error, language)}"))


def _header(gradio: Any, language: Language) -> None:
    (other,) = (one for one in LANGUAGE_CHOICES if one != language)
    link = Markup('<a class="language" href="/{}/" lang="{}" hreflang="{}">{}</a>').format(
        other, TAGS[other], TAGS[other], word("app.page.language", language)
    )
    head = Markup('<header class="top"><h1>{}</h1>{}</header><p class="lead">{}</p>')
    gradio.HTML(
        _html(head.format(word("app.page.title", language), link, word("app.page.lead", language))), js_on_load=None
    )


def _choices(name: str, offered: tuple[str, ...], language: Language) -> list[tuple[str, str]]:
    """Return the entries of a dropdown as (label, value)."""
    return [(said(named(f"app.offered_{name}", value), language), value) for value in offered]


def _controls(gradio: Any, language: Language) -> dict[str, Any]:
    """Return a slider for each number, and a dropdown for each control that offers names alone."""
    made = {}
    for name, control in CONTROLS.items():
        label = word(f"app.control.{name}", language)
        shared: dict[str, Any] = {
            "visible": name != "parameter",
            "min_width": 120,
            "elem_id": f"control-{name}",
        }
        if control.low is None:
            choices = _choices(name, control.offered, language)
            made[name] = gradio.Dropdown(choices, value=control.default, label=label, interactive=True, **shared)
            continue
        made[name] = gradio.HTML(
            control.default,
            html_template='<div class="slider"></div>',
            js_on_load='sliders.mount(element.querySelector(".slider"), props, trigger, watch); // "input"',
            apply_default_css=False,
            name=name,
            title=label,
            stops=list(control.offered),
            words=slider_words(name, control, language),
            **shared,
        )
    return made


def _explore(gradio: Any, blocks: Any, language: Language) -> None:
    with gradio.Row(equal_height=False):
        with gradio.Column(scale=1, min_width=300, elem_id="controls"):
            opens = Markup("<details><summary>{}</summary></details>").format(word("app.page.controls", language))
            gradio.HTML(_html(opens), elem_id="opens-controls", js_on_load=None)
            with gradio.Column(elem_id="choices"):
                controls = _controls(gradio, language)
        with gradio.Column(scale=3, min_width=340, elem_id="results"):
            note = gradio.HTML(elem_id="note", js_on_load=None)
            message = gradio.HTML(elem_id="message", js_on_load=None)
            numbers = gradio.HTML(elem_id="numbers", js_on_load=None)
            with gradio.Row(elem_id="figures", equal_height=False):
                slots = {
                    name: gradio.HTML(elem_id=f"slot-{name}", min_width=320, js_on_load=None)
                    for name in figures.EXPLORER_FIGURES
                }
            ranges = gradio.HTML(elem_id="ranges", js_on_load=None)
    newest: dict[str, object] = {}  # each reader's latest request; an older drawing stops when it sees a newer one

    def drawn(settings: ExplorerSettings) -> Iterator[dict[Any, str]]:
        query = Markup('<span id="address" hidden data-query="{}"></span>').format(address(settings))
        yield {message: "", numbers: _html(tables.at_a_glance(settings, language) + query)}
        for name, make in figures.EXPLORER_FIGURES.items():
            yield {slots[name]: _html(figures.to_html(name, make(settings), language))}
        yield {ranges: _html(tables.range_forecast_table(settings, language))}

    def show(request: Any, *typed: object) -> Iterator[dict[Any, str]]:
        reader, mine = str(request.session_hash), object()
        newest[reader] = mine
        try:
            for part in drawn(parse_settings(dict(zip(CONTROLS, typed, strict=True)))):
                if newest.get(reader) is not mine:
                    return
                yield part
        except SqrtdkError as error:
            empty = dict.fromkeys((numbers, ranges, *slots.values()), "")
            yield {message: _refused(error, language), **empty}
        finally:
            if newest.get(reader) is mine:  # readers who left must not pile up here
                del newest[reader]

    show.__annotations__["request"] = gradio.Request  # Gradio passes the request by this annotation

    def opened(request: Any) -> dict[Any, Any]:
        try:
            typed = {name: request.query_params[name] for name in CONTROLS if name in request.query_params}
            settings, told = parse_settings(typed), ""
        except RefusedValueError as error:
            settings = parse_settings({})
            told = _html(
                tables.notice(word("app.error.address", language, said=error_text(error, language)), "doubtful")
            )
        values = texts(settings)
        updates = {controls[name]: gradio.update(value=values[name]) for name in CONTROLS if name != "parameter"}
        return {note: told, controls["parameter"]: _parameter(gradio, settings, language), **updates}

    opened.__annotations__["request"] = gradio.Request

    def adapt(rule: str) -> Any:
        return _parameter(gradio, parse_settings({"rule": rule}), language)

    outputs = [message, numbers, ranges, *slots.values()]
    drawing: dict[str, Any] = {
        "fn": show,
        "inputs": list(controls.values()),
        "outputs": outputs,
        "show_progress": "hidden",
        "trigger_mode": "multiple",  # a new choice draws at once; the older drawing ends itself, see `newest`
        "concurrency_id": "explore",
        "concurrency_limit": 4,
    }
    unlisted: dict[str, Any] = {"queue": True, "api_visibility": "private"}
    remember: dict[str, Any] = {"fn": None, "inputs": None, "outputs": None, "js": _KEEP_ADDRESS}
    start = blocks.load(opened, None, [note, *controls.values()], show_progress="hidden", **unlisted)
    start.then(**drawing, **unlisted).then(**remember)
    plain = [control.input for name, control in controls.items() if name != "rule"]
    gradio.on(plain, **drawing, **unlisted).then(**remember)
    turned = controls["rule"].input(adapt, controls["rule"], controls["parameter"], show_progress="hidden", **unlisted)
    turned.then(**drawing, **unlisted).then(**remember)


def _parameter(gradio: Any, settings: ExplorerSettings, language: Language) -> Any:
    """Return the update of the parameter's control, which is hidden if the rule has no parameter."""
    of_rule = CONTROL_BY_RULE[settings.rule]
    if of_rule is None:
        return gradio.update(visible=False, value="none")
    label = word(f"app.parameter.{settings.rule}", language)
    return gradio.update(visible=True, title=label, stops=list(of_rule.offered), value=texts(settings)["parameter"])


def _claims(gradio: Any, language: Language) -> None:
    gradio.HTML(_html(tables.lead(word("app.claim.lead", language))), js_on_load=None)
    with gradio.Row():
        first = next(iter(CLAIMS))
        chosen = gradio.Dropdown(
            claims.claim_choices(language),
            value=first,
            label=word("app.claim.choose", language),
            elem_id="claim",
            min_width=280,
            scale=3,
        )
        run = gradio.Button(
            word("app.claim.go", language), variant="primary", elem_id="claim-run", min_width=200, scale=1
        )
    shown = gradio.HTML(_html(claims.claim_html(first, language)), elem_id="claim-shown", js_on_load=None)

    def about(name: str) -> str:
        try:
            return _html(claims.claim_html(name, language))
        except SqrtdkError as error:
            return _refused(error, language)

    def measure(name: str) -> str:
        try:
            return _html(claims.record_html(claims.quick_record(name), language))
        except SqrtdkError as error:
            return _refused(error, language)

    options: Mapping[str, Any] = {"api_visibility": "private"}
    chosen.input(about, chosen, shown, show_progress="hidden", **options)
    run.click(measure, chosen, shown, concurrency_id="claims", concurrency_limit=1, **options)
