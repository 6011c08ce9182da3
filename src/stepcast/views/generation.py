"""Views of generation and of RL post-training: the phases of a step, and the best uses of a number of GPUs."""

import re

from stepcast.ir.types import Facts
from stepcast.units import format_money, format_percent, format_seconds
from stepcast.views import view as ui
from stepcast.views.declared import build_view
from stepcast.views.view import NAMES


def layout_words(layout: Facts) -> str:
    """Return a layout without its ones: ``tp 4, replicas 2``."""
    words = (f"{name} {layout[name]}" for name in ("tp", "pp", "dp", "ep", "replicas") if layout.get(name, 1) > 1)
    return ", ".join(words) or "one GPU"


def generation_view(facts: Facts) -> ui.View:
    """Return the view of a forecast of serving or of a batch."""
    memory = facts["memory_bytes"]
    chart = None
    points = [(point["time_s"], point["running"]) for point in facts["curve"]]  # falls in the long tail
    if len(points) > 1:
        x = ui.Axis(0.0, max(time for time, _ in points), format_seconds, "time")
        y = ui.Axis(0.0, max(running for _, running in points) * 1.1, lambda value: f"{value:.0f}", "running")
        title, label = "Running sequences over time", "Running sequences on the slowest rank"
        chart = ui.Scatter(title, x, y, [ui.Line(points, "first")], label, shown=ui.Shown.PAGE)
    return build_view(
        "generation",
        facts,
        layout=layout_words(facts["layout"]),
        serves=facts["batch_s"] is None,
        used_bytes=memory["weights"] + memory["reserved"] + memory["cache"],
        parts=[{"part": name.replace("_", " "), "size": size} for name, size in memory.items()],
        chart=chart,
    )


def rl_view(facts: Facts) -> ui.View:
    """Return the view of a step of RL post-training."""
    shares = {name if name != "all" else "": format_percent(share) for name, share in facts["idle_share"].items()}
    times_s = {name: seconds for name, seconds in facts["phases_s"].items() if seconds > 0}
    phases = [ui.Share(NAMES["rl_colours"][name], name, seconds) for name, seconds in times_s.items()]
    total = sum(share.amount for share in phases)
    title, overlap = "Phases", ""
    if facts["mode"] == "async":
        title, overlap = "Phases (pools overlap)", " Both pools work at once, so the step is shorter than their sum."
    config_keys = []
    if facts["config"]:
        unread, more = facts["config"]["unread"], " ..." if facts["config"]["unread"][8:] else ""
        use = f"without effect here: {', '.join(unread[:8])}{more}"
        config_keys = [{"keys": f"{len(unread)} of its keys", "use": use}]
    return build_view(
        "rl",
        facts,
        has_pools=facts["mode"] != "colocated",
        too_large=not facts["fits"],
        idle=", ".join(f"{name} {share}".strip() for name, share in shares.items()),
        has_tail=facts["tail_s"] > 0,
        phases=ui.breakdown(title, phases, total, whole="all phases", lead=f"Seconds of each phase.{overlap}"),
        rollout=layout_words(facts["rollout_layout"]),
        training=", ".join(f"{name} {degree}" for name, degree in facts["training_layout"].items() if degree != "1"),
        spreads=[{"spread": name, "step_s": seconds} for name, seconds in facts["sensitivity_s"].items()],
        config_keys=config_keys,
    )


def _shorten(layout: str) -> str:
    """Return a layout as ``dp12 tp2 pp4 ep8``, short enough for two in a line of 100 characters."""
    return re.sub(r" (?=\d)", "", layout).replace(",", "")


def rl_search_view(facts: Facts) -> ui.View:
    """Return the view of a search for the best use of GPUs."""
    cost, best = "cost_per_million_tokens", facts["rows"][0]
    first = {row["mode"]: row for row in reversed(facts["rows"])}
    return build_view(
        "rl search",
        facts,
        best=best,
        others=[row for mode, row in first.items() if mode != best["mode"]],
        training=("training", lambda row: _shorten(row["training"])),
        rollout=("rollout", lambda row: _shorten(row["rollout"])),
        per_1M_tokens=(cost, lambda row: format_money(row[cost], facts["currency"])),
    )
