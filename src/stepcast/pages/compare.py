"""The page of a comparison: two accounts of a step, aligned."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepcast.ir.timeline import Timeline
from stepcast.pages.blocks import (
    SMALLEST_SHARE,
    answer,
    card,
    paired,
    signed,
    signed_percent,
    table,
)
from stepcast.pages.document import About, Page, Section
from stepcast.pages.markup import Markup, join, tag
from stepcast.pages.timeline import timeline_section
from stepcast.report.analysis import PART_NAMES
from stepcast.report.compare import side_names
from stepcast.units import format_seconds

Facts = Mapping[str, Any]
MOST_ROWS = 40


def compare_page(
    found: Facts, about: About, names: tuple[str, str], timeline: Timeline | None = None
) -> Page:
    """Return the page of the facts of a Comparison; *names* are those of its two accounts."""
    sections: list[Section | None] = []
    if found["parts"]:
        rows = [{**row, "name": PART_NAMES.get(row["name"], row["name"])} for row in found["parts"]]
        sections.append(Section("Parts of the step", _paired(rows, found, names), "Both on one scale."))
    if found["operations"]:
        sections.append(Section("Operations", _paired(found["operations"], found, names)))
    if found["stages"]:
        rows = [
            {**row, "name": f"stage {stage['stage']}: {row['name']}"}
            for stage in found["stages"]
            for row in stage["parts"]
        ]
        sections.append(Section("Stages", _paired(rows, found, names)))
    if found["differences"]:
        cells = [(one["name"], str(one["predicted"]), str(one["measured"])) for one in found["differences"]]
        made = table(("Setting", *side_names(found)), cells, "Settings that both accounts state")
        lead = "The two are different runs, so the difference between them is no error of either."
        sections.append(Section("Settings that differ", made, lead))
    sections.append(timeline_section(timeline, about.links, "both runs, aligned at their start"))
    title = f"{format_seconds(found['step_s'])} vs {format_seconds(found['measured_step_s'])}"
    return Page(title, _headline(found, names), sections, about, found, warnings=found["warnings"])


def _headline(found: Facts, names: tuple[str, str]) -> Markup:
    first, second = found["step_s"], found["measured_step_s"]
    about = join((tag("strong", names[0]), tag("span", "vs"), tag("strong", names[1])))
    cards = [
        card(f"{name.capitalize()} step", format_seconds(seconds), account)
        for name, seconds, account in zip(side_names(found), (first, second), names, strict=True)
    ]
    rows = [row for row in found["parts"] if row["difference_s"]]
    if rows:
        most = max(rows, key=lambda row: abs(row["difference_s"]))
        part = PART_NAMES.get(most["name"], most["name"])
        cards.append(card("Largest difference", part, signed(most["difference_s"])))
    alike = len(set(found["kinds"])) == 1
    if not alike and found["error"] is not None:
        mood = "good" if abs(found["error"]) <= 0.1 else "bad"
        cards.insert(0, card("Error", signed_percent(found["error"]), "of the measured step", mood))
        number, unit = signed_percent(found["error"]).split(" ")
        return answer(number, f"{unit} off: {signed(first - second)}", about, cards=cards)
    number, _, unit = signed(first - second).partition(" ")
    share = f" ({signed_percent(first / second - 1)})" if second else ""
    what = f"{unit}{share}: first minus second" if alike else f"{unit} between two different runs"
    return answer(number, what, about, cards=cards)


def _paired(rows: Sequence[Facts], found: Facts, names: tuple[str, str]) -> Markup:
    step_s = max(found["step_s"], found["measured_step_s"])
    shown = [row for row in rows if max(row["predicted_s"], row["measured_s"]) >= SMALLEST_SHARE * step_s]
    drawn = paired(
        (
            (
                row["name"],
                row["predicted_s"],
                row["measured_s"],
                (
                    signed(row["difference_s"]),
                    tag("small", "" if row["error"] is None else signed_percent(row["error"])),
                ),
            )
            for row in shown[:MOST_ROWS]
        ),
        names,
    )
    if len(shown) <= MOST_ROWS:
        return drawn
    return join((drawn, tag("p", f"{len(shown) - MOST_ROWS} more are in the JSON.", class_="lead")))
