"""A step that does not fit: what would make it fit, and what that costs.

Each remedy is the same command with one option changed, or two where one is not enough, so that its cost is
what a user gets who types it.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepcast.cli.options import option_of

if TYPE_CHECKING:
    from stepcast.cli.forecasting import Asked

SHOWN = 2
# So many of those that fit are predicted, the ones that change least first.
MOST_PREDICTED = 8
STATES = ("none", "zero-1", "zero-2", "zero-3")

Change = Mapping[str, Any]


def remedies(args: argparse.Namespace, asked: "Asked", step_s: float) -> list[dict[str, Any]]:
    """The *SHOWN* fastest of the changes with which the step of *args* fits; *step_s* is without them."""
    single = list(_changes(args, asked))
    found = _fitting(args, single)
    if not found:
        full = {"recompute": "full"}
        pairs = [{**each, **full} for each in single if "recompute" not in each]
        states = [{**each, "sharding": STATES[-1]} for each in single if "sharding" not in each]
        states = [each for each in states if each not in pairs]  # zero-3 and full, in either order
        both = [{**each, "sharding": STATES[-1]} for each in pairs if "sharding" not in each]
        described = asked.cluster.node.host is not None
        hosts = [{"offload": "optimizer"}, {"offload": "optimizer", **full}] if described else []
        found = _fitting(args, [*pairs, *states]) or _fitting(args, both) or _fitting(args, hosts)
    rows: list[dict[str, Any]] = []
    for change, run in found[:MOST_PREDICTED]:
        prediction = run.prediction
        rows.append(
            {
                "options": _words(change, args),
                "step_s": prediction.step_s,
                "slower": prediction.step_s / step_s - 1 if step_s else 0.0,
                "memory_bytes": max(stage.total for stage in prediction.memory),
            }
        )
    return sorted(rows, key=lambda row: row["step_s"])[:SHOWN]


def _fitting(args: argparse.Namespace, changes: Sequence[Change]) -> list[tuple[Change, "Asked"]]:
    from stepcast.cli.forecasting import asked_by, tried
    from stepcast.cost.memory import memory
    from stepcast.ir.legality import is_legal

    found = []
    for change in changes:
        other = tried(args, change)
        other.dp = other.nodes = None  # the GPUs stay, replicas do not
        try:
            run = asked_by(other)
            legal = is_legal(run.model, run.strategy, run.framework)
            stages = memory(run.model, run.strategy, run.cluster.gpu, run.framework) if legal else ()
        except ValueError:
            continue
        if stages and all(stage.fits for stage in stages):
            found.append((change, run))
    return found


def _changes(args: argparse.Namespace, asked: "Asked") -> Iterator[Change]:
    """What one may turn: recomputation, sharding, the micro-batch, and how the model is split."""
    strategy, layout = asked.strategy, asked.strategy.layout
    kinds = ("none", "selective", "full")
    now = str(strategy.recompute.kind)
    for kind in kinds[kinds.index(now) + 1 :] if now in kinds else ("full",):
        yield {"recompute": kind}
    sharding = str(strategy.sharding)
    for states in STATES[STATES.index(sharding) + 1 :] if sharding in STATES and layout.dp > 1 else ():
        yield {"sharding": states}
    # The batch stays as it is, also where it was assumed.
    batch = {"global_batch": strategy.global_batch}
    size = strategy.micro_batch // 2
    while size and strategy.micro_batch % size == 0:
        yield {"micro_batch": size, **batch}
        size //= 2
    for name in ("tp", "pp"):
        ways = 2 * getattr(layout, name)
        while ways <= (asked.cluster.domain_gpus if name == "tp" else asked.model.layers):
            if layout.gpus % (ways * layout.cp * (layout.pp if name == "tp" else layout.tp)) == 0:
                yield {name: ways, **batch}
            ways *= 2
    if layout.cp == 1 and strategy.seq >= 32_768:
        yield {"cp": 2, **batch}
        yield {"cp": 4, **batch}


def _words(change: Change, args: argparse.Namespace) -> str:
    """As one types it; the batch too where it was assumed, since it would be assumed otherwise."""
    said = {name: value for name, value in change.items() if getattr(args, name) != value}
    return " ".join(f"{option_of(name)} {value}" for name, value in said.items())
