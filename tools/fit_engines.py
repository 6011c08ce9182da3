# mypy: ignore-errors
"""Fit the overheads of generation engines to public serving runs: ``data/engines/*.toml``.

    python tools/fit_engines.py ../shared/data/serving [--engine vllm] [--folds] [--write]

Kernels are those of ``cost.serving``; an engine has what its host adds and its paces over those kernels. ``--folds``
fits on half of the pairs of model and system, and shows the errors of the other half.
"""

import argparse
import re
import zlib
from pathlib import Path

import numpy as np
from msgspec import structs

from stepcast.cost import serving as costs
from stepcast.generation.engine import load_engine
from stepcast.validate import generation as serving

FREE = {
    "step_s": (1e-3, 1e-6, 1e-2), "sequence_s": (1e-5, 1e-7, 1e-4), "request_s": (0.05, 0.005, 0.5),
    "kernel_s": (3e-6, 5e-7, 1e-5), "eager_layer_s": (1.5e-4, 1e-5, 2e-3), "product_pace": (1.0, 0.6, 2.0),
    "waves": (10.0, 2.0, 10.0),
    "expert_pace": (1.0, 0.4, 3.0), "reduce_pace": (1.0, 0.5, 6.0), "prefill_pace": (1.0, 0.5, 3.0),
}  # fmt: skip
FAR = 1.0  # logarithm of a ratio beyond which an error counts no more
FOLDER = Path(__file__).parents[1] / "src" / "stepcast" / "data" / "engines"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", default="vllm,sglang,trtllm")
    parser.add_argument("--only", default="", help="names of the constants to fit")
    parser.add_argument("--folds", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    for key in list(FREE):
        if args.only and key not in args.only.split(","):
            del FREE[key]
    for name in ("linear_s", "decode_s", "prefill_s", "mla_decode_s", "mla_prefill_s", "custom_reduce_s"):
        setattr(costs, name, remember(getattr(costs, name)))
    groups = serving.group_rows(str(args.folder))
    for name in args.engine.split(","):
        own = [rows for rows in groups if rows[0]["backend"] == name]
        fold = np.array([zlib.crc32((rows[0]["model_path"] + rows[0]["system"]).encode()) % 2 for rows in own])
        if args.folds:
            held = [logs(name, solve(name, pick(own, fold != half)), pick(own, fold == half)) for half in (0, 1)]
            show(
                f"{name}, left out",
                {key: np.concatenate([part[key] for part in held if key in part]) for key in {**held[0], **held[1]}},
            )
        values = solve(name, own)
        show(f"{name}, all", logs(name, values, own))
        print(values, flush=True)
        if args.write:
            path = FOLDER / f"{name}.toml"
            text = path.read_text(encoding="utf-8")
            for key, value in values.items():
                text = re.sub(rf"^{key} = .*$", f"{key} = {value:.3g}", text, flags=re.M)
            path.write_text(text, encoding="utf-8")


def remember(function):
    """Return *function* with its results kept: kernels do not depend on what is fitted."""
    known = {}

    def call(*values, **options):
        key = tuple(value.tobytes() if isinstance(value, np.ndarray) else value for value in values)
        key = (key, *(np.shape(value) for value in values), *options.items())
        if key not in known:
            known[key] = function(*values, **options)
        return known[key]

    return call


def pick(groups: list, chosen: np.ndarray) -> list:
    return [rows for rows, wanted in zip(groups, chosen, strict=True) if wanted]


def logs(name: str, values: dict[str, float], groups: list) -> dict[str, np.ndarray]:
    """Return log(predicted / measured) by mode and quantity."""
    profile = structs.replace(load_engine(name), **values)
    serving.load_engine = lambda _: profile  # which predict_group asks for
    result: dict[str, list] = {}
    for rows in groups:
        try:
            predicted = serving.predict_group(rows)
        except (ValueError, KeyError):
            continue
        for quantity, seconds in (("ttft", predicted.ttft_s), ("tpot", predicted.tpot_s)):
            measured = np.array([float(row[f"silicon_{quantity}_ms"] or 0) / 1e3 for row in rows])
            known = measured > 0
            part = f"{rows[0]['mode']} {quantity}"
            result.setdefault(part, []).append(np.log(seconds[known] / measured[known]))
    return {part: np.concatenate(values) for part, values in result.items()}


def solve(name: str, groups: list) -> dict[str, float]:
    """Return the values with the least mean error: one at a time, in steps that become smaller."""
    profile = load_engine(name)
    values = {key: min(max(getattr(profile, key), low), high) for key, (_, low, high) in FREE.items()}

    def loss(trial: dict[str, float]) -> float:
        parts = logs(name, trial, groups)
        return float(np.concatenate([np.minimum(np.abs(part), FAR) for part in parts.values()]).mean())

    best, step = loss(values), 0.4
    while step > 0.04:
        before = best
        for key, (_, low, high) in FREE.items():
            for factor in (np.exp(step), np.exp(-step)):
                trial = values | {key: min(max(values[key] * factor, low), high)}
                if trial != values and (own := loss(trial)) < best:
                    values, best = trial, own
                    break
        step = step if best < before * 0.998 else step / 2
    return {key: float(f"{value:.3g}") for key, value in values.items()}


def show(title: str, parts: dict[str, np.ndarray]) -> None:
    for part, values in parts.items():
        errors = np.abs(np.exp(values) - 1)
        print(
            f"{title}: {part}: median {np.median(errors):.1%}, mean {errors.mean():.1%}, {len(errors)} rows", flush=True
        )


if __name__ == "__main__":
    main()
