"""Changes of a run: those that make it fit into memory, and its neighbours, each with one choice changed.

Every change is the same question with one, two or, where no two suffice, three choices changed, so that its cost
is what a user gets who types it. The GPUs and the global batch stay, and no remedy uses a feature that the
framework lacks.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations, product

from stepcast.cost.memory import Verdict, memory, verdict_of
from stepcast.forecast.options import Engine
from stepcast.ir.framework import Modules
from stepcast.ir.legality import is_legal
from stepcast.ir.limits import LimitError
from stepcast.ir.strategy import BaseWeights
from stepcast.ir.types import ChangeFacts, FactDict
from stepcast.questions import settle as settling
from stepcast.questions.choices import alias_flags, alias_names, option_of
from stepcast.questions.question import PredictQuestion
from stepcast.questions.settle import SettledRun, default_framework, settle
from stepcast.units import format_bytes

SHOWN_REMEDIES = 2
# Number of fitting combinations that are predicted, in the order of COSTS.
MOST_PREDICTED = 6
SHARDINGS = ("none", "zero-1", "zero-2", "zero-3", "fsdp")
RECOMPUTES = ("none", "selective", "full")
LONG_SEQUENCE = 32_768  # tokens from which context parallelism is offered
# A rough cost of one level along an axis, to predict the promising combinations first.
COSTS = {"sharding": 1, "micro_batch": 2, "optimizer": 3, "recompute": 4, "base_weights": 5, "cp": 5, "tp": 6, "pp": 7,
         "offload": 12, "lora_rank": 15}  # fmt: skip
LAST_RESORTS = "offload", "lora_rank"  # slow, or another training

QLORA = ("--base-weights nf4", "--qlora")  # as people who fine-tune say it

Change = FactDict
Levels = dict[str, int]  # axis -> how far along it, from 1


def find_remedies(asked: SettledRun, step_s: float) -> FactDict:
    """Return the fastest changes with which the run fits, and how many others were left out, for what reason.

    *step_s* is the step of the run without them.
    """
    rows: list[FactDict] = []
    beyond: list[LimitError] = []
    for change, run, verdict in _Remedies(asked).find_fitting()[:MOST_PREDICTED]:
        try:
            prediction = run.prediction
        except LimitError as error:  # more tasks than the fluid engine takes
            beyond.append(error)
            continue
        # The batch is part of the change where it was a default, since it would be chosen anew.
        if "global_batch" in change and asked.question.accumulation is not None:
            del change["global_batch"]
            change["accumulation"] = run.strategy.micro_batches
        typed = {name: value for name, value in change.items() if getattr(asked.question, name) != value}
        options = " ".join(f"{option_of(name)} {value}" for name, value in typed.items()).replace(*QLORA)
        slower = prediction.step_s / step_s - 1 if step_s else 0.0
        needed = max(stage.total for stage in prediction.memory)
        row = {"options": options, "step_s": prediction.step_s, "slower": slower, "memory_bytes": needed}
        rows.append({**row, "verdict": str(verdict)})
    facts: FactDict = {"remedies": sorted(rows, key=lambda row: row["step_s"])[:SHOWN_REMEDIES]}
    if beyond:
        left_out = f"{len(beyond)} {'change that fits' if len(beyond) == 1 else 'changes that fit'} ({beyond[0]})"
        hint = "; --engine fast has no such limit" if asked.options.engine is Engine.FLUID else ""
        facts["remedies_left_out"] = left_out + hint
    return facts


class _Remedies:
    """Combinations of changes along axes, each axis ordered from the mildest change to the strongest."""

    def __init__(self, asked: SettledRun) -> None:
        self.asked = asked
        self.axes = {name: values for name, values in _remedy_axes(asked).items() if values}
        self.tried: dict[tuple[tuple[str, int], ...], tuple[SettledRun, Verdict] | None] = {}

    def find_fitting(self) -> list[tuple[Change, SettledRun, Verdict]]:
        """Return the mildest combinations that fit, the cheapest first.

        Offloading, adapters instead of all weights, and combinations whose verdict is tight, are used only if nothing
        else fits.
        """
        last = (*LAST_RESORTS, "base_weights") if "lora_rank" in self.axes else LAST_RESORTS
        plain = [name for name in self.axes if name not in last]
        every = list(self.axes)
        for axes, accepted in ((plain, Verdict.FITS), (every, Verdict.FITS), (every, Verdict.TIGHT)):
            mildest: list[Levels] = []
            for many in (1, 2, 3):
                if many == 3 and mildest:
                    break
                mildest += self._find_mildest(axes, many, accepted, mildest)
            if mildest:
                mildest.sort(key=lambda levels: sum(COSTS[name] * level for name, level in levels.items()))
                answers = [(levels, self._answer(levels)) for levels in mildest]
                return [(self._change(levels), *answer) for levels, answer in answers if answer is not None]
        return []

    def _find_mildest(self, axes: Sequence[str], many: int, accepted: Verdict, known: Sequence[Levels]) -> list[Levels]:
        """Return combinations of *many* axes that fit and are stronger than none of the *known* ones."""
        mildest: list[Levels] = []
        for names in combinations(axes, many):
            strongest = {name: len(self.axes[name]) for name in names}
            # Sharding parameters in a pipeline may need more memory than sharding gradients.
            answer = None if "sharding" in names else self._answer(strongest)
            if answer is not None and answer[1] is Verdict.DOES_NOT_FIT:
                continue  # so no milder combination of these axes fits
            for steps in sorted(product(*(range(1, strongest[name] + 1) for name in names)), key=sum):
                levels = dict(zip(names, steps, strict=True))
                fitting = (*known, *mildest)
                if any(all(step <= levels.get(name, 0) for name, step in other.items()) for other in fitting):
                    continue
                answer = self._answer(levels)
                if answer is not None and answer[1] is accepted:
                    mildest.append(levels)
        return mildest

    def _answer(self, levels: Levels) -> tuple[SettledRun, Verdict] | None:
        """Return the run with this change and its verdict; None if it cannot run."""
        key = tuple(sorted(levels.items()))
        if key in self.tried:
            return self.tried[key]
        self.tried[key], change = None, self._change(levels)
        gpus = {"dp": None, "nodes": None, "gpus": self.asked.strategy.layout.gpus}
        with suppress(ValueError):
            run = settle(self.asked.question.change({**gpus, **change}))
            is_other = run.framework.name not in (self.asked.framework.name, change.get("framework"))
            lacks = is_other or set(run.missing) - set(self.asked.missing)
            if not lacks and is_legal(run.model, run.strategy, run.framework):
                self.tried[key] = run, verdict_of(memory(run.model, run.strategy, run.cluster.gpu, run.framework))
        return self.tried[key]

    def _change(self, levels: Levels) -> Change:
        """Return the choices of a combination; the batch stays as it is, also where it was a default."""
        change = {name: self.axes[name][level - 1] for name, level in levels.items()}
        if change.keys() & {"micro_batch", "tp", "pp", "cp"}:
            change["global_batch"] = self.asked.batch["global_batch"]
        software = self.asked.framework.name
        if change.keys() & {"lora_rank", "base_weights"} and software == settling.FULL_TUNING_FRAMEWORK:
            change["framework"] = settling.TUNING_FRAMEWORK
        by_default = software == settling.TUNING_FRAMEWORK and self.asked.question.framework is None
        if by_default and change.keys() & {"tp", "pp", "cp"}:  # peft splits no model
            change["framework"] = default_framework(self.asked.question.lora_rank, split=2)
        return change


def _remedy_axes(asked: SettledRun) -> dict[str, list[int] | list[str]]:
    """Return the values that save memory by choice, without those that are used already."""
    strategy, layout = asked.strategy, asked.strategy.layout
    sharding, recompute = str(strategy.sharding), str(strategy.recompute.kind)
    shards = layout.dp > 1 and sharding in SHARDINGS
    # Of transformers alone, whose users have bitsandbytes and peft.
    tunes = strategy.trains_all_weights and asked.framework.modules is Modules.TRANSFORMERS
    quantises = tunes or (strategy.lora_rank and strategy.base_weights is BaseWeights.TRAINED)
    return {
        "sharding": list(SHARDINGS[SHARDINGS.index(sharding) + 1 :]) if shards else [],
        "micro_batch": list(_halves(asked.question.micro_batch)),
        "recompute": list(RECOMPUTES[RECOMPUTES.index(recompute) + 1 :]) if recompute in RECOMPUTES else ["full"],
        "optimizer": ["adamw:8bit"] if tunes and asked.question.optimizer in (None, "adamw") else [],
        "lora_rank": [settling.PEFT_RANK] if tunes else [],
        "base_weights": ["nf4"] if quantises else [],
        "tp": list(_doubles(layout.tp, layout.dp, asked.cluster.domain_gpus)),
        "pp": list(_doubles(layout.pp, layout.dp, asked.model.layers)),
        "cp": list(_doubles(layout.cp, layout.dp, 4 * layout.cp)) if strategy.seq >= LONG_SEQUENCE else [],
        "offload": ["optimizer"] if asked.cluster.node.host is not None and not strategy.offload.optimizer else [],
    }


def _halves(size: int) -> Iterator[int]:
    while size % 2 == 0:
        size //= 2
        yield size
    if size > 1:
        yield 1


def _doubles(ways: int, replicas: int, most: int) -> Iterator[int]:
    """Yield 2, 4, ... times the *ways*, as far as they can be taken from the *replicas*."""
    times = 2
    while ways * times <= most and replicas % times == 0:
        yield ways * times
        times *= 2


def find_neighbours(run: SettledRun, command: str, pause: Callable[[], None] | None = None) -> list[ChangeFacts]:
    """Predict the runs that differ from *run* in one choice; those that are not legal are left out.

    *command* asked for *run*; *pause* is called between predictions.
    """
    rows = []
    for name, value in _neighbour_choices(run):
        if pause is not None:
            pause()
        try:
            prediction = settle(run.question.change({**run.batch, name: value})).prediction
        except ValueError:
            continue
        words, typed = f"{name.replace('_', '-')} {value}", _change_command(command, {**run.batch, name: value})
        needed, step_s = max((stage.total for stage in prediction.memory), default=None), prediction.step_s
        rows.append(ChangeFacts(change=words, step_s=step_s, memory_bytes=needed, fits=prediction.fits, command=typed))
    return rows


def _neighbour_choices(run: SettledRun) -> Iterator[tuple[str, int | str]]:
    strategy, layout = run.strategy, run.strategy.layout
    for name in ("tp", "pp"):
        ways = getattr(layout, name)
        if layout.dp % 2 == 0:
            yield name, 2 * ways
        if ways % 2 == 0:
            yield name, ways // 2
    if layout.pp > 1 and layout.vpp == 1:
        yield "vpp", 2
    for name in ("cp", "ep"):
        if getattr(layout, name) > 1:
            yield name, getattr(layout, name) // 2
    micro_batch = run.question.micro_batch
    yield "micro_batch", 2 * micro_batch
    if micro_batch % 2 == 0:
        yield "micro_batch", micro_batch // 2
    for kind in RECOMPUTES:
        if kind != str(strategy.recompute.kind):
            yield "recompute", kind
    for sharding in ("zero-1", "zero-3") if layout.dp > 1 else ():
        if sharding != str(strategy.sharding):
            yield "sharding", sharding


def _change_command(command: str, changed: Change) -> str:
    """Return *command* with options changed, under whatever name, without those that write files."""
    others, flags = alias_names(PredictQuestion), alias_flags(PredictQuestion)
    replaced = {"--html", "--trace", "--to-workload", "--save", *map(option_of, changed)}
    replaced |= {"--accumulation"} if "global_batch" in changed else set()
    words: list[str] = []
    skip = False
    for word in shlex.split(command):
        given = word.partition("=")[0].removeprefix("--")
        ours = flags[given][0] if given in flags else others.get(given, given)
        if skip:
            skip = False
        elif word.startswith("--") and f"--{ours}" in replaced:
            skip = "=" not in word and given not in flags
        else:
            words.append(word)
    return shlex.join([*words, *(text for name, value in changed.items() for text in (option_of(name), str(value)))])


def explain_choices(run: SettledRun, capacity_bytes: float) -> list[FactDict]:
    """Return for each choice of *run* its other values: what they cost, or which constraint rules them out."""
    step_s, parts = run.prediction.step_s, run.prediction.report.breakdown_s
    rows: list[FactDict] = []
    for name, value in (*_neighbour_choices(run), *_other_words(run)):
        other = ("no", "yes")[value] if isinstance(value, bool) else str(value)
        row: FactDict = {"choice": name.replace("_", "-"), "other": other, "step_s": None, "memory_bytes": None}
        rows.append(row)
        try:
            # Another number of stages or another schedule replaces the choices about chunks and layers.
            replaced = ["stage_layers"] if name in ("pp", "vpp", "schedule") else []
            replaced += ["vpp", "schedule"] if replaced and value in (1, "1f1b", "zb-h1") else []
            changed = settle(run.question.change({**run.batch, **dict.fromkeys(replaced), name: value}))
            prediction = changed.prediction
        except ValueError as error:
            row |= {"constraint": "not possible", "why": str(error)}
            continue
        needed = max(stage.total for stage in prediction.memory)
        row |= {"step_s": prediction.step_s, "memory_bytes": needed}
        if lacking := [note for note in changed.missing if note not in run.missing]:
            row |= {"constraint": "framework", "why": lacking[0]}
        elif needed > capacity_bytes:
            row |= {"constraint": "memory", "why": f"{format_bytes(needed)} of {format_bytes(capacity_bytes)}"}
        else:
            changes = {part: seconds - parts[part] for part, seconds in prediction.report.breakdown_s.items()}
            part = max(changes, key=lambda part: changes[part] * (1 if prediction.step_s >= step_s else -1))
            row |= {"constraint": "step time", "why": f"{part} {changes[part] * 1e3:+,.1f} ms"}
    return rows


def _other_words(run: SettledRun) -> Iterator[tuple[str, str | bool]]:
    """Yield the neighbours that a page of changes leaves out."""
    strategy = run.strategy
    for name, values in (("schedule", ("1f1b", "interleaved", "zb-h1")), ("sharding", ("none", "zero-2", "fsdp"))):
        for value in values if name == "sharding" or strategy.layout.pp > 1 else ():
            if value != str(getattr(strategy, name)):
                yield name, value
    if strategy.layout.tp > 1:
        yield "sequence_parallel", not strategy.sequence_parallel
