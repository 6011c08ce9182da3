"""Found strategies as text: the ranked table, why the first is first, and how to see each again."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from stepcast.ir.strategy import Strategy
from stepcast.report.asked import asked_pairs
from stepcast.report.cells import Column, cells
from stepcast.report.text import bullet, facts, table
from stepcast.units import format_bytes, format_money, format_percent, format_seconds

Facts = Mapping[str, Any]
DEGREES = ("tp", "cp", "ep", "pp", "vpp", "dp")
LARGEST_PARTS = 4
MOST_OF_FRONT = 8


def search_text(found: Facts, width: int) -> str:
    """The facts of a search, for a person."""
    asked = asked_pairs(found)
    parts = [facts(asked, width)] if "command" in found else []
    parts.append(facts(_counted(found), width))
    if found["rows"]:
        parts.append(_ranked(found, width))
        parts.append(facts(_why(found), width))
        if len(found["front"]) > 1:
            parts.append(_front(found, width))
        commands = "\n".join(f"{row['rank']:>3}  {row['command']}" for row in found["rows"])
        parts.append("reproduce a row:\n" + commands)
    elif found["change"]:
        parts.append("to see it:\n" + found["change"]["command"])
    if found["assumptions"]:
        parts.append("\n".join(bullet(note, "assumed: ", width) for note in found["assumptions"]))
    return "\n\n".join(parts)


def strategy_words(row: Facts) -> str:
    """A strategy in few words: what is not so anyway."""
    words = [f"{name} {row[name]}" for name in DEGREES if row[name] > 1]
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
    if row.get("stage_layers"):
        words.append(f"layers {split_words(row['stage_layers'])}")
    if row.get("place", "even") != "even":
        words.append(row["place"])
    if row.get("kinds"):
        words.append(row["kinds"])
    return ", ".join(words)


def row_words(strategy: Strategy) -> dict[str, Any]:
    """A strategy by its choices."""
    layout = strategy.layout
    return {
        **layout.facts(),
        "expert_tp": layout.expert_tp,
        "schedule": str(strategy.schedule),
        "micro_batch": strategy.micro_batch,
        "micro_batches": strategy.micro_batches,
        "recompute": str(strategy.recompute.kind),
        "sharding": str(strategy.sharding),
        "sequence_parallel": strategy.sequence_parallel,
        "precision": str(strategy.precision),
    }


def split_words(layers: str) -> str:
    """``7,8,8,7`` as ``7, 8 x 2, 7``."""
    runs = [(size, len(list(run))) for size, run in groupby(layers.split(","))]
    return ", ".join(size if many == 1 else f"{size} x {many}" for size, many in runs)


def _counted(found: Facts) -> list[tuple[str, object]]:
    counts = found["counts"]
    told = (
        f"{counts['considered']:,} candidates: {counts['illegal']:,} illegal, "
        f"{counts['too_large']:,} do not fit, "
        f"{counts['pruned']:,} pruned by bound, {counts['simulated']:,} simulated"
    )
    pairs: list[tuple[str, object]] = [("searched", told)]
    if not counts["complete"]:
        pairs.append(("incomplete", _left(found)))
        if not found["rows"]:
            pairs.append(("found", "nothing yet"))
    elif not found["rows"]:
        pairs.append(("found", "nothing fits"))
        if found["smallest_bytes"]:
            needed, has = format_bytes(found["smallest_bytes"]), format_bytes(found["capacity_bytes"])
            pairs.append(("smallest", f"needs {needed} of a GPU or more, of which {has} may be used"))
        change = found["change"]
        pairs.append(("least change", change["words"] if change else "none of those tried is enough"))
        if change:
            pairs.append(("which takes", f"{format_seconds(change['step_s'])} with {strategy_words(change)}"))
    return pairs


def end_words(counts: Facts) -> str:
    """Return why a search ended early; nothing if it is complete."""
    return "" if counts["complete"] else "out of time" if counts["out_of_time"] else "interrupted"


def nothing_words(counts: Facts) -> str:
    """Return why a search has no rows: nothing fits, or it ended before it had one."""
    return "nothing fits" if counts["complete"] else f"nothing found: {end_words(counts)}"


def _left(found: Facts) -> str:
    """What a search that ended early has not seen, and how much better it may be."""
    counts, least_s = found["counts"], found["least_s"]
    ended = end_words(counts)
    if not counts["unseen"]:
        return f"{ended}: the best are found, and not what is near them"
    told = f"{ended}: {counts['unseen']:,} candidates left"
    if least_s is None or not found["rows"]:
        return f"{told}, which may be better"
    gain = 1.0 - least_s / found["rows"][0]["step_s"]
    if gain <= 0:
        return f"{told}, none of them better than the best"
    return f"{told}, none of them below {format_seconds(least_s)}, {format_percent(gain)} less than the best"


def ranked_columns(rows: Sequence[Facts]) -> dict[str, Column]:
    """What is told of each strategy, by its head."""
    columns: dict[str, Column] = {
        "rank": ("rank", lambda row: f"{row['rank']}{'=' if row['equal'] else ''}"),
        "GPUs": "gpus,",
        "strategy": strategy_words,
        "step": "step_s",
        "tokens/s/GPU": "tokens_per_s_per_gpu,",
        "MFU": "mfu",
        "memory": "memory_bytes",
        "free": "free_bytes",
    }
    if rows[0]["days"] is not None:
        columns |= {"days": ("days", lambda row: f"{row['days']:,.1f}"), "GPU-hours": "gpu_hours,"}
    if rows[0]["cost"] is not None:
        columns["cost"] = ("cost", lambda row: format_money(row["cost"], row["currency"]))
    return columns


def _ranked(found: Facts, width: int) -> str:
    rows = found["rows"]
    columns = ranked_columns(rows) | {"GPUs": "gpus"}
    if len({row["gpus"] for row in rows}) == 1:
        del columns["GPUs"]
    text = _table(columns, rows, width)
    if max(map(len, text.split("\n"))) <= width:
        return text
    # Numbers stand below each other whatever a terminal does to the end of a line that is too long for it.
    last = columns.pop("strategy")
    return _table(columns | {"strategy": last}, rows, width)


def _table(columns: Mapping[str, Column], rows: Sequence[Facts], width: int) -> str:
    whole = [list(columns).index("strategy")]
    return table(list(columns), cells(rows, *columns.values()), width, whole=whole)


def _why(found: Facts) -> list[tuple[str, object]]:
    best, binds, second = found["rows"][0], found["binds"], found["runner_up"]
    low, high = format_seconds(best["low_s"]), format_seconds(best["high_s"])
    equal = sum(row["equal"] for row in found["rows"])
    pairs: list[tuple[str, object]] = [("90 % interval", f"{low} to {high}")]
    if equal > 1:
        pairs.append(("equal", f"{equal} marked = are within our error of rank 1, on as many GPUs"))
    parts = ", ".join(f"{name} {format_percent(share)}" for name, share in binds["shares"].items())
    pairs.append(("bottleneck", f"{binds['what']}; of the step: {parts}"))
    if missed := found["missed"]:
        pairs.append(
            (
                "does not fit",
                f"{strategy_words(missed)}: at best {format_seconds(missed['bound_s'])}, with "
                f"{format_bytes(missed['memory_bytes'])} or more",
            )
        )
    if second:
        losses = [each for each in second["parts_s"].items() if abs(each[1]) >= 1e-6]
        shown = sorted(losses, key=lambda each: -abs(each[1]))[:LARGEST_PARTS]
        parts = ", ".join(f"{name} {'+' if s > 0 else '-'}{format_seconds(abs(s))}" for name, s in shown)
        pairs.append((f"rank {second['rank']}", f"{slower_words(second)}: {parts or 'no part differs'}"))
    for each in found["sensitivity"]:
        with_what = f" with {strategy_words(each)}" if each["other"] else ""
        told = f"{each['speed']:.2f} times the tokens per second, {format_seconds(each['step_s'])}{with_what}"
        pairs.append((each["change"], told))
    return pairs


def slower_words(second: Facts) -> str:
    """Return how much slower, or faster, the next row of as many GPUs is."""
    seconds = second["slower_s"]
    return f"{format_seconds(abs(seconds))} {'faster' if seconds < 0 else 'slower'}"


def _front(found: Facts, width: int) -> str:
    lines = cells(found["front"][:MOST_OF_FRONT], "gpus", strategy_words, "step_s memory_bytes")
    return "Pareto frontier: step time vs memory:\n" + table(
        ["GPUs", "strategy", "step", "memory"], lines, width
    )
