"""The section of a page in which a timeline can be looked into."""

from collections.abc import Sequence

from stepcast.ir.timeline import Timeline
from stepcast.views.charts import swatch
from stepcast.views.document import Section, data_block
from stepcast.views.markup import Markup, join, tag
from stepcast.views.slices import KINDS, MOST_SLICES, packed

WORDS = {
    "compute": "forward, or computing",
    "backward": "backward",
    "weight": "weight gradient",
    "optimizer": "once per step",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "dp": "data parallel",
    "pp": "pipeline messages",
    "comm": "communication",
    "copy": "copies",
    "host": "host",
    "bubble": "waiting",
    "other": "other",
}
HELP = "Drag to move, Ctrl and wheel or + and - to zoom, arrows to move, / to search, Enter to fold a rank."


def timeline_section(
    timeline: Timeline | None, links: Sequence[tuple[str, str]] = (), what: str = ""
) -> Section | None:
    """Every span on a canvas; *what* says whose they are."""
    if timeline is None or not len(timeline):
        return None
    data = packed(timeline)
    usual = "as it was measured" if timeline.measured else "as simulated, one rank for all that do the same"
    lead = f"{data['of']:,} spans, {what or usual}."
    if data["count"] < data["of"]:
        lead += f" More than {MOST_SLICES:,}: runs of the shortest are drawn as one; --trace writes them all."
    links_shown = [tag("a", words, href=name) for words, name in links]
    tools = tag(
        "div",
        tag("label", "Search", for_="find"),
        tag(
            "input",
            type="search",
            id="find",
            placeholder="name of an operation",
            autocomplete="off",
            spellcheck="false",
        ),
        tag("output", "", id="found", for_="find", aria_live="polite"),
        tag("span", class_="space"),
        _button("zoom-in", "+", "zoom in"),
        _button("zoom-out", "−", "zoom out"),
        _button("fit", "Fit", "show all of it"),
        _button("fold", "Fold", "fold or unfold all ranks"),
        links_shown,
        class_="tools",
        role="toolbar",
        aria_label="Timeline",
    )
    canvas = tag(
        "canvas",
        id="canvas",
        tabindex="0",
        role="application",
        aria_label=f"Timeline of {data['of']:,} spans. {HELP}",
        aria_describedby="picked",
    )
    picked = tag("p", HELP, id="picked", aria_live="polite", class_="picked")
    return Section(
        "Timeline",
        join((tools, _legend(), tag("div", canvas, class_="canvas"), picked, data_block("timeline-data", data))),
        lead,
        wide=True,
    )


def _button(key: str, words: str, title: str) -> Markup:
    return tag("button", words, type="button", id=key, class_="quiet", title=title, aria_label=title)


def _legend() -> Markup:
    """Those that the timeline has no slice of are hidden by the program."""
    listed = [swatch(kind, WORDS[kind], data_kind=at) for at, kind in enumerate(KINDS)]
    return tag("ul", listed, class_="legend", id="kinds")
