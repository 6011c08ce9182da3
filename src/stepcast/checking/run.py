"""``check(trainer)``: a forecast before the first step of a script, and what differs from it after some.

The choices of a run are read from the objects that a training script has: no file, no command line. Nothing is imported
from these libraries: a Trainer of transformers or TRL, an Accelerator, a configuration of torchtitan and Megatron-LM's
arguments are recognised by what they have.
"""

import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property, partial
from importlib import import_module
from itertools import pairwise
from statistics import mean, median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from stepcast.inputs.configs import megatron, torchtitan, tuning
from stepcast.inputs.configs.keys import RunConfig
from stepcast.inputs.huggingface.reader import read_config
from stepcast.ir.types import FactDict, Facts, require
from stepcast.questions.choices import read_choices
from stepcast.questions.question import PredictQuestion
from stepcast.units import format_bytes, format_change, format_seconds

if TYPE_CHECKING:
    from stepcast.forecast.prediction import Prediction
    from stepcast.questions.settle import SettledRun

PREFIX = "stepcast: "
SKIPPED_STEPS = 2  # the first ones compile, allocate and tune
LARGE_SHARE = 0.03  # of a step: smaller differences are not explained
# The pace of the CPU is measured again this often before the comparison, if that takes no larger share of the run.
WATCHES, WATCH_SHARE, WATCH_S = 5, 0.004, 0.01
PAUSE_S = 1e-3  # shorter pauses after a step are those of the check itself
Write = Callable[[str], object]
Script: TypeAlias = Any
"""An object of a library that is not imported: a trainer, a model, a configuration."""
LOOKED_AT = 64  # samples of a data set
# Choices that follow from the format of trained weights.
FORMATS: dict[str, dict[str, object]] = {
    "torch.bfloat16": {"precision": "bf16"},
    "torch.float32": {"stored_fp32": True},
}


class RunDoesNotFitError(RuntimeError):
    """The run does not fit into GPU memory, and the check is strict."""


class RunCheck:
    """The forecast of a run, the times of its steps, and the comparison of both.

    Call ``begin_step`` and ``end_step`` around each step, or ``step`` after each. ``facts`` holds all figures.
    """

    def __init__(
        self, choices: Facts, *, strict: bool = False, compare_after: int = 20, write: Write | None = None
    ) -> None:
        self.strict, self.compare_after = strict, compare_after
        self.write: Write = write or (print if os.environ.get("RANK", "0") == "0" else (lambda line: None))
        self.facts: FactDict = {}
        self._choices = dict(choices)
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._pauses_s: list[float] = []  # after each step, to measure the CPU
        self._slowdowns: list[float] = []  # the CPU's time after some steps, over that at the forecast
        self._watch: Callable[[], float] | None = None

    @cached_property
    def run(self) -> "SettledRun":
        """The run as ``stepcast predict`` settles it."""
        return self._settle(self._settled_choices)

    @cached_property
    def _settled_choices(self) -> FactDict:
        """The choices with the GPU at hand and the pace of its CPU, if none is named."""
        choices = {name: value for name, value in self._choices.items() if value is not None}
        if choices.pop("stored_fp32", False) and choices.get("precision") in ("bf16", "fp16"):
            choices["precision"] = f"autocast-{choices['precision']}"
        if "cluster" not in choices and "gpu" not in choices:
            choices["gpu"] = detect_gpu()
            if "calibration" not in choices:
                from stepcast.pytorch.profile import measure_host, watch_host

                choices["calibration"] = measure_host(sys.modules["torch"], choices["gpu"])
                self.facts["host_pace"] = choices["calibration"].pace
                self._watch = watch_host(sys.modules["torch"])
        return choices

    @staticmethod
    def _settle(choices: Facts) -> "SettledRun":
        from stepcast.questions.settle import settle

        given = read_choices(PredictQuestion, choices)
        return settle(PredictQuestion(**given, file="check", unchecked=frozenset(given)))

    @property
    def prediction(self) -> "Prediction":
        return self.run.prediction

    def forecast(self) -> "Prediction":
        """Write the forecast; raise a RunDoesNotFitError if it does not fit and the check is strict."""
        began = time.perf_counter()
        run, prediction = self.run, self.prediction
        fullest = max(prediction.memory, key=lambda stage: stage.total)
        low, high = prediction.interval_s or (prediction.step_s, prediction.step_s)
        self.facts |= {"predicted_s": prediction.step_s, "interval_s": [low, high], "verdict": str(fullest.verdict)}
        self.facts |= {f"{name}_bytes": getattr(fullest, name) for name in ("allocated", "reserved", "capacity")}
        gpus = f"{run.strategy.layout.gpus} x {run.cluster.gpu.name}"
        tokens_per_s = run.strategy.tokens / prediction.step_s
        pace = f"; CPU time x {self.facts['host_pace']:.2f}, measured here" if "host_pace" in self.facts else ""
        lines = [
            f"step {format_seconds(prediction.step_s)}, 90 % interval {format_seconds(low)} to {format_seconds(high)}; "
            f"{tokens_per_s:,.0f} tokens/s on {gpus} ({run.model.name}, {run.framework.name}){pace}",
            f"memory {format_bytes(fullest.total)} of {format_bytes(fullest.capacity)} (90 % interval "
            f"{format_bytes(fullest.low)} to {format_bytes(fullest.high)}): {fullest.verdict}",
            self._describe_end(),
        ]
        for line in lines:
            self.write(f"{PREFIX}{line}")
        self.facts["forecast_s"] = time.perf_counter() - began
        if self.strict and not prediction.fits:
            raise RunDoesNotFitError(f"{lines[1]}; 'stepcast predict' lists what would make it fit")
        return prediction

    def _describe_end(self) -> str:
        from stepcast.questions.runs import training_facts

        training = training_facts(self.run.question, self.run.strategy, self.prediction.step_s)
        if training is None:
            return "number of steps unknown: no finish time"
        seconds = training["steps"] * self.prediction.step_s
        self.facts |= {"steps": training["steps"], "finish_s": seconds, "cost": training["cost"]}
        end = datetime.now() + timedelta(seconds=min(seconds, 3e9))
        cost = f", {training['currency']}{training['cost']:,.2f}" if training["cost"] is not None else ""
        return f"{training['steps']:,} steps take {format_seconds(seconds)}, until {end:%Y-%m-%d %H:%M}{cost}"

    def begin_step(self) -> None:
        """Note that a step begins, after its data have been loaded."""
        self._begins.append(time.perf_counter())

    def end_step(self) -> None:
        """Note that a step ended; after enough of them, compare them with the forecast."""
        self._ends.append(time.perf_counter())
        self._watch_host()
        self._pauses_s.append(time.perf_counter() - self._ends[-1])
        if len(self._ends) == self.compare_after + SKIPPED_STEPS:
            self.compare()

    def _watch_host(self) -> None:
        """Measure the CPU again after some of the steps that are compared."""
        counted = len(self._ends) - SKIPPED_STEPS
        if self._watch is None or counted < 1 or counted > self.compare_after:
            return
        run_s = max(self._ends[-1] - self._begins[0], self.facts.get("finish_s", 0.0))
        if counted % max(1, self.compare_after // WATCHES) or sum(self._pauses_s) + WATCH_S > WATCH_SHARE * run_s:
            return
        try:
            self._slowdowns.append(self._watch())
        except RuntimeError:  # no memory left for it
            self._watch = None

    def step(self) -> None:
        """Note the end of a step in loops that do not say when one begins."""
        self.begin_step()
        self.end_step()

    def compare(self) -> None:
        """Write what the steps so far took against the forecast, and what explains the difference."""
        begins, ends = self._begins[SKIPPED_STEPS:], self._ends[SKIPPED_STEPS:]
        if len(begins) < 2:
            return
        # A pause lets the GPU finish what would have overlapped with the next step.
        all_rows = list(zip(pairwise(begins), ends, self._pauses_s[SKIPPED_STEPS:], strict=False))
        rows = [row for row in all_rows if row[2] < PAUSE_S] or all_rows
        steps = [after - before - pause for (before, after), _, pause in rows]
        measured_s = median(steps)
        # From the end of one step until the data of the next are there.
        loading_s = median(max(0.0, after - end - pause) for (_, after), end, pause in rows)
        predicted_s = float(self.facts.get("predicted_s") or self.prediction.step_s)
        low, high = self.facts.get("interval_s", [predicted_s, predicted_s])
        self.facts |= {"measured_s": measured_s, "loading_s": loading_s, "ratio": predicted_s / measured_s - 1}
        where = "inside" if low <= measured_s <= high else "outside"
        lines = [
            f"measured {format_seconds(measured_s)} a step, predicted {format_seconds(predicted_s)} "
            f"({format_change(predicted_s / measured_s - 1)}), {where} the 90 % interval"
        ]
        if self._slowdowns:
            predicted_s, line = self._forecast_at_pace(measured_s)
            lines += [line] if abs(predicted_s / self.facts["predicted_s"] - 1) > LARGE_SHARE else []
        lines += self._explain(measured_s, predicted_s, loading_s, max(steps) / measured_s)
        if "torch" in sys.modules and not has_gpu():  # a rehearsal on a CPU
            gpu = self.run.cluster.gpu.name
            lines = [f"measured {format_seconds(measured_s)} a step without a GPU; the forecast is for {gpu}"]
        lines += self._compare_memory()
        for line in lines:
            self.write(f"{PREFIX}{line}")

    def _forecast_at_pace(self, measured_s: float) -> tuple[float, str]:
        """Return the step predicted at the pace that the CPU had during the steps, and the sentence about it."""
        calibration = self._settled_choices["calibration"]
        slower = mean(self._slowdowns)  # a step lasts longer than one slice of a shared core
        now = replace(calibration, pace=calibration.pace * slower)
        now_s = self._settle({**self._settled_choices, "calibration": now}).prediction.step_s
        ratio = now_s / measured_s - 1
        self.facts |= {"host_pace_during": now.pace, "predicted_at_pace_s": now_s, "ratio_at_pace": ratio}
        change = f"{slower:.2f} times slower" if slower > 1 else f"{1 / slower:.2f} times faster"
        return now_s, (
            f"the CPU was {change} during these steps than at the forecast, which is {format_seconds(now_s)} at that "
            f"pace ({format_change(ratio)})"
        )

    def _explain(self, measured_s: float, predicted_s: float, loading_s: float, spread: float) -> list[str]:
        """Return a sentence for each part that explains a difference, measured ones first."""
        lines, loading = [], format_seconds(loading_s)
        if loading_s > LARGE_SHARE * measured_s:
            lines.append(f"data loading takes {loading} of each step: use more workers, or pack ahead")
        rest_s = measured_s - predicted_s - loading_s
        parts = {name: seconds for name, seconds in self.prediction.breakdown_s.items() if name != "compute"}
        largest = max(parts, key=lambda name: parts[name], default="")
        if abs(rest_s) > LARGE_SHARE * measured_s:
            word = "slower" if rest_s > 0 else "faster"
            lines.append(f"computation and communication are {format_seconds(abs(rest_s))} {word} than predicted")
        if largest and parts[largest] > LARGE_SHARE * predicted_s:
            lines.append(f"predicted outside computation: {largest} {format_seconds(parts[largest])}")
        if (slowest := gather_slowest(loading_s)) is not None and slowest[1] > loading_s + LARGE_SHARE * measured_s:
            lines.append(f"rank {slowest[0]} loads data for {format_seconds(slowest[1])}: the others wait for it")
        if spread > 1.2:
            lines.append(f"the slowest step took {spread:.1f} times the median")
        return lines

    def _compare_memory(self) -> list[str]:
        peaks = measure_peaks()
        if peaks is None or not all(peaks):  # no GPU, or nothing is on it
            return []
        parts = []
        for name, measured in zip(("allocated", "reserved"), peaks, strict=True):
            self.facts[f"measured_{name}_bytes"] = measured
            size = self.facts[f"{name}_bytes"]
            change = format_change(size / measured - 1)
            parts.append(f"{name} {format_bytes(measured)}, predicted {format_bytes(size)} ({change})")
        return ["memory " + "; ".join(parts)]


def has_gpu() -> bool:
    """Return True if PyTorch is loaded and sees a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


def detect_gpu() -> str:
    """Return the name of the GPU at hand; a ValueError without one."""
    require(has_gpu(), "no GPU at hand: name the one to forecast, such as check(trainer, gpu='h100-sxm')")
    return str(sys.modules["torch"].cuda.get_device_name(0))


def measure_peaks() -> tuple[int, int] | None:
    """Return the peaks of allocated and reserved bytes, or None without a GPU."""
    if not has_gpu():
        return None
    cuda = sys.modules["torch"].cuda
    return int(cuda.max_memory_allocated()), int(cuda.max_memory_reserved())


def gather_slowest(loading_s: float) -> tuple[int, float] | None:
    """Return the rank that loads data longest and its seconds, or None with one rank."""
    torch = sys.modules.get("torch")
    if torch is None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    seconds: list[float] = [0.0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(seconds, loading_s)
    rank = seconds.index(max(seconds))
    return rank, seconds[rank]


class ForecastCallback:
    """Forecast a run of transformers' Trainer when training begins, and compare it after some steps.

    ``Trainer(..., callbacks=[ForecastCallback(gpu="h100-sxm")])`` is all it takes. It is no subclass of
    TrainerCallback, so that stepcast does not import transformers; other events are ignored.
    """

    def __init__(
        self, run: RunCheck | None = None, *, strict: bool = False, compare_after: int = 20, write: Write | None = None,
        **choices: object,
    ) -> None:  # fmt: skip
        self.run, self._choices = run, choices
        self._make_check = partial(RunCheck, strict=strict, compare_after=compare_after, write=write)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):
            return lambda *args, **known: None
        raise AttributeError(name)

    def on_train_begin(
        self, args: object, state: object, control: object, model: object = None, **known: object
    ) -> None:
        if self.run is None:
            data = getattr(known.get("train_dataloader"), "dataset", None)
            script = SimpleNamespace(args=args, model=model, train_dataset=data)
            self.run = self._make_check({**describe(script), **self._choices})
            self.run.forecast()

    def on_step_begin(self, args: object, state: object, control: object, **known: object) -> None:
        if self.run is not None:
            self.run.begin_step()

    def on_step_end(self, args: object, state: object, control: object, **known: object) -> None:
        if self.run is not None:
            self.run.end_step()

    @property
    def facts(self) -> FactDict:
        """All figures of the check."""
        return self.run.facts if self.run is not None else {}


def build_lightning_callback(run: RunCheck) -> Script:
    """Return a callback of Lightning that calls *run* around each optimizer step."""
    try:
        library = import_module("lightning.pytorch.callbacks")
    except ImportError:
        library = import_module("pytorch_lightning.callbacks")
    base: Script = library.Callback

    class LightningForecast(base):  # type: ignore[misc]
        """Counts optimizer steps; each may have several batches."""

        seen_steps = -1

        def on_train_batch_start(self, trainer: Script, *known: object) -> None:
            if trainer.global_step != self.seen_steps:
                self.seen_steps = trainer.global_step
                run.begin_step()

        def on_train_batch_end(self, trainer: Script, *known: object) -> None:
            if trainer.global_step != self.seen_steps:
                run.end_step()

    return LightningForecast()


def check(
    script: Script = None, *, model: Script = None, strict: bool = False, compare_after: int = 20,
    write: Write | None = None, **choices: object,
) -> RunCheck:  # fmt: skip
    """Write the forecast of a training script before its first step, and compare it with the first steps.

    Args:
        script: a Trainer (transformers, TRL), an Accelerator, a Trainer of Lightning, torchtitan's job_config or
            Megatron-LM's arguments; without one, *choices* describe the run.
        model: the model, where *script* does not hold it: a module with a Hugging Face config, or a name.
        strict: raise a RunDoesNotFitError if the run does not fit into GPU memory.
        compare_after: steps after which they are compared with the forecast.
        write: takes each line (default: print, on the first rank).
        choices: choices of ``stepcast.predict`` that win over what *script* says, such as ``gpu="h100-sxm"``.
    """
    named = {"model": model} if isinstance(model, str) else {}
    is_lightning = hasattr(script, "callbacks") and hasattr(script, "fit")
    described = describe(None if is_lightning else script, model)
    run = RunCheck({**described, **named, **choices}, strict=strict, compare_after=compare_after, write=write)
    run.forecast()
    # Trainers call the run around each step; others call it themselves.
    if hasattr(script, "add_callback"):
        script.add_callback(ForecastCallback(run))
    elif is_lightning:
        script.callbacks.append(build_lightning_callback(run))
    return run


def describe(script: Script, model: Script = None) -> FactDict:
    """Return the choices of ``predict`` that a Trainer, an Accelerator, a configuration or arguments make."""
    if script is None:
        choices: FactDict = {}
    elif hasattr(script, "args") and hasattr(script.args, "per_device_train_batch_size"):
        return _describe_trainer(script)
    elif hasattr(script, "gradient_accumulation_steps") and hasattr(script, "state"):
        choices = _options(tuning.read_accelerate(_accelerate_table(script)))
    elif hasattr(script, "tensor_model_parallel_size") and hasattr(script, "micro_batch_size"):
        flags = {f"--{name}": value for name, value in vars(script).items() if isinstance(value, str | int | float)}
        choices = {**_options(megatron.read_test(flags)), "gpus": getattr(script, "world_size", None)}
    elif titan := _titan_table(script):
        choices = _options(torchtitan.read(titan))
    else:
        raise TypeError(
            f"check() knows no {type(script).__name__}: give a Trainer, an Accelerator, torchtitan's job_config, "
            "Megatron-LM's arguments, or the choices of stepcast.predict as keywords"
        )
    return {**choices, **(_describe_model(model) if hasattr(model, "config") else {})}


def _options(config: RunConfig) -> FactDict:
    return {**({"model": config.model} if config.model else {}), "framework": config.framework, **config.options}


def _describe_trainer(trainer: Script) -> FactDict:
    """Return the choices of a Trainer: its arguments, the model it has, and the samples that it will see."""
    table = {name: value for name, value in trainer.args.to_dict().items() if value is not None}
    deepspeed = getattr(trainer.args, "hf_deepspeed_config", None)
    if deepspeed is not None:
        table["deepspeed"] = deepspeed.config
    table["trainer_kind"] = next((task for task in ("dpo", "reward") if task in type(trainer).__name__.lower()), "")
    choices = _options(tuning.read(table, "trainer"))
    for name in ("epochs", "steps", "samples", "gpus", "batching"):
        choices.pop(name, None)
    choices |= _describe_model(trainer.model, choices.get("framework", ""))
    world = max(1, int(getattr(trainer.args, "world_size", 1)))
    choices["gpus"] = world
    choices |= _describe_samples(trainer, choices)
    return {**choices, "steps": _count_steps(trainer, choices, world)}


def _describe_model(model: Script, framework: str = "") -> FactDict:
    """Return the model, its adapters and the format of its weights."""
    table = model.config.to_dict()
    name = str(table.get("_name_or_path") or table.get("name_or_path") or table.get("model_type") or "model")
    kinds = (str, int, float, list, dict, type(None))
    plain = {key: value for key, value in table.items() if isinstance(value, kinds)}
    choices: FactDict = {"model": read_config(json.dumps(plain, default=str), name)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if adapters := getattr(model, "peft_config", None):
        config = next(iter(adapters.values()))
        choices |= {"lora_rank": config.r, "lora_dropout": float(config.lora_dropout or 0.0)}
        if isinstance(config.target_modules, list | tuple | set):
            choices["lora_targets"] = ",".join(sorted(config.target_modules))
        choices["dora"] = bool(getattr(config, "use_dora", False)) or None
        formats = {"nf4": "is_loaded_in_4bit", "int8": "is_loaded_in_8bit"}
        choices["base_weights"] = next((word for word, flag in formats.items() if getattr(model, flag, False)), None)
        wide = any(str(parameter.dtype) == "torch.float32" for parameter in trained)
        if framework in ("", "peft", "trainer"):
            choices["framework"] = "peft" if wide else "trainer"
    elif trained and str(trained[0].dtype) in FORMATS:
        choices |= FORMATS[str(trained[0].dtype)]
    return choices


def _describe_samples(trainer: Script, choices: Facts) -> FactDict:
    """Return the length of sequences: the tool's, or that of some samples of the data set."""
    longest = choices.get("seq")
    data: Script = getattr(trainer, "train_dataset", None)
    size = len(data) if hasattr(data, "__getitem__") and hasattr(data, "__len__") else 0
    step = max(1, size // LOOKED_AT)
    samples = [data[index] for index in range(0, min(size, LOOKED_AT * step), step)]
    ids = [sample["input_ids"] for sample in samples if isinstance(sample, Mapping) and "input_ids" in sample]
    lengths = [len(tokens) for tokens in ids if tokens is not None]
    if not lengths:
        return {"seq": longest} if longest else {}
    if min(lengths) == max(lengths):
        return {"seq": min(max(lengths), longest or max(lengths))}
    counts = ",".join(f"{length}:{count}" for length, count in sorted(Counter(lengths).items()))
    return {"seq": longest or max(lengths), "lengths": counts}


def _count_steps(trainer: Script, choices: Facts, world: int) -> int | None:
    if trainer.args.max_steps and trainer.args.max_steps > 0:
        return int(trainer.args.max_steps)
    data = getattr(trainer, "train_dataset", None)
    if data is None or not hasattr(data, "__len__"):
        return None
    per_step: int = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps * world
    return max(1, math.ceil(len(data) / per_step * float(trainer.args.num_train_epochs)))


def _accelerate_table(accelerator: Script) -> dict[str, object]:
    """Return an Accelerator as the keys of accelerate's YAML."""
    state = accelerator.state
    kind = str(getattr(state, "distributed_type", "NO")).rpartition(".")[2].upper()
    table: dict[str, object] = {
        "distributed_type": kind,
        "num_processes": int(state.num_processes),
        "mixed_precision": str(getattr(state, "mixed_precision", "no")),
        "gradient_accumulation_steps": int(accelerator.gradient_accumulation_steps),
    }
    plugin = getattr(state, f"{kind.lower()}_plugin", None)
    if kind == "DEEPSPEED" and plugin is not None:
        table["deepspeed_config"] = {"zero_stage": int(getattr(plugin, "zero_stage", 0) or 0)}
    if kind == "FSDP" and plugin is not None:
        table["fsdp_config"] = {
            "fsdp_version": getattr(plugin, "fsdp_version", 2),
            "fsdp_reshard_after_forward": str(getattr(plugin, "reshard_after_forward", True)),
            "fsdp_backward_prefetch": str(getattr(plugin, "backward_prefetch", "")),
        }
    return table


def _titan_table(script: Script) -> FactDict | None:
    """Return torchtitan's configuration as the tables of its TOML, if *script* is or has one."""
    config = getattr(script, "job_config", script)
    table = asdict(config) if is_dataclass(config) and not isinstance(config, type) else config
    return table if isinstance(table, dict) and torchtitan.looks_like(table) else None
