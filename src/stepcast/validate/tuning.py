"""The fine-tuning set: steps of LoRA, QLoRA, 8-bit Adam, packing, checkpointing and DPO on one H200, measured by us.

Under transformers' Trainer, but for DPO, whose loop is TRL's written out (``trainer``: its loss inside Trainer).
``pace`` is the host's: the time of small operators and of a small training step over those on the host of the
constants, in the visit or, in the last ones, next to the step; empty where it was not measured.
``held`` bytes of earlier steps were still allocated when a step's peaks were measured; they are subtracted (the peaks
of the ninth visit were lost). ``forward_ms``, ``backward_ms`` and ``update_ms`` are the host's, of all micro-batches.
``before_*`` are forecasts made before measuring (tools/measure_tuning.py; steps of the tenth visit are those of example
configurations, of the next two chosen at random, of the last two a design over methods and sizes). The CPU is the
bottleneck of a step that is predicted more than 5 % longer with a CPU 1.3 times slower, the GPU of the others.
"""

import shlex
from pathlib import Path

from stepcast.cost.calibration import Calibration
from stepcast.ir.facts import FactDict
from stepcast.questions.choices import build_question, spell_choices
from stepcast.questions.question import PredictQuestion
from stepcast.questions.settle import settle
from stepcast.validate import scoreboard

FILE = "tuning.csv"
SLOWER_CPU, LONGER_STEP = 1.3, 1.05


def read_choices_of(record: scoreboard.Record, folder: Path) -> FactDict:
    """Return the choices of ``predict`` that a row's words mean."""
    words = record["setting"].split()
    choices: FactDict = {"framework": "peft"}
    for word in words:
        if word.startswith("lora"):
            choices["lora_rank"] = int(word.removeprefix("lora"))
        elif word.startswith("freeze"):
            choices |= {"framework": "trainer", "train_layers": int(word.removeprefix("freeze"))}
        else:
            choices |= scoreboard.load_table("rows/tuning")[word]
    if {"full", "dpo"} <= set(words) and "trainer" not in words:
        choices["framework"] = "transformers"
    if "packed" in words:
        choices["lengths"] = f"{record['document']}:1"
    return {
        "model": str(folder / "configs" / f"{record['model']}.json"),
        "gpu": "h200",
        **choices,
        "micro_batch": int(record["batch"]),
        "accumulation": int(record["accumulation"]),
        "seq": int(record["seq"]),
    }


def measure_tuning(folder: str) -> scoreboard.Measurements:
    """Compare the steps of ``tuning.csv`` in *folder* and their peaks with forecasts."""
    peaks: dict[str, list[scoreboard.Pair]] = {"allocated": [], "reserved": []}
    before: dict[str, list[scoreboard.Pair]] = {}
    paced: dict[str, list[scoreboard.Pair]] = {"GPU": [], "CPU": []}

    def compare(record: scoreboard.Record) -> scoreboard.ScoredRow:
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
        return scoreboard.ScoredRow(label, measured_s, prediction.step_s, tags, prediction.interval_s)

    rows, skipped = scoreboard.compare_each(
        scoreboard.read_records(folder, FILE), compare, lambda record: record["setting"]
    )
    names = ("mean_abs_error", "worst_abs_error", "mean_error")
    compared = {
        **{f"{name} memory": pairs for name, pairs in peaks.items()},
        **before,
        "pace of the host measured": [*paced["GPU"], *paced["CPU"]],
        **{f"the same, {name}-limited steps": pairs for name, pairs in paced.items()},
    }
    figures = {
        name: value for part, pairs in compared.items() for name, value in scoreboard.error_figures(part, pairs, *names)
    }
    return scoreboard.Measurements(scoreboard.columns_of(rows), skipped, figures=figures, details=("command",))
