"""What to change: predictions with one choice made otherwise, or what each part could save at most."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepcast.ir.facts import ChangeFacts
from stepcast.pages.blocks import signed, signed_percent, table
from stepcast.pages.charts import Piece, Row, bars, legend
from stepcast.pages.document import Section
from stepcast.pages.markup import Child, Markup, join, tag
from stepcast.report.step import PART_NAMES, remedy_pairs
from stepcast.units import format_bytes, format_percent, format_seconds

Facts = Mapping[str, Any]
# What usually makes a part smaller.
REMEDIES = {
    "tp": "a smaller tp (with more pp, dp or sharding in its place), sequence parallelism, or overlapping it",
    "cp": "a smaller cp where the sequence allows it",
    "ep": "a smaller ep, or a dispatcher that sends a token to each node once",
    "dp": "more micro-batches to a step, overlapping reductions with the backward, or sharding less",
    "pp": "fewer stages, or a larger micro-batch for each message",
    "bubble": "more micro-batches to a step, fewer stages, or interleaving (vpp) and zero-bubble schedules",
    "optimizer": "sharding the optimizer (ZeRO-1)",
    "other": "captured graphs where an eager host is behind its GPU",
}


def remedies_section(found: Facts) -> Section | None:
    """Return the changes with which a step that does not fit would, as the text lists them."""
    if "remedies" not in found:
        return None
    if not found["remedies"]:
        ((_, why),) = remedy_pairs(found)
        return Section("How to make it fit", tag("p", why, class_="verdict"), wide=True)
    rows = [
        (
            _options(each["options"]),
            format_seconds(each["step_s"]),
            signed_percent(each["slower"]),
            format_bytes(each["memory_bytes"]),
        )
        for each in found["remedies"]
    ]
    made = table(("Change", "Step", "Slower", "Memory"), rows, "Options to add, the fastest first")
    return Section("How to make it fit", made, "Each row is a prediction that fits.", wide=True)


def _options(words: str) -> Markup:
    """Return options of a command line, each on one line with its value."""
    first, *others = words.split(" --")
    each = [first, *(f"--{other}" for other in others)]
    return tag("code", [(tag("span", option, class_="option"), " ") for option in each])


def advice_section(found: Facts, changes: Sequence[ChangeFacts]) -> Section | None:
    step_s = found["step_s"] or 1.0
    if changes:
        return Section(
            "What to change",
            _changes(found, changes),
            "Each row is a prediction of its own, with one choice made otherwise.",
        )
    parts = sorted(found["breakdown_s"].items(), key=lambda each: -each[1])
    rows: list[Child] = [
        tag(
            "li",
            tag("strong", f"up to {format_percent(seconds / step_s)}"),
            f" {PART_NAMES[part]}: {REMEDIES[part]}",
        )
        for part, seconds in parts
        if part in REMEDIES and seconds >= 0.01 * step_s
    ][:4]
    if not rows:
        rows = [
            tag(
                "li",
                "Nearly all of the step is computation: faster products, a faster GPU or less recomputation.",
            )
        ]
    return Section(
        "What to change", tag("ul", rows, class_="advice"), "What each could save at most, if it vanished."
    )


def _changes(found: Facts, changes: Sequence[ChangeFacts]) -> Markup:
    step_s = found["step_s"]
    ordered = sorted(changes, key=lambda each: (not each["fits"], each["step_s"]))
    most = max(step_s, *(each["step_s"] for each in ordered))
    rows = [
        Row(
            "as asked",
            (Piece("band", 0, step_s, format_seconds(step_s)),),
            (format_seconds(step_s), tag("small", "")),
            strong=True,
        )
    ]
    for each in ordered:
        better = each["step_s"] < step_s
        kind = "bad" if not each["fits"] else "good" if better else "hidden"
        used = "" if each["memory_bytes"] is None else format_bytes(each["memory_bytes"])
        note = f"{used}, does not fit" if not each["fits"] else used
        label = (each["change"], tag("small", note))
        gain = signed_percent(each["step_s"] / step_s - 1)
        tip = f"{each['command']}"
        rows.append(
            Row(
                label,
                (Piece(kind, 0, each["step_s"], tip),),
                (format_seconds(each["step_s"]), tag("small", gain)),
                (("capacity", step_s, "as asked"),),
            )
        )
    key = legend((("good", "faster, and fits"), ("hidden", "slower"), ("bad", "does not fit")))
    best = next((each for each in ordered if each["fits"] and each["step_s"] < step_s), None)
    told = tag(
        "p",
        f"Best of these: {best['change']}, {signed(best['step_s'] - step_s)}."
        if best
        else "None of these is faster and fits.",
        class_="verdict",
    )
    commands = [tag("li", tag("code", each["command"])) for each in ordered]
    return join(
        (
            told,
            key,
            bars(rows, most, format_seconds),
            tag("details", tag("summary", "Their commands"), tag("ol", commands)),
        )
    )
