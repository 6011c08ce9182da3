"""Views of generation and of RL post-training: the phases of a step, and the best uses of a number of GPUs."""

import re

from stepcast.ir.types import Facts
from stepcast.units import format_bytes, format_money, format_percent, format_seconds
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
    rows = [(name.replace("_", " "), format_bytes(size)) for name, size in memory.items()]
    texts = [(name, facts[name]) for name in ("prompt", "response", "weights")]
    chart = None
    if points := [(point["time_s"], point["running"]) for point in facts["curve"]]:  # falls in the long tail
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
        parts=ui.plain_table("Memory of a GPU", ("part", "size"), rows),
        chart=chart,
        texts=ui.FactList("Requests", [*texts, ("KV cache", facts["kv_cache"])]),
    )


def rl_view(facts: Facts) -> ui.View:
    """Return the view of a step of RL post-training."""
    shares = {name if name != "all" else "": format_percent(share) for name, share in facts["idle_share"].items()}
    times_s = {name: seconds for name, seconds in facts["phases_s"].items() if seconds > 0}
    phases = [ui.Share(NAMES["rl_colours"][name], name, seconds) for name, seconds in times_s.items()]
    total = sum(share.amount for share in phases)
    overlap = " Both pools work at once, so the step is shorter than their sum." if facts["mode"] == "async" else ""
    trained = facts["training_layout"].items()
    setting = [
        ("responses", f"{facts['responses']:,}, {facts['mean_length']:,.0f} tokens with prompt on average"),
        ("response length", facts["response"]),
        ("rollout layout", layout_words(facts["rollout_layout"])),
        ("training layout", ", ".join(f"{name} {degree}" for name, degree in trained if degree != "1")),
    ]
    spreads = config = None
    if facts["sensitivity_s"]:
        rows = [(name, format_seconds(seconds)) for name, seconds in facts["sensitivity_s"].items()]
        lead = "The spread of response lengths is assumed: the same mean with other standard deviations."
        spreads = ui.plain_table("If lengths vary more or less", ("spread", "step"), rows, lead=lead)
    if facts["config"]:
        unread, more = facts["config"]["unread"], " ..." if facts["config"]["unread"][8:] else ""
        rows = [(f"{len(unread)} of its keys", f"without effect here: {', '.join(unread[:8])}{more}")]
        config = ui.plain_table(f"Configuration of {facts['config']['tool']}", ("keys", "use"), rows)
    return build_view(
        "rl",
        facts,
        has_pools=facts["mode"] != "colocated",
        idle=", ".join(f"{name} {share}".strip() for name, share in shares.items()),
        has_tail=facts["tail_s"] > 0,
        phases=ui.breakdown("Phases", phases, total, whole="all phases", lead=f"Seconds of each phase.{overlap}"),
        setting=ui.FactList("Setting", setting),
        spreads=spreads,
        config_keys=config,
    )


def _shorten(layout: str) -> str:
    """Return a layout as ``dp12 tp2 pp4 ep8``, short enough for two in a line of 100 characters."""
    return re.sub(r" (?=\d)", "", layout).replace(",", "")


def rl_search_view(facts: Facts) -> ui.View:
    """Return the view of a search for the best use of GPUs."""
    cost = "cost_per_million_tokens"
    return build_view(
        "rl search",
        facts,
        best=facts["rows"][0],
        training=("training", lambda row: _shorten(row["training"])),
        rollout=("rollout", lambda row: _shorten(row["rollout"])),
        per_1M_tokens=(cost, lambda row: format_money(row[cost], facts["currency"])),
    )
