"""The transformers sets: training and fine-tuning steps of Hugging Face models on one H200, measured by us.

Every row is a ``config.json`` and the words of its setting (``data/rows/settings.toml``); each goes through the public
``predict`` with the choices that these words mean. ``tools/measure_hf_steps.py`` measured them, and
``tools/measure_tuning.py`` those of fine-tuning.
"""

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from stepcast.cost.band import kind_of
from stepcast.cost.calibration import Calibration
from stepcast.cost.calibration import calibration as calibration_of
from stepcast.forecast.captured import Spread, predict_captured
from stepcast.forecast.predict import predict
from stepcast.forecast.prediction import Prediction
from stepcast.hardware import load_cluster
from stepcast.inputs.source import read_toml
from stepcast.ir.children import block_interrupts, follow_parent
from stepcast.ir.types import FactDict, group_by_key, require
from stepcast.models.catalog import load_model
from stepcast.questions.choices import build_question, spell_choices, spell_option
from stepcast.questions.question import PredictQuestion
from stepcast.questions.settle import settle
from stepcast.validate import scoreboard

CLUSTER, GPU = "hgx-h200", "h200"
Visit = tuple[Path, scoreboard.Record]  # a row and its file
CapturedRows = tuple[list[scoreboard.ScoredRow], list[scoreboard.Pair], str]  # steps, peaks, why there are none
ROW = ("model", "layers", "batch", "seq", "setting")
NEEDED = ("model", "batch", "seq", "setting", "step_ms")
SETTINGS = scoreboard.load_table("rows/settings")  # words -> choices of predict
COMMAND = "command"
ERRORS = ("mean_abs_error", "worst_abs_error", "mean_error")


def setting_words(record: scoreboard.Record) -> set[str]:
    if missing := [name for name in NEEDED if record.get(name) is None]:
        raise ValueError(f"column {missing[0]} is missing")
    words = set(record["setting"].split())
    if unknown := sorted(words - {*SETTINGS["steps"]}):
        raise ValueError(f"{unknown[0]!r} is no word of a setting")
    return words


def config_words(record: scoreboard.Record, folder: Path) -> str:
    """Return the config of a row, with as many layers as it ran."""
    path = folder / "configs" / f"{record['model']}.json"
    return f"{path}:layers={record['layers']}" if record.get("layers") else str(path)


class Setting:
    """The setting of a row, and the command of ``predict`` that means the same but for the kernel of the optimizer."""

    def __init__(self, record: scoreboard.Record, folder: Path) -> None:
        words, model = setting_words(record), config_words(record, folder)
        if "experts-eager" in words:
            raise ValueError("experts in a Python loop, which waits for the GPU at each, are not modelled")
        batch, seq = int(record["batch"]), int(record["seq"])
        self.choices: FactDict = {"model": model, "cluster": CLUSTER, "framework": "transformers", "gpus": 1}
        self.choices |= {"micro_batch": batch, "global_batch": batch, "seq": seq, "clipping": False}
        for word, choices in SETTINGS["steps"].items():
            self.choices |= choices if word in words else {}
        if zeros := scoreboard.unseen_share(load_model(model), batch * seq):
            self.choices["zero_gradients"] = zeros
        run = settle(build_question(PredictQuestion, self.choices))
        self.model, self.strategy, optimizer = run.model, run.strategy, run.framework.optimizer
        self.framework = replace(run.framework, optimizer=replace(optimizer, fused="fused" in words))

    @property
    def command(self) -> str:
        options = chain.from_iterable(spell_option(name, value) for name, value in self.choices.items())
        return shlex.join(["stepcast", "predict", *options])


def step_files(folder: str) -> list[Path]:
    """Return the csv files in *folder*, or that one file."""
    path = Path(folder)
    files = sorted(path.glob("steps*.csv")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"{path}: expected steps_eager.csv, steps_compiled.csv, or a csv with their columns")
    return files


def measure_transformers(folder: str, calibration: str = "") -> scoreboard.Measurements:
    """Compare every ``steps*.csv`` in *folder*, or that one file, with the configs next to them.

    *calibration* names a profile of the GPU.
    """
    own = calibration_of(read_toml(calibration), calibration) if calibration else None
    if own is not None and own.gpu != GPU:
        raise ValueError(f"{calibration} was measured on {own.gpu}; these steps ran on an {GPU}")
    option = f" --calibration {shlex.quote(calibration)}" if calibration else ""
    cluster = load_cluster(CLUSTER)
    peaks: list[scoreboard.Pair] = []

    def compare(visit: Visit) -> list[scoreboard.ScoredRow]:
        file, record = visit
        setting = Setting(record, file.parent)
        prediction = predict(setting.model, cluster, setting.strategy, setting.framework, calibration=own)
        kind = kind_of(setting.model, cluster, setting.strategy)
        return list(step_rows(record, prediction, setting.command + option, peaks, ("kind", kind)))

    return measure_visits(merge_visits(step_files(folder)), compare, peaks)


def measure_visits(
    visits: Iterable[Visit],
    compare: Callable[[Visit], list[scoreboard.ScoredRow]],
    peaks: Sequence[scoreboard.Pair],
    *notes: str,
) -> scoreboard.Measurements:
    """Return steps and their phases, and the bytes allocated at their peaks, which *compare* adds to *peaks*."""
    rows, skipped = scoreboard.compare_each(visits, compare, lambda visit: visit[0].name)
    table, figures = scoreboard.columns_of(rows), scoreboard.error_figures({"peak memory": peaks}, *ERRORS)
    selections = table.select("phase", "step", *scoreboard.PHASES)
    return scoreboard.Measurements(table, skipped, selections, figures, notes, details=(COMMAND,))


def merge_visits(files: Sequence[Path]) -> Iterator[Visit]:
    """Yield every row; a row that was measured more than once has the medians of its times.

    It waits for a host whose pace differs from visit to visit.
    """
    rows = ((file, record) for file in files for record in scoreboard.read_records(file))
    for visits in group_by_key((tuple(map(record.get, ROW)), (file, record)) for file, record in rows).values():
        file, merged = visits[0]
        for name in [name for name in merged if name.endswith("_ms") and len(visits) > 1]:
            known = [float(record[name]) for _, record in visits if record.get(name)]
            merged = {**merged, name: repr(median(known)) if known else ""}
        yield file, merged


def step_rows(
    record: scoreboard.Record,
    prediction: Prediction,
    command: str,
    peaks: list[scoreboard.Pair],
    *other_tags: tuple[str, str],
) -> Iterator[scoreboard.ScoredRow]:
    """Yield the step of *record* and its phases, as far as they were measured; its peak goes into *peaks*."""
    layers = f"@{record['layers']}" if record.get("layers") else ""
    batch, seq = int(record["batch"]), int(record["seq"])
    name = f"{record['model']}{layers} {batch} x {seq} {record['setting']}".strip()
    tags = {
        "model": record["model"],
        **dict(other_tags),
        "setting": " ".join(sorted(set(record["setting"].split()) - {"fused"})) or "eager",
        "size": "host-bound" if batch * seq <= 1024 else "usual",
        COMMAND: command,
    }
    if record.get("peak_bytes"):
        peaks.append((float(record["peak_bytes"]), prediction.memory[0].allocated))
    for phase, predicted_s in {"step": prediction.step_s, **scoreboard.split_phases_s(prediction)}.items():
        if measured_ms := record.get(f"{phase}_ms"):
            ends, own_tags = prediction.interval_s if phase == "step" else None, {"phase": phase, **tags}
            yield scoreboard.ScoredRow(f"{name} {phase}", float(measured_ms) * 1e-3, predicted_s, own_tags, ends)


# The transformers set by way of ``capture``: the same measured steps, each program traced, not generated.
#
# Needs PyTorch and transformers; a row takes some seconds. It is measured when it is asked for by name.

# A process takes half a gigabyte and some seconds to load PyTorch.
MOST_WORKERS, ROWS_OF_A_WORKER = 8, 6


def measure_captured(*folders: str) -> scoreboard.Measurements:
    """Compare every ``steps*.csv`` in *folders*, or that one file, with the configs next to them."""
    from stepcast.pytorch.load import load_torch, load_transformers

    torch, library = load_torch("capture").__version__, load_transformers("capture").__version__
    note = f"captured without a GPU by PyTorch {torch} and transformers {library}, whose code may differ"
    peaks: list[scoreboard.Pair] = []
    asked = list(merge_visits([file for folder in folders for file in step_files(folder)]))
    with _workers(len(asked)) as map_each:
        results = iter(map_each(_compare_captured, asked))

        def compare(visit: Visit) -> list[scoreboard.ScoredRow]:
            rows, own_peaks, why = next(results)
            require(not why, why)
            peaks.extend(own_peaks)
            return rows

        return measure_visits(asked, compare, peaks, note)


@contextmanager
def _workers(rows: int) -> Iterator[Callable[..., Iterable[CapturedRows]]]:
    """Yield ``map`` over processes that load PyTorch once each; for a few rows the plain ``map``."""
    count = min(MOST_WORKERS, os.cpu_count() or 1, rows // ROWS_OF_A_WORKER)
    if count < 2:
        yield map
        return
    with ProcessPoolExecutor(count, get_context("spawn"), follow_parent, (os.getpid(),)) as pool:
        with block_interrupts():
            pool.submit(os.getpid)  # starts all of them
        yield pool.map


def _compare_captured(visit: Visit) -> CapturedRows:
    """Return the rows of one step and its peak; or why there are none."""
    from stepcast.pytorch.capture.program import CaptureOptions, capture

    (file, record), peaks, zeros = visit, list[scoreboard.Pair](), 0.0
    try:
        program, words = config_words(record, file.parent), setting_words(record)
        options = CaptureOptions(
            batch=int(record["batch"]),
            seq=int(record["seq"]),
            dtype="fp32" if "fp32" in words else "bf16",
            autocast="autocast" in words,
            checkpoint="checkpoint" in words,
            fused="fused" in words,
            # Which the library chose when it ran; a newer one may choose otherwise.
            attention=record.get("attention") or ("eager" if "attn-eager" in words else ""),
            experts=record.get("experts") or ("eager" if "experts-eager" in words else ""),
            compiled="compile" in words,
        )
        with suppress(ValueError):  # a model that is not known by its config
            zeros = scoreboard.unseen_share(load_model(program), options.batch * options.seq)
        prediction = predict_captured(capture(program, options), load_cluster(CLUSTER), Spread(zero_gradients=zeros))
    except ValueError as error:
        return [], [], str(error)
    given = {
        "--autocast": options.autocast,
        "--checkpoint": options.checkpoint,
        "--no-fused-optimizer": not options.fused,
        f"--attention {options.attention}": options.attention,
        f"--experts {options.experts}": options.experts,
        "--compiled": options.compiled,
        f"--zero-gradients {zeros}": zeros,
    }
    command = " ".join([
        f"stepcast capture {program} --batch {options.batch} --seq {options.seq} --dtype {options.dtype}",
        *(word for word, is_given in given.items() if is_given), "--predict --gpu h200",
    ])  # fmt: skip
    return list(step_rows(record, prediction, command, peaks)), peaks, ""


# The fine-tuning set: LoRA, QLoRA, 8-bit Adam, packing, checkpointing and DPO.
#
# Under transformers' Trainer, but for DPO, whose loop is TRL's written out (``trainer``: its loss inside Trainer).
# ``pace`` is the host's: the time of small operators and of a small training step over those on the host of the
# constants, in the visit or, in the last ones, next to the step; empty where it was not measured.
# ``held`` bytes of earlier steps were still allocated when a step's peaks were measured; they are subtracted (the peaks
# of the ninth visit were lost). ``forward_ms``, ``backward_ms`` and ``update_ms`` are the host's, of all micro-batches.
# ``before_*`` are forecasts made before measuring (steps of the tenth visit are those of example configurations, of the
# next two chosen at random, of the last two a design over methods and sizes). The CPU is the bottleneck of a step that
# is predicted more than 5 % longer with a CPU 1.3 times slower, the GPU of the others.

SLOWER_CPU, LONGER_STEP = 1.3, 1.05


def read_choices_of(record: scoreboard.Record, folder: Path) -> FactDict:
    """Return the choices of ``predict`` that a row's words mean."""
    words = record["setting"].split()
    model = str(folder / "configs" / f"{record['model']}.json")
    choices: FactDict = {"model": model, "gpu": "h200", "framework": "peft"}
    for word in words:
        if word.startswith("lora"):
            choices["lora_rank"] = int(word.removeprefix("lora"))
        elif word.startswith("freeze"):
            choices |= {"framework": "trainer", "train_layers": int(word.removeprefix("freeze"))}
        else:
            choices |= SETTINGS["tuning"][word]
    if {"full", "dpo"} <= set(words) and "trainer" not in words:
        choices["framework"] = "transformers"
    if "packed" in words:
        choices["lengths"] = f"{record['document']}:1"
    columns = {"micro_batch": "batch", "accumulation": "accumulation", "seq": "seq"}
    return choices | {name: int(record[column]) for name, column in columns.items()}


def measure_tuning(folder: str) -> scoreboard.Measurements:
    """Compare the steps of ``tuning.csv`` in *folder* and their peaks with forecasts."""
    peaks: dict[str, list[scoreboard.Pair]] = {"allocated": [], "reserved": []}
    before: dict[str, list[scoreboard.Pair]] = {}
    paced: dict[str, list[scoreboard.Pair]] = {"GPU": [], "CPU": []}

    def compare(record: scoreboard.Record) -> list[scoreboard.ScoredRow]:
        choices = read_choices_of(record, Path(folder))

        def step_s(pace: float) -> float:
            host = Calibration("h200", {}, pace=pace)
            return settle(build_question(PredictQuestion, {**choices, "calibration": host})).prediction.step_s

        prediction = settle(build_question(PredictQuestion, choices)).prediction
        bottleneck = "CPU" if step_s(SLOWER_CPU) > LONGER_STEP * prediction.step_s else "GPU"
        measured_s, (stage,) = float(record["step_ms"]) * 1e-3, prediction.memory
        for name, pairs in peaks.items() if record["held"] else ():
            pairs.append((float(record[name]) - float(record["held"]), getattr(stage, name)))
        if record["before_ms"]:
            pairs = before.setdefault(f"predicted before visit {record['visit']}", [])
            pairs.append((measured_s, float(record["before_ms"]) * 1e-3))
        if record["pace"]:
            paced[bottleneck].append((measured_s, step_s(float(record["pace"]))))
        label = f"{record['model']} {record['batch']} x {record['seq']} x {record['accumulation']} {record['setting']}"
        command = shlex.join(["stepcast", "predict", *spell_choices(choices)])
        named = {name: record[name] for name in ("visit", "setting", "model")}
        tags = {"bottleneck": bottleneck, **named, "command": command}
        return [scoreboard.ScoredRow(label, measured_s, prediction.step_s, tags, prediction.interval_s)]

    records = scoreboard.read_records(folder, "tuning.csv")
    rows, skipped = scoreboard.compare_each(records, compare, lambda record: record["setting"])
    compared = {
        **{f"{name} memory": pairs for name, pairs in peaks.items()},
        **before,
        "pace of the host measured": [*paced["GPU"], *paced["CPU"]],
        **{f"the same, {name}-limited steps": pairs for name, pairs in paced.items()},
    }
    figures = scoreboard.error_figures(compared, *ERRORS)
    return scoreboard.Measurements(scoreboard.columns_of(rows), skipped, figures=figures, details=(COMMAND,))
