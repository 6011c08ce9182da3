"""Views of generation and of steps of RL post-training."""

from stepcast.ir.facts import Facts
from stepcast.units import format_bytes, format_count, format_seconds
from stepcast.views import view as ui

LAYOUT_WORDS = ("tp", "pp", "dp", "ep", "replicas")


def layout_words(layout: Facts) -> str:
    """Return a layout without its ones: ``tp 4, replicas 2``."""
    words = (f"{name} {layout[name]}" for name in LAYOUT_WORDS if layout.get(name, 1) > 1)
    return ", ".join(words) or "one GPU"


def generation_view(facts: Facts) -> ui.View:
    """Return the view of a forecast of serving or of a batch."""
    about = [facts["model"], f"{facts['engine']} on {facts['gpus']} x {facts['gpu']}", layout_words(facts["layout"])]
    figures = [
        ui.Figure("time to first token", format_seconds(facts["ttft_s"])),
        ui.Figure("time per output token", format_seconds(facts["tpot_s"])),
        ui.Figure(
            "throughput", f"{facts['tokens_per_s']:,.0f} tokens/s", f"{facts['tokens_per_s_per_gpu']:,.0f} per GPU"
        ),
    ]
    if facts["batch_s"] is not None:
        requests = format_count(facts["requests"])
        headline = ui.Headline.of_seconds(facts["batch_s"], f"for {requests} responses", about)
        title = f"{format_seconds(facts['batch_s'])} for {requests} responses"
        tail = f"{format_seconds(facts['tail_s'])} with less than half of the largest batch"
        figures.insert(0, ui.text_line("takes", title))
        figures += [
            ui.Figure("prefill", format_seconds(facts["prefill_s"])),
            ui.Figure("long tail", format_seconds(facts["tail_s"]), line=tail),
            ui.Figure("mean batch", f"{facts['mean_batch']:,.1f}", "sequences running on a rank"),
        ]
    else:
        headline = ui.Headline.of_seconds(facts["tpot_s"], "per output token", about)
        title = f"{format_seconds(facts['tpot_s'])} per output token at concurrency {facts['concurrency']:,}"
        figures += [
            ui.Figure("decode step", format_seconds(facts["decode_step_s"]), f"batch {facts['mean_batch']:,.0f}"),
            ui.Figure("prefill of a prompt", format_seconds(facts["prefill_s"])),
        ]
    memory = facts["memory_bytes"]
    used = memory["weights"] + memory["reserved"] + memory["cache"]
    figures += [
        ui.Figure("concurrency that fits", f"{facts['concurrency_that_fits']:,}", "sequences at their mean length"),
        ui.Figure("memory", format_bytes(used), f"of {format_bytes(memory['capacity'])}: the cache takes what is free"),
    ]
    rows = [(name.replace("_", " "), format_bytes(size)) for name, size in memory.items()]
    parts: list[ui.Part] = [ui.plain_table("Memory of a GPU", ("part", "size"), rows)]
    if facts["curve"]:
        parts.append(_curve(facts))
    asked = [("prompt", facts["prompt"]), ("response", facts["response"]), ("weights", facts["weights"])]
    return ui.View(
        title,
        headline,
        figures,
        [*parts, ui.FactList("Requests", [*asked, ("KV cache", facts["kv_cache"])])],
        facts,
        assumptions=facts["assumptions"],
    )


def _curve(facts: Facts) -> ui.Scatter:
    """Return the running sequences over time, which fall in the long tail."""
    points = [(point["time_s"], point["running"]) for point in facts["curve"]]
    return ui.Scatter(
        "Running sequences over time",
        ui.Axis(0.0, max(time for time, _ in points), format_seconds, "time"),
        ui.Axis(0.0, max(running for _, running in points) * 1.1, lambda value: f"{value:.0f}", "running"),
        [ui.Line(points, "first")],
        "Running sequences on the slowest rank",
        shown=ui.Shown.PAGE,
    )
