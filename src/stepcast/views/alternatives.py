"""The view of several clusters, frameworks or numbers of GPUs: one table, and what wins under which objective."""

from collections.abc import Callable, Mapping

from stepcast.ir.facts import Facts
from stepcast.units import (
    DAY,
    format_bytes,
    format_duration,
    format_energy,
    format_money,
    format_percent,
    format_seconds,
)
from stepcast.views import view as ui
from stepcast.views.search import strategy_words

VALUES: Mapping[str, Callable[[Facts, float], str]] = {
    "step time": lambda _, value: format_seconds(value),
    "throughput per GPU": lambda _, value: f"{value:,.0f} tokens/s",
    "days": lambda _, value: format_duration(value * DAY),
    "cost": lambda row, value: format_money(value, row["currency"]),
    "energy": lambda _, value: format_energy(value),
}
# Objectives in the order in which one becomes the headline.
HEADLINES = ("cost", "days", "throughput per GPU", "step time")
# Columns that not every answer fills, and their keys.
OPTIONAL = {"time": "days", "cost": "cost", "energy": "energy_mwh", "goodput": "goodput"}


def alternatives_view(facts: Facts) -> ui.View:
    """Return the view of alternatives, the winner under the first objective that money or time gives as headline."""
    rows, winners = facts["rows"], {winner["objective"]: winner for winner in facts["winners"]}
    by_name = {row["name"]: row for row in rows}
    for objective in HEADLINES:
        if objective in winners:
            best = winners[objective]
            value = VALUES[objective](by_name[best["name"]], best["value"])
            words = f"with {best['name']}: the best {objective} of {len(rows)} alternatives"
            break
    else:
        best, value, words = {"name": rows[0]["name"]}, format_seconds(rows[0]["step_s"]), "per step"
    number, _, unit = value.partition(" ")
    row = by_name[best["name"]]
    about = (facts["model"], f"{row['gpus']:,} {row['gpu']}: {strategy_words(row)}")
    return ui.View(
        f"{best['name']}: {facts['model']}",
        ui.Headline(number, f"{unit} {words}".strip(), about),
        [
            ui.text_line("answer", f"{best['name']}: {value}, {words.partition(': ')[2]}"),
            *(_winner_figure(winner, by_name) for winner in facts["winners"]),
            *(ui.Figure(name, "no answer", why, mood=ui.Mood.BAD) for name, why in facts["failed"].items()),
        ],
        [
            _table(rows, ui.Shown.TEXT),
            _table(rows, ui.Shown.PAGE),
            _steps(rows),
            _break_even(facts),
            ui.Commands("Reproduce a row", [row["command"] for row in rows], wide=True),
        ],
        facts,
        assumptions=facts["assumptions"],
    )


def _winner_figure(winner: Facts, rows: Mapping[str, Facts]) -> ui.Figure:
    value = VALUES[winner["objective"]](rows[winner["name"]], winner["value"])
    certain = "" if winner["clear"] else ", within our error"
    note = f"{winner['name']}, {format_percent(winner['advantage'])} ahead of {winner['second']}{certain}"
    return ui.Figure(f"best {winner['objective']}", value, note, mood=ui.Mood.GOOD)


def _fit_words(row: Facts) -> str:
    if row["memory_bytes"] is None:
        return "-"
    return f"{format_bytes(row['memory_bytes'])}{'' if row['fits'] else ', does not fit'}"


def _table(rows: list[Facts], shown: ui.Shown) -> ui.Table:
    """Return all figures of each alternative; columns that no row fills are left out."""
    columns = ui.columns(
        "alternative=name step=step_s time=days:days cost energy=energy_mwh:mwh goodput "
        "tokens/s/GPU=tokens_per_s_per_gpu:,.0f MFU=mfu memory",
        cost=("cost", lambda row: "-" if row["cost"] is None else format_money(row["cost"], row["currency"])),
        memory=("memory_bytes", _fit_words),
    )
    for head, key in OPTIONAL.items():
        if all(row[key] is None for row in rows):
            del columns[head]
    if shown is ui.Shown.PAGE:
        columns["90 % interval"] = (
            "high_s",
            lambda row: f"{format_seconds(row['low_s'])} to {format_seconds(row['high_s'])}",
        )
        columns["GPUs"] = "gpus,"
    if shown is ui.Shown.PAGE or len(set(map(strategy_words, rows))) > 1:
        columns["layout"] = strategy_words
    return ui.table_of("Alternatives", rows, columns, sortable=True, wide=True, shown=shown, uncut=(0,))


def _steps(rows: list[Facts]) -> ui.Bars:
    bars = [ui.Bar(row["name"], {"compute": row["step_s"]}, format_seconds(row["step_s"])) for row in rows]
    most_s = max(row["step_s"] for row in rows)
    return ui.Bars("Step time", bars, {"compute": "step"}, most_s, shown=ui.Shown.PAGE)


def _break_even(facts: Facts) -> ui.Table | None:
    if not facts["break_even"]:
        return None
    currency = facts["rows"][0]["currency"]
    columns: dict[str, ui.Source] = {
        "alternative": "name",
        "price per GPU-hour": lambda row: format_money(row["price"], currency),
        "break-even price": lambda row: format_money(row["break_even_price"], currency),
        "against": "against",
    }
    lead = "At its break-even price an alternative costs as much as the cheapest one."
    return ui.table_of("Break-even prices", facts["break_even"], columns, lead=lead)
