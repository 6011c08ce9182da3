"""Views of generation and of RL post-training: the phases of a step, and the best uses of a number of GPUs."""

import re
from collections.abc import Sequence

from stepcast.ir.facts import Facts
from stepcast.units import (
    DAY,
    format_amount,
    format_bytes,
    format_count,
    format_duration,
    format_money,
    format_percent,
    format_seconds,
)
from stepcast.views import view as ui
from stepcast.views.declared import asked_pairs
from stepcast.views.view import NAMES

LAYOUT_WORDS = ("tp", "pp", "dp", "ep", "replicas")


def layout_words(layout: Facts) -> str:
    """Return a layout without its ones: ``tp 4, replicas 2``."""
    words = (f"{name} {layout[name]}" for name in LAYOUT_WORDS if layout.get(name, 1) > 1)
    return ", ".join(words) or "one GPU"


def generation_view(facts: Facts) -> ui.View:
    """Return the view of a forecast of serving or of a batch."""
    about = [facts["model"], f"{facts['engine']} on {facts['gpus']} x {facts['gpu']}", layout_words(facts["layout"])]
    speed, prefill = f"{facts['tokens_per_s_per_gpu']:,.0f} per GPU", format_seconds(facts["prefill_s"])
    figures = [
        ui.Figure("time to first token", format_seconds(facts["ttft_s"])),
        ui.Figure("time per output token", format_seconds(facts["tpot_s"])),
        ui.Figure("throughput", f"{facts['tokens_per_s']:,.0f} tokens/s", speed),
    ]
    if facts["batch_s"] is not None:
        requests, tail = format_count(facts["requests"]), format_seconds(facts["tail_s"])
        headline = ui.Headline.of_seconds(facts["batch_s"], f"for {requests} responses", about)
        title = f"{format_seconds(facts['batch_s'])} for {requests} responses"
        figures.insert(0, ui.text_line("takes", title))
        figures.append(ui.Figure("prefill", prefill))
        figures.append(ui.Figure("long tail", tail, line=f"{tail} with less than half of the largest batch"))
        figures.append(ui.Figure("mean batch", f"{facts['mean_batch']:,.1f}", "sequences running on a rank"))
    else:
        headline = ui.Headline.of_seconds(facts["tpot_s"], "per output token", about)
        title = f"{format_seconds(facts['tpot_s'])} per output token at concurrency {facts['concurrency']:,}"
        decode, batch = format_seconds(facts["decode_step_s"]), f"batch {facts['mean_batch']:,.0f}"
        figures += [ui.Figure("decode step", decode, batch), ui.Figure("prefill of a prompt", prefill)]
    memory = facts["memory_bytes"]
    used = memory["weights"] + memory["reserved"] + memory["cache"]
    figures += [
        ui.Figure("concurrency that fits", f"{facts['concurrency_that_fits']:,}", "sequences at their mean length"),
        ui.Figure("memory", format_bytes(used), f"of {format_bytes(memory['capacity'])}: the cache takes what is free"),
    ]
    rows = [(name.replace("_", " "), format_bytes(size)) for name, size in memory.items()]
    texts = [(name, facts[name]) for name in ("prompt", "response", "weights")]
    parts = [
        ui.plain_table("Memory of a GPU", ("part", "size"), rows),
        _curve(facts) if facts["curve"] else None,
        ui.FactList("Requests", [*texts, ("KV cache", facts["kv_cache"])]),
    ]
    return ui.View(title, headline, figures, parts, facts, asked=asked_pairs(facts))


def _curve(facts: Facts) -> ui.Scatter:
    """Return the running sequences over time, which fall in the long tail."""
    points = [(point["time_s"], point["running"]) for point in facts["curve"]]
    x = ui.Axis(0.0, max(time for time, _ in points), format_seconds, "time")
    y = ui.Axis(0.0, max(running for _, running in points) * 1.1, lambda value: f"{value:.0f}", "running")
    title, label = "Running sequences over time", "Running sequences on the slowest rank"
    return ui.Scatter(title, x, y, [ui.Line(points, "first")], label, shown=ui.Shown.PAGE)


COLOURS = NAMES["rl_colours"]


def rl_view(facts: Facts) -> ui.View:
    """Return the view of a step of RL post-training."""
    pools = f"{facts['train_gpus']} train, {facts['rollout_gpus']} generate"
    where = f"{facts['gpus']} x {facts['gpu']}" + ("" if facts["mode"] == "colocated" else f" ({pools})")
    about = [facts["model"], f"{facts['mode']} on {where}", facts["software"]]
    shares = {name if name != "all" else "": format_percent(share) for name, share in facts["idle_share"].items()}
    idle = ", ".join(f"{name} {share}".strip() for name, share in shares.items())
    parts_of_memory = (facts["memory_bytes"][name] for name in ("training", "rollout", "capacity"))
    used, rollout, capacity = map(format_bytes, parts_of_memory)
    others = f"in training, {rollout} in generation, of {capacity}"
    below = "of the rollout below half of its largest batch"
    tail = [ui.Figure("long tail", format_seconds(facts["tail_s"]), below)] if facts["tail_s"] > 0 else []
    figures = [
        ui.text_line("step", format_seconds(facts["step_s"])),
        ui.Figure("bottleneck", facts["bottleneck"]),
        ui.Figure("GPUs idle", idle, "of the step", line=f"{idle} of the step"),
        ui.Figure("throughput", f"{facts['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU"),
        *tail,
        ui.Figure("memory", used, others, line=f"{used} {others}", mood=ui.Mood.GOOD if facts["fits"] else ui.Mood.BAD),
    ]
    layout = facts["training_layout"]
    if run := facts["run"]:
        money = "" if run["cost"] is None else f", {format_money(run['cost'], run['currency'])}"
        words = f"{format_duration(run['days'] * DAY)}, {format_amount(run['gpu_hours'])} GPU-hours{money}"
        figures.append(ui.Figure("run", f"{run['steps']:,} steps", words))
    phases = [ui.Share(COLOURS[name], name, seconds) for name, seconds in facts["phases_s"].items() if seconds > 0]
    total = sum(share.amount for share in phases)
    overlap = " Both pools work at once, so the step is shorter than their sum." if facts["mode"] == "async" else ""
    setting = [
        ("responses", f"{facts['responses']:,}, {facts['mean_length']:,.0f} tokens with prompt on average"),
        ("response length", facts["response"]),
        ("rollout layout", layout_words(facts["rollout_layout"])),
        ("training layout", ", ".join(f"{name} {value}" for name, value in layout.items() if value != "1")),
    ]
    parts: list[ui.Part] = [
        ui.Breakdown("Phases", phases, total, whole="all phases", lead=f"Seconds of each phase.{overlap}"),
        ui.FactList("Setting", setting),
    ]
    if facts["sensitivity_s"]:
        rows = [(name, format_seconds(seconds)) for name, seconds in facts["sensitivity_s"].items()]
        lead = "The spread of response lengths is assumed: the same mean with other standard deviations."
        parts.append(ui.plain_table("If lengths vary more or less", ("spread", "step"), rows, lead=lead))
    if config := facts["config"]:
        unread, more = config["unread"], " ..." if config["unread"][8:] else ""
        rows = [(f"{len(unread)} of its keys", f"without effect here: {', '.join(unread[:8])}{more}")]
        parts.append(ui.plain_table(f"Configuration of {config['tool']}", ("keys", "use"), rows))
    title, headline = _rl_title(facts, about)
    return ui.View(title, headline, figures, parts, facts, asked=asked_pairs(facts))


def _rl_title(step: Facts, about: Sequence[str]) -> tuple[str, ui.Headline]:
    headline = ui.Headline.of_seconds(step["step_s"], "per step", about)
    return f"{format_seconds(step['step_s'])} per RL step", headline


def _shorten(layout: str) -> str:
    """Return a layout as ``dp12 tp2 pp4 ep8``, short enough for two in a line of 100 characters."""
    return re.sub(r" (?=\d)", "", layout).replace(",", "")


def rl_search_view(facts: Facts) -> ui.View:
    """Return the view of a search for the best use of GPUs."""
    rows, best = facts["rows"], facts["rows"][0]
    columns = ui.columns(
        "mode stale=staleness train=train_gpus generate=rollout_gpus step=step_s training rollout bottleneck "
        "idle=idle_share"
    )
    columns["training"] = ("training", lambda row: _shorten(row["training"]))
    columns["rollout"] = ("rollout", lambda row: _shorten(row["rollout"]))
    cost = "cost_per_million_tokens"
    if best[cost] is not None:
        columns["per 1M tokens"] = (cost, lambda row: format_money(row[cost], facts["currency"]))
    table = ui.table_of("Best uses of the GPUs", rows, columns, sortable=True, wide=True, most_lines=10)
    why = f"{best['bottleneck']} decides; GPUs idle {format_percent(best['idle_share'])} of the step"
    figures = [
        ui.text_line("best", f"{format_seconds(best['step_s'])}: {best['options']}"),
        ui.Figure("why", best["mode"], why),
        ui.Figure("candidates", f"{facts['considered']:,}", f"{facts['too_large']:,} do not fit"),
    ]
    title, headline = _rl_title(best, [facts["model"], f"{facts['gpus']} x {facts['gpu']}"])
    return ui.View(title, headline, figures, [table], facts, asked=asked_pairs(facts))
