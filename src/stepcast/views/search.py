"""The views of a search, the best strategies and why the first is first, and of alternatives: several clusters,
frameworks or numbers of GPUs.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from stepcast import units
from stepcast.ir.strategy import Strategy
from stepcast.ir.types import Facts
from stepcast.views import view as ui
from stepcast.views.declared import LAYOUT, asked_pairs, build_pairs, build_view
from stepcast.views.step import PART_NAMES, step_band

# Choices that a row names where they were searched.
CHOSEN = {"dispatcher": "{}", "cp_comm": "{}", "gradients": "gradients {}", "optimizer": "{}", "offload": "offload {}"}
CHOSEN |= {"fp8_params": "fp8 parameters", "mtp_layers": "{} MTP layers", "base_weights": "{} weights"}
LARGEST_PARTS = 4
MOST_BARS = 16
# Dots beyond so many hide each other.
MOST_DOTS = 1500


def search_view(facts: Facts, simulated: Sequence[Facts] = ()) -> ui.View:
    """Return the view of a search; *simulated* are all candidates that were run: words, step_s and memory_bytes."""
    rows, counts, change, front = (facts[name] for name in ("rows", "counts", "change", "front"))
    best, is_complete = rows[0] if rows else None, counts["complete"]
    nothing = None if rows else "nothing fits" if is_complete else "nothing yet"
    # What to do where nothing fits.
    without = {**facts, "change": change or {}} if is_complete and not rows else {}
    within_error = "Ranks marked = are within our error of rank 1, on as many GPUs."

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
        ranked=_ranked(facts),
        reasons=ui.FactList("Why rank 1 wins", _reasons(facts), lead=within_error) if rows else None,
        change=slower_words,
        variant=strategy_words,
        variants=[{**each, "rank": row["rank"], "best": row} for row in rows for each in row["variants"]],
        breakdowns=_breakdowns(rows),
        trade_off=_trade_off(front, rows, simulated, facts["capacity_bytes"]) if rows else None,
        pareto=front if len(front) > 1 else None,
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


def _ranked(facts: Facts) -> ui.Table | None:
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
    uncut = [list(columns).index("strategy")]
    texts = {"caption": caption, "ids": ids, "uncut": uncut, "narrow": narrow}
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
        other = strategy_words(change) if change["other"] else None
        pairs += build_pairs("sensitivity", change, with_what=other)
    return pairs


def _breakdowns(rows: Sequence[Facts]) -> ui.Bars | None:
    shown = rows[:MOST_BARS]
    if not shown:
        return None
    bars = []
    for row in shown:
        amounts = {part: row["breakdown_s"].get(part, 0.0) for part in PART_NAMES}
        bars.append(ui.Bar(_rank(row), amounts, units.format_seconds(row["step_s"])))
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
    figures = [ui.Figure(name.replace("_", " "), f"{count:,}") for name, count in shown.items()]
    if not best:
        words = _describe_nothing(counts)
        first, _, rest = words.capitalize().partition(" ")
        return ui.View(words, ui.Headline(first, rest, ("search",)), figures, (), {})
    step_s, ranked = best[0]["step_s"], [{**row, "rank": rank} for rank, row in enumerate(best, 1)]
    columns = ui.columns("rank GPUs=gpus, strategy step=step_s memory=memory_bytes", strategy=strategy_words)
    texts = {"caption": "The best first", "ids": range(1, len(ranked) + 1)}
    table = ui.table_of("Strategies", ranked, columns, sortable=True, wide=True, **texts)
    about = (f"{best[0]['gpus']:,} GPUs", strategy_words(best[0]))
    headline = ui.Headline.of_seconds(step_s, "per step, the best found", about)
    parts = [table, _trade_off(front, ranked, (), None)]
    return ui.View(f"{units.format_seconds(step_s)} per step", headline, figures, parts, {})


# ---- alternatives: one table, and what wins under which objective -------------------------------------------

VALUES: Mapping[str, Callable[[Facts, float], str]] = {
    "step time": lambda _, value: units.format_seconds(value),
    "throughput per GPU": lambda _, value: f"{value:,.0f} tokens/s",
    "days": lambda _, value: units.format_duration(value * units.DAY),
    "cost": lambda row, value: units.format_money(value, row["currency"]),
    "energy": lambda _, value: units.format_energy(value),
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
    else:  # a single one fits, or none
        best = min(rows, key=lambda row: (row["fits"] is False, row["step_s"]))
        value, fits = units.format_seconds(best["step_s"]), best["fits"] is not False
        words = f"per step with {best['name']}: {'the only answer that fits' if fits else 'none of them fits'}"
    row = by_name[best["name"]]
    bars = [ui.Bar(row["name"], {"compute": row["step_s"]}, units.format_seconds(row["step_s"])) for row in rows]
    most_s, currency = max(row["step_s"] for row in rows), rows[0]["currency"]
    winning = []
    for winner in facts["winners"]:
        shown = VALUES[winner["objective"]](by_name[winner["name"]], winner["value"])
        certain = "" if winner["clear"] else ", within our error"
        note = f"{winner['name']}, {units.format_percent(winner['advantage'])} ahead of {winner['second']}{certain}"
        winning.append(ui.Figure(f"best {winner['objective']}", shown, note, mood=ui.Mood.GOOD))
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
        in_text=_table(rows, ui.Shown.TEXT),
        on_page=_table(rows, ui.Shown.PAGE),
        bars=ui.Bars("Step time", bars, {"compute": "step"}, most_s, shown=ui.Shown.PAGE),
        commands=ui.Commands("Reproduce a row", [row["command"] for row in rows], wide=True),
        **{
            "price_per_GPU-hour": lambda row: units.format_money(row["price"], currency),
            "break-even_price": lambda row: units.format_money(row["break_even_price"], currency),
        },
    )


def _table(rows: list[Facts], shown: ui.Shown) -> ui.Table:
    """Return all figures of each alternative; columns that no row fills are left out."""

    def fit_words(row: Facts) -> str:
        size = row["memory_bytes"]
        return "-" if size is None else f"{units.format_bytes(size)}{'' if row['fits'] else ', does not fit'}"

    columns = ui.columns(
        "alternative=name step=step_s time=days:days cost=cost:money energy=energy_mwh:mwh goodput "
        "tokens/s/GPU=tokens_per_s_per_gpu:,.0f MFU=mfu memory",
        memory=("memory_bytes", fit_words),
    )
    for head, key in OPTIONAL.items():
        if all(row[key] is None for row in rows):
            del columns[head]
    if shown is ui.Shown.PAGE:
        columns |= {"90 % interval": ("high_s", lambda row: ui.say("{low_s} to {high_s}", row)), "GPUs": "gpus,"}
    if shown is ui.Shown.PAGE or len(set(map(strategy_words, rows))) > 1:
        columns["layout"] = strategy_words
    return ui.table_of("Alternatives", rows, columns, sortable=True, wide=True, shown=shown, uncut=(0,))
