"""The question at the head of an answer, so that a saved result explains itself; words that views share."""

from stepcast.ir.facts import Facts
from stepcast.units import format_short_count
from stepcast.views.view import load_names

LAYOUT = ("tp", "cp", "ep", "pp", "vpp", "dp")
ISSUED = load_names("execution")


def asked_pairs(facts: Facts) -> list[tuple[str, object]]:
    """Return model, cluster, software, layout, batch and command, as far as the facts have them."""
    pairs: list[tuple[str, object]] = []
    strategy = facts.get("strategy") or {}
    if facts.get("model"):
        parameters = facts.get("parameters")
        words = f": {format_short_count(parameters)} parameters" if parameters else ""
        pairs.append(("model", f"{facts['model']}{words}"))
    if facts.get("workload"):
        pairs.append(("workload", facts["workload"]))
    if facts.get("cluster"):
        pairs.append(("cluster", _cluster(facts, strategy)))
    if facts.get("framework"):
        how = f": {facts['kernels']} kernels, {ISSUED[facts['execution']]}" if facts.get("execution") else ""
        pairs.append(("framework", f"{facts['framework']}{how}"))
    if strategy:
        pairs.append(("layout", _layout(strategy)))
    if strategy.get("seq"):
        pairs.append(("batch", f"{_batch(strategy)}, micro-batches of {strategy['micro_batch']:,}"))
    elif facts.get("seq"):
        pairs.append(("batch", _batch(facts)))
    if facts.get("command"):
        pairs.append((f"stepcast {facts['version']}", facts["command"].removeprefix("stepcast ")))
    return pairs


def _cluster(facts: Facts, strategy: Facts) -> str:
    if isinstance(searched := facts.get("gpus"), list):
        return f"{facts['cluster']}: {', '.join(f'{gpus:,}' for gpus in searched)} GPUs"
    if not (facts.get("gpu") and strategy.get("gpus")):
        return str(facts["cluster"])
    gpus, per_node = strategy["gpus"], facts["gpus_per_node"]
    spread = f", {per_node} a node" if gpus > per_node else ""
    return f"{facts['cluster']}: {gpus:,} {facts['gpu']}{spread}"


def _layout(strategy: Facts) -> str:
    """Return the degrees above one, then how states are sharded and activations recomputed."""
    ways = [f"{name} {strategy[name]:,}" for name in LAYOUT if strategy.get(name, 1) > 1]
    kept = []
    if "sharding" in strategy:
        kept.append("no sharding (DDP)" if strategy["sharding"] == "none" else strategy["sharding"])
    if "recompute" in strategy:
        kept.append(f"recompute {strategy['recompute']}")
    return "; ".join(part for part in (", ".join(ways) or "one GPU", ", ".join(kept)) if part)


def _batch(strategy: Facts) -> str:
    sequences = strategy["global_batch"]
    words = f"{sequences:,} sequence{'' if sequences == 1 else 's'} of {strategy['seq']:,} tokens"
    return f"{words} in {strategy['precision']}" if strategy.get("precision") else words


MOST_SHOWN = 12  # keys without effect
CONFIG_LISTS = load_names("config_keys")


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


def plain_pairs(facts: Facts) -> list[tuple[str, str]]:
    """Return what is neither a table nor a list, by its name in words."""
    return [
        (name.replace("_", " "), f"{value:,}" if type(value) is int else str(value))
        for name, value in facts.items()
        if not isinstance(value, dict | list)
    ]


def micro_batches_words(count: int) -> str:
    """Return a number of micro-batches in words."""
    return "1 micro-batch" if count == 1 else f"{count:,} micro-batches"
