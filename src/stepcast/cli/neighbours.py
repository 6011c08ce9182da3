"""What one choice made otherwise does to a predicted step: the same command with one option changed."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stepcast.cli.options import option_of
from stepcast.ir.facts import ChangeFacts

if TYPE_CHECKING:
    from stepcast.questions.settle import SettledRun

RECOMPUTES = ("none", "selective", "full")
Change = Mapping[str, Any]


def neighbours(found: "SettledRun", command: str, rest: Callable[[], None] | None = None) -> list[ChangeFacts]:
    """Predict the steps next to *found*; what is not legal is left out.

    *rest* is called between them.
    """
    from stepcast.questions.settle import settle

    strategy, rows = found.strategy, []
    held = {"global_batch": strategy.global_batch, "seq": strategy.seq}
    for change in _changes(found):
        if rest is not None:
            rest()
        try:
            prediction = settle(found.question.change({**held, **change})).prediction
        except ValueError:
            continue
        most = max((stage.total for stage in prediction.memory), default=None)
        rows.append(
            ChangeFacts(
                change=_words(change),
                step_s=prediction.step_s,
                memory_bytes=most,
                fits=prediction.fits,
                command=_command(command, {**held, **change}),
            )
        )
    return rows


def _changes(found: "SettledRun") -> Iterator[Change]:
    strategy, layout = found.strategy, found.strategy.layout
    for name in ("tp", "pp"):
        ways = getattr(layout, name)
        if layout.dp % 2 == 0:
            yield {name: 2 * ways}
        if ways % 2 == 0:
            yield {name: ways // 2}
    if layout.pp > 1 and layout.vpp == 1:
        yield {"vpp": 2}
    if layout.cp > 1:
        yield {"cp": layout.cp // 2}
    if layout.ep > 1:
        yield {"ep": layout.ep // 2}
    yield {"micro_batch": 2 * strategy.micro_batch}
    if strategy.micro_batch % 2 == 0:
        yield {"micro_batch": strategy.micro_batch // 2}
    now = str(strategy.recompute.kind)
    for kind in RECOMPUTES:
        if kind != now:
            yield {"recompute": kind}
    if layout.dp > 1:
        sharding = str(strategy.sharding)
        for name in ("zero-1", "zero-3"):
            if name != sharding:
                yield {"sharding": name}


def _words(change: Change) -> str:
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in change.items())


def _command(command: str, changed: Change) -> str:
    """*command* with options set otherwise; those that are written to files are left out."""
    words, kept = shlex.split(command), []
    gone = {"--html", "--trace", "--to-workload", "--save", *map(option_of, changed)}
    gone |= {"--accumulation"} if "global_batch" in changed else set()
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word.partition("=")[0] in gone:
            skip = "=" not in word
        else:
            kept.append(word)
    added = [each for name, value in changed.items() for each in (option_of(name), str(value))]
    return shlex.join([*kept, *added])
