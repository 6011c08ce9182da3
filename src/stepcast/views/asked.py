"""What was asked, at the head of an answer: whoever finds the result knows what it is of."""

from collections.abc import Mapping
from typing import Any

from stepcast.units import format_short_count

Facts = Mapping[str, Any]
LAYOUT = ("tp", "cp", "ep", "pp", "vpp", "dp")
ISSUED = {
    "graphs": "as captured graphs",
    "partial-graphs": "as partial graphs",
    "eager": "issued one by one",
    "blocking": "issued one by one, each waited for",
}


def asked_pairs(found: Facts) -> list[tuple[str, object]]:
    """Model, cluster, software, layout, batch and command, as far as *found* tells them."""
    pairs: list[tuple[str, object]] = []
    strategy = found.get("strategy") or {}
    if found.get("model"):
        parameters = found.get("parameters")
        told = f": {format_short_count(parameters)} parameters" if parameters else ""
        pairs.append(("model", f"{found['model']}{told}"))
    if found.get("workload"):
        pairs.append(("workload", found["workload"]))
    if found.get("cluster"):
        pairs.append(("cluster", _cluster(found, strategy)))
    if found.get("framework"):
        how = f": {found['kernels']} kernels {ISSUED[found['execution']]}" if found.get("execution") else ""
        pairs.append(("framework", f"{found['framework']}{how}"))
    if strategy:
        pairs.append(("layout", _layout(strategy)))
    if strategy.get("seq"):
        pairs.append(("batch", f"{_batch(strategy)}, micro-batches of {strategy['micro_batch']:,}"))
    elif found.get("seq"):
        pairs.append(("batch", _batch(found)))
    if found.get("command"):
        pairs.append((f"stepcast {found['version']}", found["command"].removeprefix("stepcast ")))
    return pairs


def _cluster(found: Facts, strategy: Facts) -> str:
    if not (found.get("gpu") and strategy.get("gpus")):
        return str(found["cluster"])
    gpus, per_node = strategy["gpus"], found["gpus_per_node"]
    spread = f", {per_node} a node" if gpus > per_node else ""
    return f"{found['cluster']}: {gpus:,} {found['gpu']}{spread}"


def _layout(strategy: Facts) -> str:
    """What is split, and how states and activations are kept; ways of one go unsaid."""
    ways = [f"{name} {strategy[name]:,}" for name in LAYOUT if strategy.get(name, 1) > 1]
    kept = []
    if "sharding" in strategy:
        kept.append("no sharding (DDP)" if strategy["sharding"] == "none" else strategy["sharding"])
    if "recompute" in strategy:
        kept.append(f"recompute {strategy['recompute']}")
    return "; ".join(part for part in (", ".join(ways) or "one GPU", ", ".join(kept)) if part)


def _batch(strategy: Facts) -> str:
    sequences = strategy["global_batch"]
    told = f"{sequences:,} sequence{'' if sequences == 1 else 's'} of {strategy['seq']:,} tokens"
    return f"{told} in {strategy['precision']}" if strategy.get("precision") else told


MOST_SHOWN = 12  # keys without effect
CONFIG_LISTS = {
    "ignored": "no effect on step time or memory",
    "not_modelled": "understood but not modelled",
    "unknown": "not recognised, left out",
    "unset": "not set in the file",
}


def config_notes(facts: Facts) -> list[str]:
    """Return what became of the keys of a configuration, and the equivalent command."""
    notes = [f"{facts['file']} ({facts['format']}): {len(facts['understood'])} keys used"]
    for name, text in CONFIG_LISTS.items():
        shown, count = list(facts[name]), len(facts[name])
        if name == "ignored" and count > MOST_SHOWN:
            shown = [*shown[:MOST_SHOWN], f"and {count - MOST_SHOWN} more (--json has them)"]
        if shown:
            notes.append(f"{text} ({count}): {', '.join(shown)}")
    return [*notes, *(f"assumed: {note}" for note in facts["assumed"]), f"same as: {facts['command']}"]
