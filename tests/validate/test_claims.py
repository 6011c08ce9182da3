"""What the README says of our accuracy, measured as a user would."""

import csv
from collections.abc import Iterator, Mapping
from importlib.resources import files

from stepcast.forecast.predict import predict
from stepcast.hardware import load_cluster
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Execution, Framework, Kernels
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import Optimizer, Recompute, RecomputeKind, Strategy
from stepcast.models.columns import model_of_columns
from tests.shared import ROOT

Record = Mapping[str, str]


def steps() -> Iterator[Record]:
    """The training steps measured on one H200; experts in a Python loop are not predicted."""
    for name in ("models.csv", "models_compiled_moe.csv"):
        text = files("stepcast").joinpath(f"data/h200/{name}").read_text(encoding="utf-8")
        yield from (row for row in csv.DictReader(text.splitlines()) if row.get("experts", "0") == "0")


def strategy(step: Record) -> Strategy:
    batch = int(step["batch"])
    return Strategy(
        layout=Layout(),
        micro_batch=batch,
        global_batch=batch,
        seq=int(step["seq"]),
        precision=DType(step["dtype"]),
        recompute=Recompute(RecomputeKind.FULL if step["recompute"] == "full" else RecomputeKind.NONE),
    )


def framework(step: Record) -> Framework:
    dtype, compiled = DType(step["dtype"]), step.get("compiled") == "1"
    return Framework(
        gradient_dtype=dtype,
        optimizer=Optimizer(moment_dtype=dtype, master_weights=False),
        flash_attention=step["attention"] == "flash",
        execution=Execution.EAGER,
        kernels=Kernels.COMPILED if compiled else Kernels.PLAIN,
    )


def test_training_steps_as_predict_has_them() -> None:
    cluster = load_cluster("hgx-h200")
    errors = []
    for step in steps():
        model = model_of_columns(step["model"], {**step, "kv_heads": step["kv"], "seq": ""})
        predicted_s = predict(model, cluster, strategy(step), framework(step)).report.step_s
        errors.append(abs(predicted_s / (float(step["step_ms"]) * 1e-3) - 1))
    assert len(errors) == 12
    mean, worst = sum(errors) / len(errors), max(errors)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"`predict` {mean * 100:.1f} %, worst {worst * 100:.1f} %" in readme
