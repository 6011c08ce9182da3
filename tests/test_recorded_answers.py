"""Answers to many commands are recorded, so that no rule changes unnoticed.

They are not known to be right: other tests compare with formulas and measurements. Each line of
``tests/data/recorded_answers.jsonl`` holds a command, its exit status and either its figures or its error. After a
change that is meant, ``python -m tests.test_recorded_answers`` records them again, and the difference between the two
files shows which answers the change reaches.
"""

import contextlib
import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepcast.cli.main import main

pytestmark = pytest.mark.slow
FILE = Path(__file__).parent / "data" / "recorded_answers.jsonl"
# The keys of answers that hold figures, by verb; all numbers below them count, and some words.
FIGURES = {
    "predict": (
        "step_s",
        "breakdown_s",
        "communication_s",
        "memory_bytes",
        "tflops_per_gpu",
        "uncertainty",
        "warnings",
    ),
    "plan": (
        "days",
        "gpu_hours",
        "cost",
        "energy_mwh",
        "goodput",
        "split_s",
        "interruptions",
        "choices",
        "phases",
        "warnings",
    ),
    "op": ("time_s", "efficiency", "flops", "bytes", "bound", "uncertainty", "warnings"),
    "collective": ("time_s", "nodes", "algorithm", "protocol", "warnings"),
    "generate": (
        "ttft_s",
        "tpot_s",
        "tokens_per_s",
        "decode_step_s",
        "prefill_s",
        "batch_s",
        "tail_s",
        "mean_batch",
        "waiting",
        "concurrency_that_fits",
        "memory_bytes",
        "warnings",
    ),
    "rl": (
        "step_s",
        "phases_s",
        "pools_s",
        "idle_share",
        "tokens_per_s_per_gpu",
        "tail_s",
        "memory_bytes",
        "run",
        "sensitivity_s",
        "considered",
        "too_large",
        "rows",
        "warnings",
    ),
    "search": ("counts", "rows", "binds", "smallest_bytes", "sensitivity", "front", "warnings"),
}
WORDS = ("algorithm", "protocol", "bound", "verdict", "warnings")


def figures_of(answer: dict[str, Any], verb: str) -> list[float | str]:
    """Return the figures of *answer* in order, of the stages those of the last."""
    keys = FIGURES.get(verb)
    chosen = {key: value for key, value in answer.items() if keys is None or key.startswith(keys)}
    return list(_leaves(chosen))


def _leaves(value: Any) -> Iterator[float | str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in WORDS:
                yield from inner if isinstance(inner, list) else [inner]
            elif key not in ("command", "version"):
                yield from _leaves(inner[-1:] if key == "stages" else inner)
    elif isinstance(value, list):
        for inner in value[:4]:
            yield from _leaves(inner)
    elif isinstance(value, int | float):
        yield float(f"{value:.9g}")


def answer(words: list[str]) -> tuple[int, list[float | str] | str]:
    """Return the exit status of a command, and its figures or its error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([*words, "--json"])
        except SystemExit as stop:  # a word that no option takes
            status = int(str(stop.code))
    text = out.getvalue()
    return status, figures_of(json.loads(text), words[0]) if text else err.getvalue().strip()


def recorded() -> list[tuple[str, int, Any]]:
    """Return the commands with their statuses and figures."""
    return [(entry[0], entry[1], entry[2]) for entry in map(json.loads, FILE.read_text().splitlines())]


@pytest.mark.parametrize(("command", "status", "figures"), recorded(), ids=lambda value: str(value)[:60])
def test_answer_is_the_recorded_one(command: str, status: int, figures: Any) -> None:
    compare_answer(command, status, figures)


def compare_answer(command: str, status: int, figures: Any) -> None:
    """Ask *command* and compare with what was recorded."""
    now = answer(command.split())
    assert now[0] == status, now[1]
    if isinstance(figures, str):
        assert now[1] == figures
    else:
        for kind in (str, float | int):
            found, known = ([value for value in values if isinstance(value, kind)] for values in (now[1], figures))
            assert found == (known if kind is str else pytest.approx(known, rel=1e-8, abs=1e-15))


def forget_values() -> None:
    """Clear the caches of all modules."""
    for module in [module for name, module in sys.modules.items() if name.startswith("stepcast.")]:
        for value in list(vars(module).values()):
            if not isinstance(value, type) and callable(clear := getattr(value, "cache_clear", None)):
                clear()


@pytest.mark.parametrize("seed", range(3))
def test_answers_do_not_depend_on_those_before(seed: int) -> None:
    """A quarter of the commands in one process and in a random order, the first time without cached values and then
    backwards with those of the others: values cached by identity were once those of another strategy.
    """
    commands = random.Random(seed).sample(recorded(), len(recorded()) // 4)
    forget_values()
    for command, status, figures in (*commands, *commands[::-1][::3]):
        compare_answer(command, status, figures)


if __name__ == "__main__":
    commands = [command for command, _, _ in recorded()]
    FILE.write_text("".join(json.dumps([command, *answer(command.split())]) + "\n" for command in commands))
