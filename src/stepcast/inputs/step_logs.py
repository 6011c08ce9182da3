"""Step times that training programs print: Megatron-LM, torchtitan, NeMo, DeepSpeed, Trainer, verl, NeMo RL, MLPerf.

``StepLines`` reads line by line, from a finished log or from one that grows.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import pairwise

import msgspec

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.facts import FactDict
from stepcast.ir.measured import LoggedScore, LoggedStep, LoggedTimer, StepLog
from stepcast.units import GIB, MIB, MS

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LINE_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)")


Values = dict[str, float]


def _named_numbers(text: str) -> Values:
    """Return the finite numbers of ``name: value | name: value``."""
    numbers = {}
    for part in text.split("|"):
        name, colon, value = part.rpartition(":")
        number = _finite(value) if colon else None
        if number is not None:
            numbers[name.strip()] = number
    return numbers


def _matched_numbers(**patterns: str) -> Callable[[str], Values]:
    """Return a function that finds the finite numbers of a line, each by its pattern."""
    compiled = {name: re.compile(pattern) for name, pattern in patterns.items()}

    def find(line: str) -> Values:
        matches = {name: pattern.search(line) for name, pattern in compiled.items()}
        numbers = {name: _finite(match[1].replace(",", "")) for name, match in matches.items() if match}
        return {name: number for name, number in numbers.items() if number is not None}

    return find


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class LogProgram(msgspec.Struct, frozen=True):
    """The form in which a program prints a step.

    A line has a pattern with the step and often the number of steps, some words, and values with their names and units.
    """

    pattern: re.Pattern[str]
    words: tuple[str, ...]
    values: Callable[[str], Values]
    fields: Mapping[str, tuple[str, float]]  # of a LoggedStep
    facts: Mapping[str, tuple[str, float]] = {}  # of the run
    head: tuple[str, ...] = ()  # further words in the beginning of its log
    first: int = 1  # number of the first step

    def parse(self, line: str) -> tuple[LoggedStep, int, Values] | None:
        """Return the step of a line, the number of steps of the run (0: unknown), and facts of the run."""
        matches = [*self.pattern.finditer(line)]  # progress bars overwrite each other: the last one counts
        if not matches or any(word not in line for word in self.words):
            return None
        values, known = self.values(line), FactDict()
        for name, (keys, unit) in self.fields.items():
            if key := next((key for key in keys.split("|") if key in values), ""):
                known[name] = values[key] * unit
        if not known.get("seconds", 0.0) > 0:
            known.pop("seconds", None)
        if "samples" in known:
            known["samples"] = int(known["samples"])
        step, total = (*map(int, matches[-1].groups()), 0, 0)[:2]
        facts = {name: values[key] * unit for name, (key, unit) in self.facts.items() if key in values}
        return LoggedStep(step, **known), total + 1 - self.first if total else 0, facts


# NeMo RL (nemo_rl/algorithms/grpo.py): a heading, then a line for the step and one for each phase.
NEMO_RL_STEP = re.compile(r"=+ Step (\d{1,15})/(\d{1,15}) =+")
NEMO_RL_PHASE = re.compile(r"\u2022 ([a-z_]{3,60}): (\d+\.?\d*)s \(")
VERL_VALUE = re.compile(r"([\w/@.]+):(?:np\.float\d+\()?(-?\d[\d.]*(?:e[-+]?\d+)?)")
VERL_PHASES = (
    *("gen generation", "old_log_prob old_logprob", "ref reference", "values values", "reward reward"),
    *("update_actor update", "update_weights weight_sync"),
)
# The progress bar of tqdm states the time per step, smoothed.
BAR = r"\|\s*(\d{1,15})/(\d{1,15}) \[[\d:]+<[\d:?]+, +"
BAR_TIME = re.compile(rf"{BAR}([0-9.]+)(s/it|it/s)")


def _bar_seconds(line: str) -> Values:
    _, _, text, unit = BAR_TIME.findall(line)[-1]
    value = _finite(text)
    return {"step": value if unit == "s/it" else 1 / value} if value else {}


PROGRAMS: Mapping[str, LogProgram] = {
    # megatron/training/training.py, training_log; megatron/core/timers.py
    "Megatron-LM": LogProgram(
        re.compile(r"iteration\s+(\d{1,15})\s*/\s*(\d{1,15})\s*\|"),
        ("elapsed time per iteration",),
        _named_numbers,
        {
            "seconds": ("elapsed time per iteration (ms)", MS),
            "tflops_per_gpu": ("throughput per GPU (TFLOP/s/GPU)", 1),
            "samples": ("global batch size", 1),
            "loss": ("lm loss", 1),
        },
    ),
    # torchtitan/components/metrics.py
    "torchtitan": LogProgram(
        re.compile(r"\bstep:\s*(\d{1,15})\s+loss:\s*[-0-9.einfa]+"),
        (),
        _matched_numbers(
            memory=r"memory:\s*([0-9.]+)\s*GiB",
            tps=r"\btps:\s*([0-9,.]+)",
            tflops=r"\btflops:\s*([0-9,.]+)",
            mfu=r"\bmfu:\s*([0-9.]+)%",
            loss=r"\bstep:\s*\d{1,15}\s+loss:\s*([-0-9.einfa]+)",
        ),
        {
            "tflops_per_gpu": ("tflops", 1),
            "tokens_per_s_per_gpu": ("tps", 1),
            "memory_bytes": ("memory", GIB),
            "loss": ("loss", 1),
        },
        {"mfu": ("mfu", 0.01)},
        head=("tps:", "memory:"),
    ),
    # nemo/lightning/pytorch/callbacks/progress_printer.py
    "NeMo": LogProgram(
        re.compile(r"Training epoch \d+, iteration (\d{1,15})/(\d{1,15}) \|"),
        (),
        _named_numbers,
        {
            "seconds": ("train_step_timing in s", 1),
            "tflops_per_gpu": ("TFLOPS_per_GPU", 1),
            "tokens_per_s_per_gpu": ("tokens_per_sec_per_gpu", 1),
            "samples": ("global_batch_size", 1),
            "memory_bytes": ("max_memory_allocated|peak_memory_usage", 1),
            "loss": ("reduced_train_loss", 1),
        },
        head=("train_step_timing in s",),
        first=0,
    ),
    # deepspeed/utils/timer.py, ThroughputTimer
    "DeepSpeed": LogProgram(
        re.compile(r"(?:global_step=|\b\d+/)(\d{1,15}), RunningAvgSamplesPerSec=[^,]+, CurrSamplesPerSec=[^,]+"),
        (),
        _matched_numbers(peak=r"MaxMemAllocated=(\d+\.?\d*)GB"),
        {"memory_bytes": ("peak", GIB)},
    ),
    # Trainer of transformers
    "Trainer": LogProgram(
        re.compile(rf"{BAR}[0-9.]+(?:s/it|it/s)"), (), _bar_seconds, {"seconds": ("step", 1)}, head=("'loss':",)
    ),
    # verl/utils/logger, console: step:3 - actor/pg_loss:0.01 - timing_s/gen:35.2 - timing_s/step:64.8
    "verl": LogProgram(
        re.compile(r"\bstep:(\d{1,15}) - "),
        ("timing_s/",),
        lambda line: {name: float(value) for name, value in VERL_VALUE.findall(line)},
        {
            "seconds": ("timing_s/step", 1),
            "tokens_per_s_per_gpu": ("perf/throughput", 1),
            "memory_bytes": ("perf/max_memory_allocated_gb", GIB),
            "loss": ("actor/pg_loss", 1),
        },
        {
            **{f"{ours}_s": (f"timing_s/{theirs}", 1.0) for theirs, ours in map(str.split, VERL_PHASES)},
            **{f"mean_{side}_tokens": (f"{side}_length/mean", 1.0) for side in ("response", "prompt")},
        },
    ),
    "NeMo RL": LogProgram(
        re.compile(r"Total step time: \d+\.?\d*s"),
        (),
        _matched_numbers(step=r"Total step time: (\d+\.?\d*)s"),
        {"seconds": ("step", 1)},
        head=("Total step time: ",),
    ),
}
VARIANTS = {name.lower().replace("-lm", "").replace(" ", "_"): name for name in PROGRAMS}

# Megatron-LM's memory and timers of ranks.
RANK_MEMORY = re.compile(r"\[Rank (\d+)\].*memory \(MB\)(.*)")
SLOW_SCORE = 1 / 1.1  # as analyses call a rank a straggler
RANK_TIMES = "times across ranks (ms):"
TIMER = re.compile(r"\s+([A-Za-z][\w-]*)(?: \.+)?:\s*(?:\((\d+\.?\d*), (\d+\.?\d*)\))?\s*$")
TIMED_RANK = re.compile(r"\s+rank\s+(\d{1,7}): (\d+\.?\d*)\s*$")
# NVIDIA's resiliency extension, in logs of NeMo and Megatron-Bridge: scores of GPUs relative to the fastest.
SCORES = re.compile(r"GPU (relative|individual) performance:")
SCORE = re.compile(r"\s*Rank=(\d{1,7}) Node=(\S{1,200}) Score=(\d+\.?\d*)\s*$")


class StepLines:
    """Reads the lines of one log; *program* is set by the first line that a parser knows."""

    def __init__(self, program: str = "") -> None:
        self.program = program
        self.total = 0
        self.facts: dict[str, list[float]] = {}
        self.peaks: dict[int, float] = {}
        self._before: tuple[int, datetime] | None = None
        self._in_timers = False
        self._timer = ""
        self._batch = 0
        self._heading = 0  # the step that a heading announced
        self._relative = False

    def feed(self, line: str) -> Iterator[LoggedStep | LoggedTimer | LoggedScore]:
        """Yield the step, the timers or the score of a line."""
        text = COLOUR.sub("", line)
        if RANK_TIMES in text or "time across ranks (ms):" in text:
            self._in_timers = True
        elif self._in_timers and (match := TIMER.match(text)):
            self._timer = match[1]
            if match[2]:
                yield LoggedTimer(match[1], float(match[2]) * MS, float(match[3]) * MS)
        elif self._in_timers and (match := TIMED_RANK.match(text)) and self._timer:
            seconds = float(match[2]) * MS
            yield LoggedTimer(self._timer, seconds, seconds, int(match[1]))
        elif match := SCORES.search(text):
            self._relative = match[1] == "relative"
        elif self._relative and (match := SCORE.search(text)):
            yield LoggedScore(int(match[1]), match[2], float(match[3]))
        elif match := RANK_MEMORY.search(text):
            values = _named_numbers(match[2].lstrip(" |"))
            rank = int(match[1])
            self.peaks[rank] = max(self.peaks.get(rank, 0.0), values.get("max allocated", 0.0) * MIB)
        elif match := NEMO_RL_STEP.search(text):
            self._heading, self.total = int(match[1]), int(match[2])
        elif self.program == "NeMo RL" and (match := NEMO_RL_PHASE.search(text)):
            self.facts.setdefault(f"{match[1]}_s", []).append(float(match[2]))
        elif MLPERF_MARK in text and self.program in ("", "MLPerf"):
            yield from self._mlperf(text)
        else:
            yield from self._parse(text)

    def _parse(self, text: str) -> Iterator[LoggedStep]:
        for name in [self.program] if self.program else PROGRAMS:
            parsed = PROGRAMS[name].parse(text) if name in PROGRAMS else None
            if parsed is not None:
                self.program, self._in_timers = name, False
                step, total, facts = parsed
                self.total = total or self.total
                for fact, value in facts.items():
                    self.facts.setdefault(fact, []).append(value)
                yield self._with_time(step._replace(step=step.step or self._heading), text)
                return

    def _with_time(self, step: LoggedStep, text: str) -> LoggedStep:
        """Return the step with its time; lines may be steps apart, and share the time since the one before."""
        printed = LINE_TIME.search(text)
        if step.seconds is not None or printed is None:
            return step
        try:
            time, before = datetime.fromisoformat(printed[1].replace(",", ".")), self._before
        except ValueError:
            return step
        self._before = (step.step, time)
        if before is None or step.step <= before[0]:
            return step
        seconds = max(0.0, (time - before[1]).total_seconds()) / (step.step - before[0])
        return step._replace(seconds=seconds or None)

    def _mlperf(self, text: str) -> Iterator[LoggedStep]:
        event = _mlperf_event(text)
        if event is None:
            return
        self.program = "MLPerf"
        value = event.get("value")
        if event.get("key") == "global_batch_size" and isinstance(value, int):
            self._batch = value
        rate = value.get("throughput") if event.get("key") == "tracked_stats" and isinstance(value, dict) else None
        if isinstance(rate, int | float) and rate > 0 and self._batch > 0:
            metadata = event.get("metadata")
            samples = _mlperf_samples(metadata if isinstance(metadata, dict) else {})
            yield LoggedStep(max(samples, 0) // self._batch, self._batch / rate, samples=self._batch)


def read_lines(source: Source, program: str) -> StepLog:
    """Return the steps of a finished log."""
    lines, steps, scores = StepLines(program), [], dict[int, LoggedScore]()
    for line in source.each_line(errors="replace"):
        for event in lines.feed(line):
            if isinstance(event, LoggedStep):
                steps.append(event)
            elif isinstance(event, LoggedScore):
                scores[event.rank] = event
    if not steps:
        raise FormatError(f"holds no step of {program}", source.path)
    facts: dict[str, object] = {name: sorted(values)[len(values) // 2] for name, values in lines.facts.items()}
    if scores:
        slow = sorted(
            (score for score in scores.values() if 0 < score.score < SLOW_SCORE), key=lambda score: score.score
        )
        facts["stragglers"] = [{"rank": each.rank, "node": each.node, "factor": 1 / each.score} for each in slow]
    if program == "Megatron-LM":
        facts |= {"iterations": lines.total, "memory_bytes_by_rank": {k: v for k, v in lines.peaks.items() if v}}
    peaks = [step.memory_bytes for step in steps if step.memory_bytes is not None] + [*lines.peaks.values()]
    return StepLog(tuple(steps), source.path, program, max(filter(None, peaks), default=None), facts)


def looks_like(head: str, variant: str) -> bool:
    program, plain = PROGRAMS[VARIANTS[variant]], COLOUR.sub("", head)
    pattern = NEMO_RL_STEP if variant == "nemo_rl" else program.pattern
    words = (*program.words, *program.head)
    return pattern.search(plain) is not None and all(word in plain for word in words)


def read(source: Source, variant: str) -> StepLog:
    """Return the steps of a finished log of one of PROGRAMS."""
    return read_lines(source, VARIANTS[variant])


# MLPerf Training: lines of ``:::MLLOG`` and a JSON object (mlcommons/logging).
MLPERF_MARK = ":::MLLOG"
# What a submission states of its run.
MLPERF_FACTS = (
    *("submission_benchmark", "submission_org", "submission_platform", "global_batch_size", "max_sequence_length"),
    *("gradient_accumulation_steps", "seed", "max_steps", "opt_base_learning_rate", "train_samples"),
    *("tensor_parallelism", "pipeline_parallelism", "context_parallelism", "expert_parallelism"),
    *("micro_batch_size", "world_size", "number_of_nodes", "accelerators_per_node"),
)


def looks_like_mlperf(head: str) -> bool:
    return MLPERF_MARK in head


def _mlperf_event(line: str) -> FactDict | None:
    """Return the event of a line; None for other lines, and one that is cut off, as the last of a killed run."""
    _, mark, text = line.partition(MLPERF_MARK)
    try:
        event = msgspec.json.decode(text.strip()) if mark else None
    except msgspec.DecodeError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("time_ms"), int | float) else None


def read_mlperf(source: Source) -> StepLog:
    facts: dict[str, object] = {}
    evaluations: list[list[object]] = []
    times: dict[str, float] = {}
    blocks: list[tuple[int, float]] = []
    throughputs: list[float] = []
    for line in source.each_line(errors="replace"):
        event = _mlperf_event(line)
        if event is None:
            continue
        key, value, metadata = event.get("key"), event.get("value"), event.get("metadata")
        time_s = float(event["time_ms"]) * MS
        metadata = metadata if isinstance(metadata, dict) else {}
        if key in MLPERF_FACTS and value is not None:
            facts[str(key)] = value
        elif key in ("init_start", "init_stop", "run_start", "run_stop"):
            times[str(key)] = time_s
            if key == "run_stop":
                facts["status"] = metadata.get("status")
        elif key in ("eval_accuracy", "eval_error"):
            evaluations.append([_mlperf_samples(metadata), value])
            facts["evaluations"] = evaluations
        elif key == "tracked_stats" and isinstance(value, dict):
            if isinstance(value.get("throughput"), int | float):
                throughputs.append(float(value["throughput"]))
            blocks.append((_mlperf_samples(metadata), time_s))
        elif key == "block_stop":
            blocks.append((_mlperf_samples(metadata), time_s))
    if not times and not facts:
        raise FormatError("holds no event of MLPerf", source.path)
    if {"run_start", "run_stop"} <= times.keys():
        facts["run_s"] = times["run_stop"] - times["run_start"]
    if throughputs:
        facts["samples_per_s"] = sorted(throughputs)[len(throughputs) // 2]
    steps = _mlperf_steps(facts.get("global_batch_size"), blocks, throughputs)
    return StepLog(steps, source.path, "MLPerf", None, facts)


def _mlperf_samples(metadata: Mapping[str, object]) -> int:
    for name in ("samples_count", "step", "epoch_count", "epoch_num"):
        if isinstance(value := metadata.get(name), int | float):
            return int(value)
    return -1


def _mlperf_steps(batch: object, blocks: list[tuple[int, float]], rates: list[float]) -> tuple[LoggedStep, ...]:
    """Return steps whose times follow from samples per second, or from samples between two blocks."""
    if not isinstance(batch, int) or batch < 1:
        return ()
    if rates:
        return tuple(LoggedStep(index, batch / rate, samples=batch) for index, rate in enumerate(rates) if rate > 0)
    steps = []
    for (before, began_s), (after, ended_s) in pairwise(blocks):
        count = (after - before) / batch
        if count > 0 and before >= 0:
            steps.append(LoggedStep(after // batch, (ended_s - began_s) / count, samples=batch))
    return tuple(steps)
