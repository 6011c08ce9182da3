"""Step times that training programs print: Megatron-LM, torchtitan, NeMo, DeepSpeed, Trainer, verl, NeMo RL, MLPerf.

``StepLines`` reads line by line, from a finished log or from one that grows.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.measured import LoggedScore, LoggedStep, LoggedTimer, StepLog
from stepcast.units import GIB, MIB, MS

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LINE_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)")


class ParsedStep(NamedTuple):
    """A step as a line states it, the number of steps of the run, and what else the line says of the run."""

    step: LoggedStep
    total: int = 0
    facts: Mapping[str, float] = {}


def _named_numbers(text: str) -> dict[str, float]:
    """Return the finite numbers of ``name: value | name: value``."""
    numbers = {}
    for part in text.split("|"):
        name, colon, value = part.rpartition(":")
        number = _finite(value) if colon else None
        if number is not None:
            numbers[name.strip()] = number
    return numbers


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


# Megatron-LM (megatron/training/training.py, training_log; megatron/core/timers.py).
ITERATION = re.compile(r"iteration\s+(\d{1,15})\s*/\s*(\d{1,15})\s*\|")
RANK_MEMORY = re.compile(r"\[Rank (\d+)\].*memory \(MB\)(.*)")
SLOW_SCORE = 1 / 1.1  # as analyses call a rank a straggler
RANK_TIMES = "times across ranks (ms):"
TIMER = re.compile(r"\s+([A-Za-z][\w-]*)(?: \.+)?:\s*(?:\((\d+\.?\d*), (\d+\.?\d*)\))?\s*$")
TIMED_RANK = re.compile(r"\s+rank\s+(\d{1,7}): (\d+\.?\d*)\s*$")


# NVIDIA's resiliency extension, in logs of NeMo and Megatron-Bridge: scores of GPUs relative to the fastest.
SCORES = re.compile(r"GPU (relative|individual) performance:")
SCORE = re.compile(r"\s*Rank=(\d{1,7}) Node=(\S{1,200}) Score=(\d+\.?\d*)\s*$")


def parse_megatron(line: str) -> ParsedStep | None:
    match = ITERATION.search(line)
    if match is None or "elapsed time per iteration" not in line:
        return None
    values = _named_numbers(line[match.end() :])
    milliseconds = values.get("elapsed time per iteration (ms)", -1.0)
    step = LoggedStep(
        step=int(match[1]),
        seconds=milliseconds * MS if milliseconds >= 0 else None,
        tflops_per_gpu=values.get("throughput per GPU (TFLOP/s/GPU)"),
        samples=_whole(values.get("global batch size")),
        loss=values.get("lm loss"),
    )
    return ParsedStep(step, int(match[2]))


# torchtitan (torchtitan/components/metrics.py).
STEP = re.compile(r"\bstep:\s*(\d{1,15})\s+loss:\s*([-0-9.einfa]+)")
FIELDS = {
    "memory": re.compile(r"memory:\s*([0-9.]+)\s*GiB"),
    "tps": re.compile(r"\btps:\s*([0-9,.]+)"),
    "tflops": re.compile(r"\btflops:\s*([0-9,.]+)"),
    "mfu": re.compile(r"\bmfu:\s*([0-9.]+)%"),
}


def parse_torchtitan(line: str) -> ParsedStep | None:
    match = STEP.search(line)
    if match is None:
        return None
    fields = {name: pattern.search(line) for name, pattern in FIELDS.items()}
    values = {name: _finite(field[1].replace(",", "")) for name, field in fields.items() if field}
    memory, share = values.get("memory"), values.get("mfu")
    step = LoggedStep(
        step=int(match[1]),
        tflops_per_gpu=values.get("tflops"),
        tokens_per_s_per_gpu=values.get("tps"),
        memory_bytes=None if memory is None else memory * GIB,
        loss=_finite(match[2]),
    )
    return ParsedStep(step, facts={} if share is None else {"mfu": share / 100})


# NeMo (nemo/lightning/pytorch/callbacks/progress_printer.py).
NEMO = re.compile(r"Training epoch \d+, iteration (\d{1,15})/(\d{1,15}) \|")


def parse_nemo(line: str) -> ParsedStep | None:
    match = NEMO.search(line)
    if match is None:
        return None
    values = _named_numbers(line[match.end() :])
    step = LoggedStep(
        step=int(match[1]),
        seconds=values.get("train_step_timing in s"),
        tflops_per_gpu=values.get("TFLOPS_per_GPU"),
        tokens_per_s_per_gpu=values.get("tokens_per_sec_per_gpu"),
        samples=_whole(values.get("global_batch_size")),
        memory_bytes=values.get("max_memory_allocated", values.get("peak_memory_usage")),
        loss=values.get("reduced_train_loss"),
    )
    return ParsedStep(step, int(match[2]) + 1)


# DeepSpeed (deepspeed/utils/timer.py, ThroughputTimer).
DEEPSPEED = re.compile(r"(?:global_step=|\b\d+/)(\d{1,15}), RunningAvgSamplesPerSec=[^,]+, CurrSamplesPerSec=[^,]+")
DEEPSPEED_PEAK = re.compile(r"MaxMemAllocated=(\d+\.?\d*)GB")


def parse_deepspeed(line: str) -> ParsedStep | None:
    match = DEEPSPEED.search(line)
    if match is None:
        return None
    peak = DEEPSPEED_PEAK.search(line)
    return ParsedStep(LoggedStep(int(match[1]), memory_bytes=float(peak[1]) * GIB if peak else None))


# Trainer of transformers: the progress bar of tqdm, which states the time per step, smoothed.
BAR = re.compile(r"\|\s*(\d{1,15})/(\d{1,15}) \[[\d:]+<[\d:?]+, +([0-9.]+)(s/it|it/s)")


def parse_trainer(line: str) -> ParsedStep | None:
    bars = [*BAR.finditer(line)]
    match = bars[-1] if bars else None  # bars overwrite each other
    value = _finite(match[3]) if match else None
    if match is None or not value:
        return None
    return ParsedStep(LoggedStep(int(match[1]), value if match[4] == "s/it" else 1 / value), int(match[2]))


# verl (verl/utils/logger, console): step:3 - actor/pg_loss:0.01 - timing_s/gen:35.2 - timing_s/step:64.8
VERL = re.compile(r"\bstep:(\d{1,15}) - ")
VERL_VALUE = re.compile(r"([\w/@.]+):(?:np\.float\d+\()?(-?\d[\d.]*(?:e[-+]?\d+)?)")
VERL_PHASES = {
    "timing_s/gen": "generation_s",
    "timing_s/old_log_prob": "old_logprob_s",
    "timing_s/ref": "reference_s",
    "timing_s/values": "values_s",
    "timing_s/reward": "reward_s",
    "timing_s/update_actor": "update_s",
    "timing_s/update_weights": "weight_sync_s",
    "response_length/mean": "mean_response_tokens",
    "prompt_length/mean": "mean_prompt_tokens",
}


def parse_verl(line: str) -> ParsedStep | None:
    match = VERL.search(line)
    if match is None or "timing_s/" not in line:
        return None
    values = {name: float(value) for name, value in VERL_VALUE.findall(line[match.end() :])}
    peak = values.get("perf/max_memory_allocated_gb")
    step = LoggedStep(
        step=int(match[1]),
        seconds=values.get("timing_s/step") or None,
        tokens_per_s_per_gpu=values.get("perf/throughput"),
        memory_bytes=None if peak is None else peak * GIB,
        loss=values.get("actor/pg_loss"),
    )
    return ParsedStep(step, facts={ours: values[name] for name, ours in VERL_PHASES.items() if name in values})


# NeMo RL (nemo_rl/algorithms/grpo.py): a heading, then a line for the step and one for each phase.
NEMO_RL_STEP = re.compile(r"=+ Step (\d{1,15})/(\d{1,15}) =+")
NEMO_RL_TIME = re.compile(r"Total step time: (\d+\.?\d*)s")
NEMO_RL_PHASE = re.compile(r"\u2022 ([a-z_]{3,60}): (\d+\.?\d*)s \(")


def parse_nemo_rl(line: str) -> ParsedStep | None:
    match = NEMO_RL_TIME.search(line)
    return ParsedStep(LoggedStep(0, float(match[1]) or None)) if match else None


PARSERS: Mapping[str, Callable[[str], ParsedStep | None]] = {
    "Megatron-LM": parse_megatron,
    "torchtitan": parse_torchtitan,
    "NeMo": parse_nemo,
    "DeepSpeed": parse_deepspeed,
    "Trainer": parse_trainer,
    "verl": parse_verl,
    "NeMo RL": parse_nemo_rl,
}


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
        for name in [self.program] if self.program else PARSERS:
            parsed = PARSERS[name](text) if name in PARSERS else None
            if parsed is not None:
                self.program, self._in_timers = name, False
                self.total = parsed.total or self.total
                for fact, value in parsed.facts.items():
                    self.facts.setdefault(fact, []).append(value)
                step = parsed.step._replace(step=parsed.step.step or self._heading)
                yield self._with_time(step, text)
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


# Variant of the format -> program, a pattern and words that the beginning of its log has.
PROGRAMS: Mapping[str, tuple[str, re.Pattern[str], tuple[str, ...]]] = {
    "megatron": ("Megatron-LM", ITERATION, ("elapsed time per iteration",)),
    "torchtitan": ("torchtitan", STEP, ("tps:", "memory:")),
    "nemo": ("NeMo", NEMO, ("train_step_timing in s",)),
    "deepspeed": ("DeepSpeed", DEEPSPEED, ()),
    "trainer": ("Trainer", BAR, ("'loss':",)),
    "verl": ("verl", VERL, ("timing_s/",)),
    "nemo_rl": ("NeMo RL", NEMO_RL_STEP, ("Total step time: ",)),
}


def looks_like(head: str, variant: str) -> bool:
    _, pattern, words = PROGRAMS[variant]
    plain = COLOUR.sub("", head)
    return pattern.search(plain) is not None and all(word in plain for word in words)


def read(source: Source, variant: str) -> StepLog:
    """Return the steps of a finished log of one of PROGRAMS."""
    return read_lines(source, PROGRAMS[variant][0])


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


def _mlperf_event(line: str) -> dict[str, Any] | None:
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
