"""Kernels of traced steps of Hugging Face models on an H200 (tools/trace_hf_steps.py), class by class."""

import csv
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepcast.forecast.predict import compute_pricer
from stepcast.generate.workload import generate
from stepcast.hardware import load_cluster
from stepcast.ir.work import Attention, Compute, GroupedMatmul, Matmul
from stepcast.validate.h200 import shipped_folder
from stepcast.validate.transformers import CLUSTER, Setting

FOLDER = shipped_folder().parent / "transformers"
TRACED = Path(__file__).parent.parent / "data" / "traced-h200.csv"
CLASSES = ("products", "attention", "streams")


@dataclass(frozen=True)
class Traced:
    """Milliseconds of a class in one phase of a step, measured and predicted."""

    name: str
    kind: str
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def class_of(work: Compute) -> str:
    if isinstance(work, Matmul | GroupedMatmul):
        return "products"
    return "attention" if isinstance(work, Attention) else "streams"


def predicted_ms(record: dict[str, str]) -> dict[tuple[str, str], float]:
    base, _, layers = record["model"].partition("@")
    setting = Setting({**record, "model": base, "layers": layers, "step_ms": "1"}, FOLDER)
    workload = generate(setting.model, setting.strategy, setting.framework)
    price = compute_pricer(workload, load_cluster(CLUSTER), None, setting.framework.attention)
    found: dict[tuple[str, str], float] = defaultdict(float)
    for block in workload.stages[0].body:
        for layer in block.layers:
            backward = (*layer.input_gradient, *layer.weight_gradient)
            for phase, ops in (("forward", layer.forward), ("backward", backward)):
                for op in ops:
                    if isinstance(op.work, Compute):
                        found[phase, class_of(op.work)] += price(op.work).seconds * 1e3 * block.repeat
    return found


def traced() -> Iterator[Traced]:
    with TRACED.open() as lines:
        for record in csv.DictReader(lines):
            predicted = predicted_ms(record)
            for kind in CLASSES:
                measured = float(record[f"{kind}_ms"])
                if measured > 1.0:
                    name = " ".join(record[key] for key in ("model", "batch", "seq", "setting", "phase"))
                    yield Traced(name, kind, measured, predicted[record["phase"], kind])


def test_every_class_of_kernels_is_near_what_was_traced() -> None:
    rows = list(traced())
    assert len(rows) > 120
    for kind in CLASSES:
        own = [row for row in rows if row.kind == kind]
        errors = np.array([row.error for row in own])
        assert abs(errors).mean() < 0.08, (kind, json.dumps([(row.name, round(row.error, 3)) for row in own]))
        whole = sum(row.predicted_ms for row in own) / sum(row.measured_ms for row in own)
        assert 0.96 < whole < 1.04, (kind, whole)
