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
from stepcast.units import format_seconds

Facts = Mapping[str, Any]
MOST_ROWS = 40


def compare_page(
    found: Facts, about: About, names: tuple[str, str], timeline: Timeline | None = None
) -> Page:
    """Of the facts of a Comparison; *names* say what its sides are."""
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
        made = table(("what", "first", "second"), cells, "What both say of the run, each in another way")
        sections.append(
            Section("Not the same run", made, "A difference between two runs is no error of either.")
        )
    sections.append(timeline_section(timeline, about.links, "both runs, aligned at their start"))
    title = f"{format_seconds(found['step_s'])} beside {format_seconds(found['measured_step_s'])}"
    return Page(title, _headline(found, names), sections, about, found, warnings=found["warnings"])


def _headline(found: Facts, names: tuple[str, str]) -> Markup:
    first, second = found["step_s"], found["measured_step_s"]
    about = join((tag("strong", names[0]), tag("span", "beside"), tag("strong", names[1])))
    same = found["same_run"]
    words = ("predicted", "measured") if same else ("first", "second")
    cards = [
        card(words[0], format_seconds(first), names[0]),
        card(words[1], format_seconds(second), names[1]),
    ]
    rows = [row for row in found["parts"] if row["difference_s"]]
    if rows:
        most = max(rows, key=lambda row: abs(row["difference_s"]))
        cards.append(
            card("Differs most", PART_NAMES.get(most["name"], most["name"]), signed(most["difference_s"]))
        )
    if same and found["error"] is not None:
        mood = "good" if abs(found["error"]) <= 0.1 else "bad"
        cards.insert(0, card("Error", signed_percent(found["error"]), "of the measured step", mood))
        number, unit = signed_percent(found["error"]).split(" ")
        return answer(number, f"{unit} off: {signed(first - second)}", about, cards=cards)
    number, _, unit = signed(first - second).partition(" ")
    return answer(number, f"{unit} between two different runs", about, cards=cards)


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
