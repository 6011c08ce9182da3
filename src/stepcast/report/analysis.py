"""A measured run as text: verdict, breakdown, details; and what a change does to it."""

from collections.abc import Mapping
from typing import Any

from stepcast.report.cells import Column, cells, shown
from stepcast.report.step import micro_batches
from stepcast.report.text import MORE, bottleneck, bullet, facts, parts_table, table
from stepcast.units import format_percent, format_seconds

Facts = Mapping[str, Any]
MOST_ROWS = 16
MOST_NAMED = 4
SMALLEST_SHARE = 5e-4
# Even routers differ by a few per cent from exchange to exchange.
UNEVEN_FACTOR = 1.15
PART_NAMES = {
    "compute": "forward and backward",
    "optimizer": "optimizer",
    "tp": "tensor parallel, exposed",
    "cp": "context parallel, exposed",
    "ep": "expert parallel, exposed",
    "dp": "data parallel, exposed",
    "pp": "pipeline messages, exposed",
    "embedding": "embedding gradients, exposed",
    "expert-dp": "expert gradients, exposed",
    "wait": "waiting within the stage",
    "bubble": "waiting for other stages",
    "host": "host between operations",
    "other": "other",
}


WORK = ("compute", "optimizer")


def megatron_text(found: Facts, width: int, verbose: bool = True) -> str:
    """Return the facts of a MegatronAnalysis: the verdict, the breakdown, and where *verbose* the details."""
    parts = [
        facts(_verdict(found), width),
        breakdown_text(found["breakdown_s"], found["step_s"], width),
        _stages(found, width),
        _stragglers(found, width),
        _experts(found, width),
    ]
    if verbose:
        parts += [
            _operations(found, width),
            _communication(found, width),
            _layers(found, width),
            _critical_path(found, width),
        ]
    else:
        parts.append(MORE.format("operations, communication, layers and the critical path"))
    return "\n\n".join(part for part in parts if part)


def straggler_words(found: Facts) -> str:
    """Return which ranks are slow and how much of the step they cost, in a line."""
    slow, cost_s = found["stragglers"], found.get("straggler_cost_s")
    if not slow:
        return "not known from one rank" if len(found["ranks"]) == 1 and found["gpus"] > 1 else "none"
    named = ", ".join(f"rank {one['rank']} ({one['factor']:.2f}x)" for one in slow[:MOST_NAMED])
    more = f" and {len(slow) - MOST_NAMED} more" if len(slow) > MOST_NAMED else ""
    if len(slow) == 1:
        named = f"rank {slow[0]['rank']} takes {slow[0]['factor']:.2f}x as long as its peers"
    if cost_s is None:
        return named + more
    share = format_percent(cost_s / found["step_s"]) if found["step_s"] else "-"
    return f"{named}{more}: costs {format_seconds(cost_s)}, {share} of the step"


def _uneven(found: Facts) -> list[Facts]:
    """Sets of ranks whose experts get clearly uneven numbers of tokens."""
    return [
        one
        for one in found["expert_imbalance"]
        if one["factor"] >= UNEVEN_FACTOR or one["exchange_factor"] >= UNEVEN_FACTOR
    ]


def _experts_words(found: Facts) -> list[tuple[str, object]]:
    uneven = _uneven(found)
    if not uneven:
        return []
    worst = max(uneven, key=lambda one: max(one["factor"], one["exchange_factor"]))
    waits = max(worst["waits_caused_s"].values(), default=0.0)
    waited = f"; others wait up to {format_seconds(waits)} for it" if waits else ""
    words = f"rank {worst['busiest_rank']} gets {worst['factor']:.2f}x the mean number of tokens{waited}"
    return [("expert imbalance", words)]


def _verdict(found: Facts) -> list[tuple[str, object]]:
    known = found["configuration"]
    layers = f"{known['layers']} layers, " if "layers" in known else ""
    hidden = f"hidden {known['hidden']}, " if "hidden" in known else ""
    ranks = found["ranks"]
    count = micro_batches(known["micro_batches"]) if "micro_batches" in known else "? micro-batches"
    experts = f", experts over {found['ep']}" if found["ep"] > 1 else ""
    given = f"{len(ranks)} of {found['gpus']}" if len(ranks) > 1 else f"rank {ranks[0]} of {found['gpus']}"
    return [
        ("step", format_seconds(found["step_s"])),
        *bottleneck(_named(found["breakdown_s"]), found["step_s"], [PART_NAMES[name] for name in WORK]),
        ("straggler" if len(found["stragglers"]) < 2 else "stragglers", straggler_words(found)),
        *_experts_words(found),
        ("bubble", _bubble(found)),
        ("exposed communication", format_seconds(found["exposed_comm_s"])),
        *_imbalance(found),
        ("layout", f"tp {found['tp']} x dp {found['dp']} x pp {found['pp']} = {found['gpus']} GPUs{experts}"),
        (
            "model",
            f"{layers}{hidden}sequence {known.get('seq', '?')}, "
            f"{count} of {known.get('micro_batch', '?')}, "
            f"{known.get('dtype', '?')}",
        ),
        ("ranks read", given),
    ]


def _named(parts: Facts) -> dict[str, float]:
    return {PART_NAMES.get(name, name): seconds for name, seconds in parts.items()}


def _bubble(found: Facts) -> str:
    shown = f"{format_seconds(found['bubble_s'])} ({format_percent(found['bubble_share'])})"
    alone = len(found["ranks"]) == 1 and found["gpus"] > 1
    return f"{shown} in receives, transfers included" if alone else f"{shown}, mean of ranks"


def _imbalance(found: Facts) -> list[tuple[str, object]]:
    if len(found["stages"]) < 2:
        return []
    return [("stage imbalance", f"busiest stage {format_percent(found['imbalance'])} above the mean")]


def breakdown_text(parts: Facts, step_s: float, width: int) -> str:
    large = [
        (name, seconds)
        for name, seconds in _named(parts).items()
        if step_s and seconds / step_s >= SMALLEST_SHARE
    ]
    return parts_table("time breakdown (mean over ranks)", large, step_s, format_seconds, width)


def _operations(found: Facts, width: int) -> str:
    rows = [(name, format_seconds(seconds)) for name, seconds in found["operations_s"].items()]
    rows.append(("(between operations)", format_seconds(found["gaps_s"])))
    return table(("operation", "mean of ranks"), rows, width)


def _stages(found: Facts, width: int) -> str:
    if len(found["stages"]) < 2:
        return ""
    rows = cells(found["stages"][:MOST_ROWS], "stage compute_s optimizer_s wait_s bubble_s")
    return table(("stage", "compute", "optimizer", "wait within", "bubble"), rows, width)


def _communication(found: Facts, width: int) -> str:
    rows = cells(
        found["communication"][:MOST_ROWS],
        sent_name,
        "group size_bytes count total_s transfer_s",
        lambda row: "with work" if row["overlapped"] else shown("_bytes_per_s", row["busbw_bytes_per_s"]),
        "cluster_busbw_bytes_per_s",
    )
    headers = ("communication", "group", "size", "count", "total", "transfer", "bus bandwidth", "cluster")
    if all(row[-1] == "-" for row in rows):
        return table(headers[:-1], [row[:-1] for row in rows], width) if rows else ""
    return table(headers, rows, width)


def sent_name(row: Facts) -> str:
    """What was sent within what."""
    name: str = row["name"]
    return name if name == row["operation"] else f"{row['operation']}: {name}"


def _layers(found: Facts, width: int) -> str:
    rows = cells(found["layers"][:MOST_ROWS], "stage layers forward_s backward_s")
    return table(("stage", "layers", "forward per layer", "backward per layer"), rows, width) if rows else ""


def _experts(found: Facts, width: int) -> str:
    lines = []
    for one in _uneven(found)[:MOST_ROWS]:
        ranks = ", ".join(one["tokens"])
        lines.append(
            f"rank {one['busiest_rank']} has busy experts: {one['factor']:.2f}x the mean tokens of the ranks "
            "it shares them with"
        )
        lines.append(
            bullet(
                f"ranks {ranks} work on {', '.join(map(str, one['tokens'].values()))} tokens, mean "
                f"{one['mean_tokens']:.0f}; the busiest of each exchange on {one['exchange_factor']:.2f}x "
                "its mean",
                "  - ",
                width,
            )
        )
        waits = [f"rank {rank} {format_seconds(s)}" for rank, s in one["waits_caused_s"].items() if s > 0]
        if waits:
            lines.append(bullet(f"waiting for it: {', '.join(waits[:8])}", "  - ", width))
    return "\n".join(lines)


def _stragglers(found: Facts, width: int) -> str:
    lines = []
    for one in found["stragglers"]:
        lines.append(f"rank {one['rank']} is slow: {one['factor']:.2f}x as long as others for the same work")
        lines += [bullet(text, "  - ", width) for text in one["evidence"]]
    return "\n".join(lines)


PATH_HEADS = ("at", "where", "operation", "micro-batch", "time")
PATH: tuple[Column, ...] = (
    "start_s",
    lambda one: "rank " + ", ".join(map(str, one["ranks"][:4])),
    "operation micro_batch duration_s",
)


def _critical_path(found: Facts, width: int) -> str:
    """Long stretches of the path; small ones are summed."""
    path = found["critical_path"]
    if not path:
        return ""
    long = [one for one in path if one["duration_s"] >= 0.01 * found["step_s"]]
    rows = cells(long[: 2 * MOST_ROWS], *PATH)
    rest_s = sum(one["duration_s"] for one in path) - sum(one["duration_s"] for one in long)
    rows.append(("", "", f"{len(path) - len(long)} shorter ones", "", format_seconds(rest_s)))
    if len(long) > 2 * MOST_ROWS:
        rows.append(("", "", f"and {len(long) - 2 * MOST_ROWS} more (--json)", "", ""))
    shortest = f"{format_seconds(found['critical_path_s'])} with every collective, message and optimizer"
    total = bullet(f"{shortest} at its shortest; as it ran:", "critical path: ", width)
    return total + "\n" + table(PATH_HEADS, rows, width)


def replay_text(found: Facts, width: int) -> str:
    """The facts of a Replay: as measured, replayed, and changed."""
    pairs: list[tuple[str, object]] = [
        ("measured step", format_seconds(found["measured_step_s"])),
        (
            "replayed",
            f"{format_seconds(found['replayed_step_s'])} ({found['error'] * 100:+.2f} % of the measured)",
        ),
    ]
    if not found["changes"]:
        body = breakdown_text(found["breakdown_s"], found["step_s"], width)
        return facts(pairs, width) + "\n\n" + body
    pairs += [
        ("changed", ", ".join(found["changes"])),
        *_then(found),
        (
            "layout",
            f"tp {found['tp']} x dp {found['dp']} x pp {found['pp']}, {found['micro_batches']} micro-batches",
        ),
    ]
    text = [facts(pairs, width), _before_after(found, width), _stages_before_after(found, width)]
    text += [bullet(note, "assumed: ", width) for note in found["assumptions"]]
    return "\n\n".join(part for part in text if part)


def _then(found: Facts) -> list[tuple[str, object]]:
    """The step, and where it does other work than before, how much work a second."""
    step, change = format_seconds(found["step_s"]), _signed(found["change_s"])
    layers = found["layers"]
    pairs: list[tuple[str, object]] = []
    if found["work_factor"] == 1:
        pairs.append(("then", f"{step} ({found['speedup']:.2f}x as fast, {change})"))
    else:
        sequences = f"for {found['work_factor']:.3g}x the sequences"
        pairs.append(("then", f"{step} ({found['step_factor']:.2f}x as long, {change}) {sequences}"))
        pairs.append(("throughput", _throughput(found)))
    if layers["before"] != layers["after"]:
        pairs.append(("model", f"{layers['after']} layers in place of {layers['before']}: not the same work"))
    return pairs


def _throughput(found: Facts) -> str:
    rates = found["sequences_per_s"]
    stated = ""
    if rates["before"] and rates["after"]:
        stated = f", {rates['after']:.4g} sequences/s in place of {rates['before']:.4g}"
    if found["speedup_per_gpu"] != found["speedup"]:
        stated += f"; of each GPU {found['speedup_per_gpu']:.2f}x"
    return f"{found['speedup']:.2f}x{stated}"


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + format_seconds(abs(seconds))


def _before_after(found: Facts, width: int) -> str:
    before, after = found["before"]["breakdown_s"], found["breakdown_s"]
    rows = [
        (
            PART_NAMES.get(name, name),
            format_seconds(before[name]),
            format_seconds(after[name]),
            _signed(after[name] - before[name]),
        )
        for name in after
        if max(before[name], after[name]) >= SMALLEST_SHARE * found["replayed_step_s"]
    ]
    rows.append(
        (
            "step",
            format_seconds(found["replayed_step_s"]),
            format_seconds(found["step_s"]),
            _signed(found["change_s"]),
        )
    )
    return table(("time breakdown (mean over ranks)", "before", "after", "change"), rows, width)


def _stages_before_after(found: Facts, width: int) -> str:
    before = {row["stage"]: row for row in found["before"]["stages"]}
    rows = [
        (
            row["stage"],
            *(
                format_seconds(side[key])
                for key in ("busy_s", "bubble_s")
                for side in (before[row["stage"]], row)
            ),
        )
        for row in found["stages"][:MOST_ROWS]
        if row["stage"] in before
    ]
    return table(("stage", "busy before", "after", "bubble before", "after"), rows, width)
