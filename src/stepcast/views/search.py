"""The views of a search, the best strategies and why the first is first; of alternatives: several clusters, frameworks
or numbers of GPUs; and of a sweep: its progress, how models scale, which settings are fast, and its rows.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from stepcast import units
from stepcast.ir.strategy import Strategy
from stepcast.ir.types import Fact, Facts
from stepcast.views import view as ui
from stepcast.views.declared import LAYOUT, asked_pairs, build_figures, build_pairs, build_view
from stepcast.views.step import PART_NAMES, step_band
from stepcast.views.view import NAMES

# Choices that a row names where they were searched.
CHOSEN = NAMES["chosen"]
LARGEST_PARTS = 4
MOST_BARS = 16
# Dots beyond so many hide each other.
MOST_DOTS = 1500
Rows = Sequence[Facts]
# Colours that differ enough; more lines than these hide each other.
POINT_KINDS = ("compute", "tp", "dp", "ep", "pp", "optimizer", "cp", "host")
MOST_MAPS = 6
# Columns of results; all other columns are words of the point, shown as they are.
RESULTS = ui.columns_by_key(
    "step=step_s tokens/s/GPU=tokens_per_s_per_gpu, MFU=mfu bubble=bubble:% exposed=exposed:% memory=memory_bytes "
    "fits=fits:yes days=days:,.1f GPU-hours=gpu_hours, cost=cost:money goodput state error"
)
HIDDEN_IN_TEXT = ("position", "low_s", "high_s", "gpu_hours", "found", "currency")
# What a narrow terminal leaves out first: it follows from the rest, or matters less.
LEFT_OUT_FIRST = ("tokens_per_s_per_gpu", "price", "mfu", "days", "memory_bytes")
HIDDEN_ON_PAGE = ("bubble", "exposed", "fits", "error")


def search_view(facts: Facts, simulated: Sequence[Facts] = ()) -> ui.View:
    """Return the view of a search; *simulated* are all candidates that were run: words, step_s and memory_bytes."""
    rows, counts, change, front = (facts[name] for name in ("rows", "counts", "change", "front"))
    best, is_complete = rows[0] if rows else None, counts["complete"]
    fastest = {row["gpus"]: row for row in reversed(front)}  # of each number of GPUs: shown first
    nothing = None if rows else "nothing fits" if is_complete else "nothing yet"
    # What to do where nothing fits.
    without = {**facts, "change": change or {}} if is_complete and not rows else {}

    def slower_words(row: Facts) -> str:
        """Return how much slower a row is than the best of its layout, or than rank 1."""
        first = row.get("best", best)
        return units.format_change(row["step_s"] / first["step_s"] - 1) if row["step_s"] is not None and first else "-"

    view = build_view(
        "search",
        facts,
        found=f"{units.format_seconds(best['step_s'])} per step" if best else _describe_nothing(counts),
        nothing=None if best else _describe_nothing(counts).capitalize(),
        best=best,
        strategy=strategy_words,
        chosen=strategy_words(best) if best else None,
        band=step_band(best, best["step_s"]) if best else None,
        ended=end_words(counts),
        unseen=None if is_complete else _unseen_words(facts),
        without={**without, "found": nothing, "smallest_bytes": without.get("smallest_bytes") or None},
        least=(change["words"] if change else "none of those tried is enough") if without else None,
        changed=strategy_words(change) if change and without else None,
        ranked=_rank_table(facts),
        reasons=_reasons(facts) if rows else [],
        change=slower_words,
        variant=strategy_words,
        variants=[{**variant, "rank": row["rank"], "best": row} for row in rows for variant in row["variants"]],
        breakdowns=_breakdowns(rows),
        trade_off=_trade_off(front, rows, simulated, facts["capacity_bytes"]) if rows else None,
        pareto=sorted(front, key=lambda row: row is not fastest[row["gpus"]]) if len(front) > 1 else None,
        commands=ui.Commands("Reproduce a row", [row["command"] for row in rows], wide=True) if rows else None,
        see=ui.Commands("To see it", [change["command"]], numbered=False) if change and not rows else None,
    )
    return ui.replace(view, asked=asked_pairs(facts) if "command" in facts else ())


def strategy_words(row: Facts) -> str:
    """Return a strategy in few words: the choices that are not the default."""
    words = [f"{name} {row[name]}" for name in LAYOUT if row[name] > 1]
    if row["expert_tp"] and row["expert_tp"] != row["tp"]:
        words.append(f"expert-tp {row['expert_tp']}")
    if row["micro_batch"] > 1:
        words.append(f"micro-batch {row['micro_batch']}")
    if row["pp"] > 1:
        words.append(row["schedule"])
    if row["recompute"] != "none":
        words.append(f"recompute {row['recompute']}")
    words.append(row["sharding"] if row["sharding"] != "none" else "no sharding")
    if row["tp"] > 1 and not row["sequence_parallel"]:
        words.append("no sp")
    if "experts" in row.get("overlap", "").split(","):
        words.append("experts overlap")
    words += [shown.format(row[name]) for name, shown in CHOSEN.items() if row.get(name)]
    if row.get("stage_layers"):
        words.append(f"layers {split_words(row['stage_layers'])}")
    if row.get("place", "even") != "even":
        words.append(row["place"])
    if row.get("kinds"):
        words.append(row["kinds"])
    return ", ".join(words)


def split_words(layers: str) -> str:
    """Return ``7,8,8,7`` as ``7, 8 x 2, 7``."""
    runs = [(size, len(list(run))) for size, run in groupby(layers.split(","))]
    return ", ".join(size if many == 1 else f"{size} x {many}" for size, many in runs)


def end_words(counts: Facts) -> str:
    """Return why a search ended early; nothing if it is complete."""
    return "" if counts["complete"] else "out of time" if counts["out_of_time"] else "interrupted"


def _describe_nothing(counts: Facts) -> str:
    """Return why a search has no rows: nothing fits, or it ended before it had one."""
    return "nothing fits" if counts["complete"] else f"nothing found: {end_words(counts)}"


def _unseen_words(facts: Facts) -> str:
    """Return what a search that ended early has not seen, and how much better it may be."""
    counts, least_s = facts["counts"], facts["least_s"]
    ended = end_words(counts)
    if not counts["unseen"]:
        return f"{ended}: the best are found, and not what is near them"
    left = f"{ended}: {counts['unseen']:,} candidates left"
    if least_s is None or not facts["rows"]:
        return f"{left}, which may be better"
    gain = 1.0 - least_s / facts["rows"][0]["step_s"]
    if gain <= 0:
        return f"{left}, none of them better than the best"
    least, less = units.format_seconds(least_s), units.format_percent(gain)
    return f"{left}, none of them below {least}, {less} less than the best"


def _rank_table(facts: Facts) -> ui.Table | None:
    """Return the ranked strategies; on a narrow terminal the strategy comes last, where a line may break."""
    rows = facts["rows"]
    if not rows:
        return None
    spec = "rank GPUs=gpus, " if len(facts["gpus"]) > 1 else "rank "
    spec += "strategy step=step_s tokens/s/GPU=tokens_per_s_per_gpu, MFU=mfu memory=memory_bytes free=free_bytes"
    spec += " days=days:,.1f GPU-hours=gpu_hours," if rows[0]["days"] is not None else ""
    spec += " cost=cost:money" if rows[0]["cost"] is not None else ""
    columns = ui.columns(spec, rank=("rank", _rank), strategy=strategy_words)
    last = {name: source for name, source in columns.items() if name != "strategy"}
    last["strategy"] = columns["strategy"]
    narrow = ui.table_of("Strategies", rows, last, uncut=[len(last) - 1])
    caption, ids = "Sorted by rank; click a column header to sort", [row["rank"] for row in rows]
    texts = {"caption": caption, "ids": ids, "uncut": [list(columns).index("strategy")], "narrow": narrow}
    return ui.table_of("Strategies", rows, columns, sortable=True, wide=True, **texts)


def _rank(row: Facts) -> str:
    return f"{row['rank']}{'=' if row['equal'] else ''}"


def _reasons(facts: Facts) -> list[tuple[str, str]]:
    """Return the interval of rank 1, what limits it, and what would change it."""
    binds, second, missed = facts["binds"], facts["runner_up"], facts["missed"]
    losses = [change for change in second["parts_s"].items() if abs(change[1]) >= 1e-6] if second else []
    largest = sorted(losses, key=lambda change: -abs(change[1]))[:LARGEST_PARTS]
    equal = sum(row["equal"] for row in facts["rows"])
    pairs = build_pairs(
        "why rank 1 wins",
        facts,
        best=facts["rows"][0],
        equal=equal if equal > 1 else None,
        share_words=", ".join(f"{name} {units.format_percent(share)}" for name, share in binds["shares"].items()),
        missed={**missed, "words": strategy_words(missed)} if missed else None,
        slower_s=abs(second["slower_s"]) if second else None,
        slower="faster" if second and second["slower_s"] < 0 else "slower",
        losses=", ".join(f"{name} {ui.signed_seconds(seconds)}" for name, seconds in largest),
    )
    for change in facts["sensitivity"]:
        pairs += build_pairs("sensitivity", change, with_what=strategy_words(change) if change["other"] else None)
    return pairs


def _breakdowns(rows: Sequence[Facts]) -> ui.Bars | None:
    shown = rows[:MOST_BARS]
    if not shown:
        return None
    bars = []
    for row in shown:
        amounts = {part: row["breakdown_s"].get(part, 0.0) for part in PART_NAMES}
        bars.append(ui.stack(_rank(row), amounts, PART_NAMES, units.format_seconds(row["step_s"])))
    most_s = max(row["step_s"] for row in shown)
    lead = "The ranked strategies, part by part."
    return ui.Bars("Time breakdown by rank", bars, PART_NAMES, most_s, lead=lead, shown=ui.Shown.PAGE)


def _trade_off(
    front: Sequence[Facts], rows: Sequence[Facts], simulated: Sequence[Facts], capacity_bytes: float | None
) -> ui.Scatter:
    """Return step time against memory: all simulated, the Pareto frontier, and the ranked ones."""
    optimal = {(row["step_s"], row["memory_bytes"]) for row in front}
    others = sorted(simulated, key=lambda row: row["step_s"])[:MOST_DOTS]
    points = [(row["step_s"], row["memory_bytes"]) for row in (*others, *front, *rows)]
    steps = [step_s for step_s, _ in points]
    sizes = [size / units.GIB for _, size in points]
    high_s = min(max(steps), 6 * min(steps))
    x = ui.Axis(min(steps) * 0.97, high_s * 1.03, units.format_seconds, "time of a step")
    y = ui.Axis(0.0, max((capacity_bytes or 0.0) / units.GIB, *sizes) * 1.05, lambda size: f"{size:g}", "GiB of a GPU")
    shown = [row for row in others if row["step_s"] <= high_s]
    near = [row for row in front if row["step_s"] <= high_s]
    marks: list[ui.Dot | ui.Line] = [_dot(row, "other", 3) for row in shown]
    lead = "Lower left is better. Dots of the table light up with their rows."
    if capacity_bytes is not None:
        level = capacity_bytes / units.GIB
        marks.insert(0, ui.Line(((x.low, level), (x.high, level)), "capacity"))
        lead = "Lower left is better; the dashed line is what a GPU has. Dots of the table light up with their rows."
    if left := len(simulated) - len(shown):
        lead += f" {left:,} slower ones are not shown."
    marks.append(ui.Line(sorted((row["step_s"], row["memory_bytes"] / units.GIB) for row in near), "front"))
    marks += [_dot(row, "optimizer", 5) for row in near]
    for row in rows:
        marks.append(_dot(row, "optimizer" if (row["step_s"], row["memory_bytes"]) in optimal else "compute", 7))
    label = "Step time against memory of what was simulated"
    legend = (("compute", "ranked below"), ("optimizer", "Pareto-optimal"), ("other", "simulated"))
    on_page: Facts = {"key": "pareto", "lead": lead, "wide": True, "shown": ui.Shown.PAGE}
    return ui.Scatter("Pareto frontier: step time vs memory", x, y, marks, label, legend=legend, **on_page)


def _dot(row: Facts, kind: str, radius: float) -> ui.Dot:
    words = row.get("words") or strategy_words(row)
    tip = f"{units.format_seconds(row['step_s'])}, {units.format_bytes(row['memory_bytes'])}: {words}"
    rank = row.get("rank")
    label = "" if rank is None else f"rank {rank}: {tip}"
    return ui.Dot(row["step_s"], row["memory_bytes"] / units.GIB, kind, tip, radius, rank, label)


Candidate = tuple[Strategy, float, float]
"""A strategy, the seconds of its step, and the bytes of its fullest GPU."""


def strategies_view(counts: Facts, ranked_candidates: Sequence[Candidate], on_front: Sequence[Candidate]) -> ui.View:
    """Return the view of the strategies that a search in Python found."""
    best, front = (
        [{**strategy.facts(), "step_s": step_s, "memory_bytes": size} for strategy, step_s, size in candidates]
        for candidates in (ranked_candidates, on_front)
    )
    shown = {name: count for name, count in counts.items() if name not in ("complete", "out_of_time")}
    ranked = [{**row, "rank": rank} for rank, row in enumerate(best, 1)]
    nothing = None if ranked else _describe_nothing(counts)
    return build_view(
        "strategies",
        {},
        best=ranked[0] if ranked else None,
        chosen=strategy_words(ranked[0]) if ranked else None,
        nothing=nothing,
        nothing_found=nothing and nothing.capitalize(),
        counted=[ui.Figure(name.replace("_", " "), f"{count:,}") for name, count in shown.items()],
        ranked=ranked,
        ids=[row["rank"] for row in ranked],
        strategy=strategy_words,
        trade_off=_trade_off(front, ranked, (), None) if ranked else None,
    )


# ---- alternatives: one table, and what wins under which objective -------------------------------------------

VALUES: Mapping[str, Callable[[Facts, float], str]] = {
    "step time": lambda _, value: units.format_seconds(value),
    "throughput per GPU": lambda _, value: f"{value:,.0f} tokens/s",
    "days": lambda _, value: units.format_duration(value * units.DAY),
    "cost": lambda row, value: units.format_money(value, row["currency"]),
    "energy": lambda _, value: units.format_energy(value),
}
# Objectives in the order in which one becomes the headline.
HEADLINES = {"cost": "lowest cost", "days": "fewest days"}
HEADLINES |= {"throughput per GPU": "highest throughput per GPU", "step time": "shortest step"}


def alternatives_view(facts: Facts) -> ui.View:
    """Return the view of alternatives, the winner under the first objective that money or time gives as headline."""
    rows, winners = facts["rows"], {winner["objective"]: winner for winner in facts["winners"]}
    by_name = {row["name"]: row for row in rows}
    for objective in HEADLINES:
        if objective in winners:
            best = winners[objective]
            value = VALUES[objective](by_name[best["name"]], best["value"])
            known = sum(row.get(objective, best) is not None for row in rows)  # costs may be unknown
            words = f"with {best['name']}: the {HEADLINES[objective]} of {known} alternatives"
            break
    else:  # a single one fits, or none
        best = min(rows, key=lambda row: (row["fits"] is False, row["step_s"]))
        value, fits = units.format_seconds(best["step_s"]), best["fits"] is not False
        only = "the only answer that fits" if len(rows) > 1 else "the only answer"
        words = f"per step with {best['name']}: {only if fits else 'none of them fits'}"
    row = by_name[best["name"]]
    currency, layouts = rows[0]["currency"], set(map(strategy_words, rows))
    winning: list[ui.Figure] = []
    for winner in facts["winners"]:
        shown = VALUES[winner["objective"]](by_name[winner["name"]], winner["value"])
        certain = "" if winner["clear"] else ", within our error"
        winning += build_figures("winner", winner, winner=winner["name"], shown=shown, certain=certain, fine=True)
    return build_view(
        "alternatives",
        facts,
        best=best,
        value=value,
        words=words,
        answer=words.partition(": ")[2],
        about=(facts["model"], f"{row['gpus']:,} {row['gpu']}: {strategy_words(row)}"),
        winning=winning,
        unanswered=[ui.Figure(name, "no answer", why, mood=ui.Mood.BAD) for name, why in facts["failed"].items()],
        in_text=[{**row, "layout": True if len(layouts) > 1 else None} for row in rows],
        layout=strategy_words,
        memory=("memory_bytes", _fit_words),
        commands=ui.Commands("Reproduce a row", [row["command"] for row in rows], wide=True),
        **{
            "90_%_interval": ("high_s", lambda row: ui.say("{low_s} to {high_s}", row)),
            "price_per_GPU-hour": lambda row: units.format_money(row["price"], currency),
            "break-even_price": lambda row: units.format_money(row["break_even_price"], currency),
        },
    )


def _fit_words(row: Facts) -> str:
    size = row["memory_bytes"]
    return "-" if size is None else f"{units.format_bytes(size)}{'' if row['fits'] else ', does not fit'}"


def counts_view(facts: Facts) -> ui.View:
    """Return the view of the counts and rates of a sweep: a figure each."""
    errors = [ui.text_line(f"error of {row['points']:,}", row["error"]) for row in facts.get("common_errors", ())]
    return build_view("sweep counts", facts, count=facts.get("points", facts.get("rows", 0)), common=errors)


def rows_view(facts: Facts) -> ui.View:
    """Return the view of rows that were asked for; values that all of them share come first, once."""
    rows = facts["rows"]
    counted = f"{len(rows):,} of {facts['answered']:,} answered points"
    headline = ui.Headline(units.format_count(len(rows)), "rows", (str(facts["folder"]),))
    if not rows:
        return ui.View(counted, headline, [ui.Figure("rows", f"{counted}: no row meets the condition")], (), facts)
    names = [name for name in rows[0] if name not in HIDDEN_IN_TEXT and any(row[name] is not None for row in rows)]
    same = [name for name in names if len({row[name] for row in rows}) == 1]
    shared = [ui.Figure(head, ui.cell_of(rows[0], source).text) for head, source in map(_column, same)]
    other = [name for name in names if name not in same]
    figures = [ui.Figure("rows", counted), *shared]
    return ui.View(counted, headline, figures, [_shown_rows(rows, other) if other else None], facts)


def _shown_rows(rows: Rows, names: Sequence[str], left_out: tuple[str, ...] = ()) -> ui.Table:
    """Return the rows with these columns, and without some of them for terminals that all of them are too wide for."""
    first = next((name for name in LEFT_OUT_FIRST if name in names), None)
    narrow = first and _shown_rows(rows, [name for name in names if name != first], (*left_out, _column(first)[0]))
    note = f"left out for width: {', '.join(left_out)} (--json)" if left_out else ""
    uncut = [index for index, name in enumerate(names) if name not in RESULTS]
    return _points_table("Rows", rows, names, uncut=uncut, note=note, narrow=narrow or None)


def _points_table(title: str, rows: Rows, names: Sequence[str], **options: Fact) -> ui.Table:
    return ui.table_of(title, rows, dict(map(_column, names)), sortable=True, wide=True, **options)


def _column(name: str) -> tuple[str, ui.Source]:
    """Return the head and the source of a column."""
    if name in RESULTS:
        return RESULTS[name]
    return _names_words([name]), (name, lambda row: "-" if row.get(name) is None else str(row[name]))


def _names_words(names: Sequence[str]) -> str:
    return ", ".join(name.replace("_", "-") for name in names) or "nothing"


def sweep_view(facts: Facts) -> ui.View:
    """Return the view of all answers of a sweep, for its page."""
    rows, kinds, cost = facts["rows"], facts["kinds"], facts["least_cost"]
    view = build_view(
        "sweep",
        facts,
        best=_best_words(facts),
        varied=_names_words(facts["words"]),
        left=facts["left"] or None,
        fit="not checked" if facts["fit"] is None and rows else f"{facts['fit'] or 0:,}",
        mood=ui.Mood.BAD if facts["errors"] else ui.Mood.NEUTRAL,
        cost=None if cost is None else units.format_money(cost, facts["currency"], short=True),
        maps=_maps(facts["heat"], kinds) if facts["heat"] else None,
        trade_off=_speed_by_memory(rows, facts["words"], kinds),
        ranked=_ranked_points(rows, facts["words"]) if rows else None,
        failed=[(f"{row['points']:,} points", row["error"]) for row in facts["common_errors"]],
    )
    return ui.replace(view, parts=[*_scaling(facts["scaling"], kinds), *view.parts])


def _best_words(facts: Facts) -> str:
    """Return the best result, or why there is none."""
    if best := facts["best_tokens_per_s_per_gpu"]:
        return f"{best:,.0f} tokens per second and GPU at best"
    if facts["least_days"] is not None:
        return f"{ui.FORMS['days'](facts['least_days'])} at best"
    if facts["rows"]:
        return f"{units.format_seconds(facts['least_step_s'])} per step at best"
    if facts["out_of_time"]:
        return "Nothing found before the time was over"
    return "Nothing fits" if facts["fit"] is not None else "Nothing could be answered"


def _kind(row: Facts, kinds: Sequence[str]) -> str:
    return " on ".join(str(row[name]) for name in kinds) or "all points"


def _scaling(rows: Rows, kinds: Sequence[str]) -> list[ui.Scatter]:
    """Return tokens per second and GPU against GPUs: flat is ideal."""
    lines = [(name, list(group)) for name, group in groupby(rows, key=lambda row: _kind(row, kinds))]
    lines = sorted(lines, key=lambda line: -max(row["tokens_per_s_per_gpu"] for row in line[1]))
    charts, label = [], "Tokens per second and GPU against GPUs"
    lead = "The best that fits at each number of GPUs; flat would be ideal. Both axes are logarithmic."
    for first in range(0, len(lines), len(POINT_KINDS)):
        shown = lines[first : first + len(POINT_KINDS)]
        places = [[(row["gpus"], row["tokens_per_s_per_gpu"]) for row in group] for _, group in shown]
        counts, speeds = zip(*(place for line in places for place in line), strict=True)
        marks: list[ui.Dot | ui.Line] = []
        for kind, (name, _), line in zip(POINT_KINDS, shown, places, strict=False):
            marks.append(ui.Line(line, "ideal"))
            marks += [ui.Dot(x, y, kind, f"{name}, {x:,} GPUs: {y:,.0f} tokens/s/GPU", 5) for x, y in line]
        title = "Scaling" if not first else f"Scaling, {first // len(POINT_KINDS) + 1}"
        x = ui.Axis(min(counts) * 0.9, max(counts) * 1.1, units.format_count, "GPUs")
        y = ui.Axis(min(speeds) * 0.8, max(speeds) * 1.25, units.format_count, "tokens/s/GPU")
        legend = list(zip(POINT_KINDS, (name for name, _ in shown), strict=False))
        charts.append(ui.Scatter(title, x, y, marks, label, legend=legend, log=True, lead=lead, wide=True))
    return charts


def _maps(heat: Facts, kinds: Sequence[str]) -> ui.GridCharts:
    """Return two settings against each other, for each model and cluster."""
    across, down = heat["across"], heat["down"]
    speeds: dict[str, dict[tuple[object, object], float]] = {}
    for cell in heat["cells"]:
        speeds.setdefault(_kind(cell, kinds), {})[cell[across], cell[down]] = cell["tokens_per_s_per_gpu"]
    heads = ["-" if x is None else str(x) for x in heat["x"]]
    corner, grids = f"{_names_words([down])} \\ {_names_words([across])}", []
    for name, values in list(speeds.items())[:MOST_MAPS]:
        rows = [("-" if y is None else str(y), [values.get((x, y)) for x in heat["x"]]) for y in heat["y"]]
        grids.append(ui.ShadedGrid(name, corner, heads, rows))
    lead = f"The most tokens/s/GPU of what fits, {_names_words([across])} across and {_names_words([down])} down; "
    lead += "empty: nothing fits."
    if len(speeds) > MOST_MAPS:
        lead += f" The first {MOST_MAPS} of {len(speeds)}."
    return ui.GridCharts("Fast settings", grids, units.format_count, lead=lead, wide=True)


def _speed_by_memory(rows: Rows, words: Sequence[str], kinds: Sequence[str]) -> ui.Scatter | None:
    """Return the speed of the fastest rows against their memory."""
    rows = [row for row in rows if row["memory_bytes"] and row["tokens_per_s_per_gpu"]]
    if len(rows) < 2:
        return None
    points = [(row["memory_bytes"] / units.GIB, row["tokens_per_s_per_gpu"]) for row in rows]
    names = list(dict.fromkeys(_kind(row, kinds) for row in rows))[: len(POINT_KINDS)]
    colours = dict(zip(names, POINT_KINDS, strict=False))
    dots = []
    for row, (size, speed) in zip(rows, points, strict=True):
        settings = ", ".join(f"{_names_words([name])} {row[name]}" for name in words if row.get(name) is not None)
        tip = f"{speed:,.0f} tokens/s/GPU, {units.format_bytes(row['memory_bytes'])}: {settings}"
        dots.append(ui.Dot(size, speed, colours.get(_kind(row, kinds), "hidden"), tip, 4, row["position"]))
    frontier: list[tuple[float, float]] = []
    for size, speed in sorted(points):
        if not frontier or speed > frontier[-1][1]:
            frontier.append((size, speed))
    title, label = "Pareto frontier: speed vs memory", "Tokens per second and GPU against memory"
    x = ui.Axis(0.0, max(size for size, _ in points) * 1.05, "{:g}".format, "GiB per GPU")
    y = ui.Axis(0.0, max(speed for _, speed in points) * 1.08, units.format_count, "tokens/s/GPU")
    legend = [(kind, name) for name, kind in colours.items()]
    lead = f"The {len(rows):,} fastest that fit. Upper left is better; the line is the Pareto frontier."
    line = ui.Line(frontier, "front")
    return ui.Scatter(title, x, y, [line, *dots], label, legend=legend, key="pareto", lead=lead, wide=True)


def _ranked_points(rows: Rows, words: Sequence[str]) -> ui.Table:
    known = [name for name in RESULTS if name not in HIDDEN_ON_PAGE and any(row.get(name) is not None for row in rows)]
    fit = "that fit" if any(row["fits"] for row in rows) else "rows"
    caption = "Fastest first; click a column header to sort"
    ids = [row["position"] for row in rows]
    return _points_table(f"The fastest {fit}", rows, [*words, *known], caption=caption, ids=ids)
