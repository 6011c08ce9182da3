"""The page of the app itself, with forms on the left and the answer on the right."""

from functools import cache

from stepcast.serve.fields import COMPARE, PLAN, PREDICT, SEARCH, Field
from stepcast.version import __version__
from stepcast.views.glossary import explain
from stepcast.views.markup import Child, Markup, fill_template, join, tag
from stepcast.views.view import load_names

VIEWS = (
    *(("predict", "Predict"), ("search", "Search"), ("plan", "Plan"), ("alternatives", "Compare")),
    *(("analyze", "Analyze"), ("saved", "Saved")),
)
MOST_POWER = 14
HINTS = load_names("app_hints")


@cache
def shell(template: str) -> str:
    """Return the page without an answer, from the *template* in the assets."""
    panels = (
        _panel("predict", _form("predict", PREDICT)),
        _panel("search", _form("search", SEARCH), _search_tools()),
        _panel("plan", _form("plan", PLAN)),
        _panel("alternatives", _form("alternatives", COMPARE)),
        _panel("analyze", _drop()),
        _panel(
            "saved",
            tag("ul", id="saved-list", class_="saved"),
            tag("button", "Compare", type="button", id="compare", class_="quiet", disabled=True),
        ),
    )
    tabs = [tag("button", words, type="button", class_="tab", data_view=key, aria_pressed="false")
            for key, words in VIEWS]  # fmt: skip
    page = fill_template(template, tabs=join(tabs), panels=join(panels), version=__version__)
    return f"<!doctype html>\n{page}\n"


def _panel(key: str, *inside: Child) -> Markup:
    title = dict(VIEWS)[key]
    return tag(
        "section",
        tag("h2", title),
        tag("p", HINTS[key], class_="lead"),
        inside,
        class_="panel",
        id=f"panel-{key}",
        hidden=True,
        aria_label=title,
    )


def _form(verb: str, fields: tuple[Field, ...]) -> Markup:
    return tag("form", [_field(verb, field) for field in fields], id=f"form-{verb}", autocomplete="off")


def _field(verb: str, field: Field) -> Markup:
    key = f"{verb}-{field.name}"
    label = tag("label", explain(field.label), tag("small", field.note) if field.note else None, for_=key)
    if field.long:
        choices = tag("datalist", [tag("option", value=each) for each in field.choices], id=f"{key}-list")
        known = {"value": field.initial, "list": f"{key}-list", "placeholder": "type to search"}
        entry = tag("input", id=key, name=field.name, **known)
        return tag("div", label, entry, choices, class_="field")
    if field.choices:
        options = [] if field.initial else [tag("option", field.unset, value="")]
        options += [tag("option", each, value=each, selected=each == field.initial) for each in field.choices]
        return tag("div", label, tag("select", options, id=key, name=field.name), class_="field")
    low, high = field.limits
    number = tag(
        "input",
        type="number",
        id=key,
        name=field.name,
        data_plain=field.default or None,
        min=low,
        max=high,
        value=field.initial,
        placeholder=field.unset,
        step="any" if field.decimals else None,
        inputmode="decimal" if field.decimals else "numeric",
    )
    slider = None
    if field.powers:
        power = (int(field.initial) if field.initial else 1).bit_length() - 1
        slider = tag(
            "input",
            type="range",
            min=0,
            max=MOST_POWER,
            value=power,
            data_for=key,
            aria_label=f"{field.label}, by powers of two",
        )
    return tag("div", label, tag("div", slider, number, class_="number"), class_="field")


def _search_tools() -> Markup:
    return tag(
        "div",
        tag("button", "Search", type="button", id="search-go", class_="quiet strong"),
        tag("button", "Stop", type="button", id="search-stop", class_="quiet", disabled=True),
        tag("progress", id="search-bar", hidden=True, aria_label="Search"),
        tag("p", "", id="search-told", aria_live="polite", class_="lead"),
        class_="go",
    )


def _drop() -> Markup:
    cluster = next(field for field in PREDICT if field.name == "cluster")
    choices = cluster.choices
    options = [tag("option", "not stated", value=""), *(tag("option", each, value=each) for each in choices)]
    return tag(
        "div",
        tag(
            "div",
            tag("label", "Cluster it ran on", for_="analyze-cluster"),
            tag("select", options, id="analyze-cluster"),
            class_="field",
        ),
        tag(
            "label",
            tag("strong", "Drop files here"),
            tag("span", "or choose them"),
            tag("input", type="file", id="files", multiple=True),
            class_="drop",
            id="drop",
        ),
        tag("p", "", id="analyze-told", aria_live="polite", class_="lead"),
        tag("button", "Stop", type="button", id="analyze-stop", class_="quiet", disabled=True),
    )
