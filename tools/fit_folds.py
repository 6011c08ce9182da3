"""Repeat the fits of the operator prices with one family of rows left out at a time, for cross-validation.

    python tools/fit_folds.py --h200 src/stepcast/data/h200 [--neusight FOLDER]

Run it after ``tools/fit_compute.py``; writes src/stepcast/data/fits/folds.toml, from which ``stepcast
validate`` predicts every row by constants that have not seen it. A family is a weight shape for matmuls, a
head configuration for attention, a tensor shape for memory-bound operators, a GPU for NeuSight's set. Takes
some minutes on one core.
"""

import argparse
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fit_compute import (
    BATCHED_FREE,
    STREAM_FREE,
    TENSOR_FREE,
    TF32_FREE,
    attention_free,
    attention_predictor,
    fit_late,
    grouped_predictor,
    long_enough,
    matmul_predictor,
    shared,
    stream_predictor,
)
from fit_neusight import LATEST, MATMUL, STREAMS, Points, all_points, fit_memory, fit_simt, without
from fit_tables import OUT, Free, Row, column, fit_keys, literal, put, read, with_values
from minimise import Vector

from stepcast.cost.fits import ComputeFit, merge_tables
from stepcast.validate.h200 import FITTED_FILES, family_of
from stepcast.validate.scoreboard import fit_digest

Predictor = Callable[[list[Row]], Callable[[ComputeFit], Vector]]
Fold = dict[str, Any]
FOLDS = 7


def family_folds(
    table: dict[str, Any],
    rows: list[Row],
    free: Free,
    predictor: Predictor,
    more: Sequence[Row] = (),
    only: Callable[[list[Row]], list[Row]] = list,
) -> list[Fold]:
    """One fit per part of the families in *rows*, which are all of one kind.

    *more* rows are in every fit; of the rest a fit sees *only* some.
    """
    kind, _ = family_of(rows[0])
    families = [family_of(row)[1] for row in rows]
    unique = sorted(set(families))
    found = []
    for part in range(min(FOLDS, len(unique))):
        held = unique[part::FOLDS]
        train = [row for row, family in zip(rows, families, strict=True) if family not in held]
        train = [*only(train), *more]
        values = fit_keys(table, free, predictor(train), column(train, "ms") * 1e-3)
        found.append({"kind": kind, "held": [list(family) for family in held], "values": nested(values)})
    return found


def nested(values: dict[str, float]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    put(result, values)
    return result


def shared_streams(table: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The constants of every kind of stream once the free ones are spread over their relatives."""
    flat = {f"stream.{name}.{key}": x for name, entry in values["stream"].items() for key, x in entry.items()}
    fit = shared(with_values(table, list(flat), np.array(list(flat.values()))))
    return {
        name: {key: value for key in entry if (value := getattr(fit.streams[name], key)) != entry[key]}
        for name, entry in table["stream"].items()
    }


def h200_folds(table: dict[str, Any], folder: Path) -> list[Fold]:
    ops = [row for name in FITTED_FILES for row in read(folder / name)]
    kinds: dict[str, list[Row]] = {}
    for row in ops:
        kinds.setdefault(family_of(row)[0], []).append(row)
    found = family_folds(table, kinds["linear bf16"], TENSOR_FREE, matmul_predictor)
    for dtype in ("fp16", "tf32", "fp8"):
        one: Free = TF32_FREE if dtype == "tf32" else {f"matrix_efficiency.{dtype}": (0.95, 0.5, 1.0)}
        found += family_folds(table, kinds[f"linear {dtype}"], one, matmul_predictor, only=long_enough)
    found += family_folds(table, kinds["bmm bf16"], BATCHED_FREE, matmul_predictor)
    own: Free = {f"matmul.simt_of.{LATEST}.{name}": bounds for name, bounds in MATMUL.items()}
    for kind in ("linear fp32", "bmm fp32"):
        rest = [row for name in ("linear fp32", "bmm fp32") if name != kind for row in kinds[name]]
        found += family_folds(table, kinds[kind], own, matmul_predictor, rest)
    two: Free = {"grouped_s": (1e-7, 1e-9, 1e-5), "grouped_efficiency": (0.9, 0.5, 1.0)}
    found += family_folds(table, kinds["grouped"], two, grouped_predictor)
    for phase in ("forward", "backward"):

        def predictor(rows: list[Row], phase: str = phase) -> Callable[[ComputeFit], Vector]:
            return attention_predictor(rows, phase)

        found += family_folds(table, kinds[f"attention {phase}"], attention_free(phase), predictor)
    streams = family_folds(table, kinds["memory-bound"], STREAM_FREE, stream_predictor)
    for fold in streams:
        fold["values"]["stream"] = shared_streams(table, fold["values"])
        held = [tuple(family) for family in fold["held"]]
        train = [row for row in kinds["memory-bound"] if family_of(row)[1] not in held]
        put(fold["values"], fit_late(merge_tables(table, fold["values"]), train))
    return found + streams


def gpu_folds(table: dict[str, Any], points: list[Points]) -> list[Fold]:
    found = []
    for held in sorted({p.gpu.name for p in points}):
        rest, left_out = without(points, held)
        fitted, overheads = fit_memory(table, rest)
        fitted, more = fit_simt(fitted, rest, left_out)
        overheads |= more
        power = fitted["power"]["joule_per_flop"].items()
        values = {
            "matmul": {"simt": fitted["matmul"]["simt"], "simt_of": fitted["matmul"]["simt_of"]},
            "power": {"joule_per_flop": {name: {"fp32": entry["fp32"]} for name, entry in power if "fp32" in entry}},
            "memory_efficiency": fitted["memory_efficiency"],
            "stream": {name: fitted["stream"][name] for name in STREAMS},
        }
        added, least = ({op: pair[i] for op, pair in overheads.items()} for i in range(2))
        found.append({"held": held, "added_s": added, "least_s": least, "values": values})
        print(held)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--h200", type=Path, required=True)
    parser.add_argument("--neusight", type=Path, help="without it, the folds of GPUs stay as they are")
    chosen = parser.parse_args()
    committed = tomllib.loads((OUT / "compute.toml").read_text(encoding="utf-8"))
    lines = ['source = "tools/fit_folds.py"', f'fit = "{fit_digest()}"']
    for fold in h200_folds(committed, chosen.h200):
        lines += ["", "[[family]]", *(f"{key} = {literal(value)}" for key, value in fold.items())]
    if chosen.neusight is None:
        gpus = tomllib.loads((OUT / "folds.toml").read_text(encoding="utf-8"))["gpu"]
    else:
        # The fit of fp32 starts where fit_compute.py starts it: no architecture has constants of its own.
        start = tomllib.loads((Path(__file__).parent / "compute_start.toml").read_text(encoding="utf-8"))
        matmul = {**committed["matmul"], **{name: start["matmul"][name] for name in ("simt", "simt_of")}}
        blank = {**committed, "matmul": matmul, "memory_efficiency": start["memory_efficiency"]}
        fp32 = [row for name in FITTED_FILES for row in read(chosen.h200 / name)]
        gpus = gpu_folds(blank, all_points(chosen.neusight, chosen.h200, fp32))
    for fold in gpus:
        lines += ["", "[[gpu]]", *(f"{key} = {literal(value)}" for key, value in fold.items())]
    (OUT / "folds.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
