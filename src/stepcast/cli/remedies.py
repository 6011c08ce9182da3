"""Changes that make a step fit into memory, and what each of them costs.

Every remedy is the same command with one, two or, where no two suffice, three options changed, so that its
cost is what a user gets who types it. The GPUs and the global batch stay, and nothing is offered that the
framework's software does not have.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from stepcast.cli.options import option_of

if TYPE_CHECKING:
    from stepcast.cost.memory import Verdict
    from stepcast.questions.settle import SettledRun

SHOWN = 2
# So many combinations that fit are predicted, in the order of COSTS.
MOST_PREDICTED = 6
STATES = ("none", "zero-1", "zero-2", "zero-3", "fsdp")
RECOMPUTES = ("none", "selective", "full")
LONG_SEQUENCE = 32_768  # tokens from which context parallelism is offered
# A rough order of what one step along an axis costs, to predict the promising combinations first.
COSTS = {"sharding": 1, "micro_batch": 2, "recompute": 4, "cp": 5, "tp": 6, "pp": 7, "offload": 12}

Change = Mapping[str, Any]
Levels = dict[str, int]  # axis -> how far along it, from 1


def remedies(asked: "SettledRun", step_s: float) -> list[dict[str, Any]]:
    """Return the *SHOWN* fastest changes with which the run fits; *step_s* is without them."""
    rows: list[dict[str, Any]] = []
    for change, run, verdict in _Remedies(asked).fitting()[:MOST_PREDICTED]:
        prediction = run.prediction
        rows.append(
            {
                "options": _words(change, asked),
                "step_s": prediction.step_s,
                "slower": prediction.step_s / step_s - 1 if step_s else 0.0,
                "memory_bytes": max(stage.total for stage in prediction.memory),
                "verdict": str(verdict),
            }
        )
    return sorted(rows, key=lambda row: row["step_s"])[:SHOWN]


class _Remedies:
    """Combinations of changes along axes, each axis ordered from the mildest change to the strongest."""

    def __init__(self, asked: "SettledRun") -> None:
        self.asked = asked
        self.axes = {name: values for name, values in _axes(asked).items() if values}
        self.known: dict[tuple[tuple[str, int], ...], tuple[SettledRun, Verdict] | None] = {}

    def fitting(self) -> list[tuple[Change, "SettledRun", "Verdict"]]:
        """Return the mildest combinations that fit, the cheapest first. Offloading, and combinations that are
        tight, come into it only where nothing else fits.
        """
        from stepcast.cost.memory import Verdict

        plain = [name for name in self.axes if name != "offload"]
        for axes, accepted in (
            (plain, (Verdict.FITS,)),
            (list(self.axes), (Verdict.FITS,)),
            (list(self.axes), (Verdict.TIGHT,)),
        ):
            found: list[Levels] = []
            for many in (1, 2, 3):
                if many == 3 and found:
                    break
                found += self._mildest(axes, many, accepted, found)
            if found:
                found.sort(key=_cost)
                answers = [(each, self._answer(each)) for each in found]
                return [(self._change(each), *answer) for each, answer in answers if answer is not None]
        return []

    def _mildest(
        self, axes: Sequence[str], many: int, accepted: "Sequence[Verdict]", found: Sequence[Levels]
    ) -> list[Levels]:
        """Combinations of *many* axes that fit and are stronger than none of those *found*."""
        from stepcast.cost.memory import Verdict

        mildest: list[Levels] = []
        for names in combinations(axes, many):
            strongest = {name: len(self.axes[name]) for name in names}
            # Sharding parameters in a pipeline may need more memory than sharding gradients.
            answer = None if "sharding" in names else self._answer(strongest)
            if answer is not None and answer[1] is Verdict.DOES_NOT_FIT:
                continue  # so the others of these axes do not fit either
            ranges = [range(1, strongest[name] + 1) for name in names]
            for levels in sorted(product(*ranges), key=sum):
                each = dict(zip(names, levels, strict=True))
                if any(_is_milder(other, each) for other in (*found, *mildest)):
                    continue
                answer = self._answer(each)
                if answer is not None and answer[1] in accepted:
                    mildest.append(each)
        return mildest

    def _answer(self, levels: Levels) -> "tuple[SettledRun, Verdict] | None":
        """The run so changed and its verdict; None where it cannot run."""
        key = tuple(sorted(levels.items()))
        if key not in self.known:
            self.known[key] = self._tried(self._change(levels))
        return self.known[key]

    def _tried(self, change: Change) -> "tuple[SettledRun, Verdict] | None":
        from stepcast.cost.memory import memory, verdict_of
        from stepcast.ir.legality import is_legal
        from stepcast.questions.settle import settle

        gpus = {"dp": None, "nodes": None, "gpus": self.asked.strategy.layout.gpus}
        try:
            run = settle(self.asked.question.change({**gpus, **change}))
            lacks_software = set(run.missing) - set(self.asked.missing)
            if lacks_software or not is_legal(run.model, run.strategy, run.framework):
                return None
            stages = memory(run.model, run.strategy, run.cluster.gpu, run.framework)
        except ValueError:
            return None
        return run, verdict_of(stages)

    def _change(self, levels: Levels) -> Change:
        """The options of a combination; the batch stays as it is, also where it was assumed."""
        change = {name: self.axes[name][level - 1] for name, level in levels.items()}
        if change.keys() & {"micro_batch", "tp", "pp", "cp"}:
            change["global_batch"] = self.asked.strategy.global_batch
        return change


def _axes(asked: "SettledRun") -> dict[str, list[Any]]:
    """What may be changed, without what is on already."""
    strategy, layout = asked.strategy, asked.strategy.layout
    sharding, recompute = str(strategy.sharding), str(strategy.recompute.kind)
    shards = layout.dp > 1 and sharding in STATES
    return {
        "sharding": list(STATES[STATES.index(sharding) + 1 :]) if shards else [],
        "micro_batch": list(_halves(strategy.micro_batch)),
        "recompute": (list(RECOMPUTES[RECOMPUTES.index(recompute) + 1 :]) if recompute in RECOMPUTES else ["full"]),
        "tp": list(_doubles(layout.tp, layout.dp, asked.cluster.domain_gpus)),
        "pp": list(_doubles(layout.pp, layout.dp, asked.model.layers)),
        "cp": list(_doubles(layout.cp, layout.dp, 4 * layout.cp)) if strategy.seq >= LONG_SEQUENCE else [],
        "offload": (["optimizer"] if asked.cluster.node.host is not None and not strategy.offload.optimizer else []),
    }


def _halves(size: int) -> Iterator[int]:
    while size % 2 == 0:
        size //= 2
        yield size
    if size > 1:
        yield 1


def _doubles(ways: int, replicas: int, most: int) -> Iterator[int]:
    """Twice as many *ways* and more, as far as they can be taken from the *replicas*."""
    times = 2
    while ways * times <= most and replicas % times == 0:
        yield ways * times
        times *= 2


def _is_milder(one: Levels, other: Levels) -> bool:
    return all(level <= other.get(name, 0) for name, level in one.items())


def _cost(levels: Levels) -> float:
    return sum(COSTS[name] * level for name, level in levels.items())


def _words(change: Change, asked: "SettledRun") -> str:
    """Return a change as one types it; the batch too where it was assumed, since it would be assumed anew."""
    changed = {name: value for name, value in change.items() if getattr(asked.question, name) != value}
    return " ".join(f"{option_of(name)} {value}" for name, value in changed.items())
