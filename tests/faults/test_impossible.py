"""Nonsense in a file or an option is refused or warned of: no answer is infinite, above a GPU's peak or of aeons."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.cost.calibration import PLAUSIBLE, CalibrationError, calibration
from stepcast.ir.types import LONGEST_S, find_doubts
from stepcast.units import LIMITS, UNITS, Dimension, parse_quantity
from tests.cli.test_main import EXAMPLES, run

PREDICT = ["predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "16"]
COLLECTIVE = ["collective", "all-reduce", "--ranks", "16", "--size", "1GiB", "--cluster", "dgx-h100"]
OP = ["op", "matmul", "--m", "4096", "--n", "4096", "--k", "4096", "--gpu", "h100-sxm"]
EXTREMES = ("1e-308", "1e-30", "1e30", "1e308", "inf", "nan", "-1", "1e400")
QUANTITIES = {
    "node.nic.bandwidth": "GB/s",
    "node.nic.latency": "s",
    "node.fabric.link.bandwidth": "GB/s",
    "network.switch_latency": "s",
    "communication.launch_overhead": "s",
    "gpu.memory": "GB",
    "gpu.memory_bandwidth": "GB/s",
    "gpu.matrix.bf16": "TFLOP/s",
    "gpu.vector.fp32": "TFLOP/s",
    "gpu.clock": "MHz",
    "gpu.power": "W",
    "gpu.launch_overhead": "s",
    "gpu.l2": "MB",
    "gpu.shared_memory_per_sm": "kB",
}
RATIOS = ("node.nic.efficiency", "network.oversubscription", "communication.exchange_share")
COUNTS = ("gpu.sms", "node.nics", "node.gpus", "nodes", "network.leaf_nodes")


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, float):
        yield value


def check_answer(capsys: pytest.CaptureFixture[str], *words: str) -> bool:
    """Whether *words* are answered; what is answered is finite, and warned of where it cannot be."""
    status, out, err = run(capsys, *words, "--json")
    if status == 2:
        assert (out, err.count("\n")) == ("", 1)
        return False
    found = json.loads(out)
    assert all(math.isfinite(number) for number in numbers(found))
    assert "null" not in json.dumps({key: found.get(key, 0) for key in ("step_s", "time_s", "mfu")})
    long = found.get("step_s", found.get("time_s", 0.0)) > LONGEST_S
    assert found["warnings"] or not (long or found.get("mfu", 0) > 1)
    return True


@pytest.mark.parametrize("key", QUANTITIES)
def test_quantities_beyond_anything_built_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    for number in EXTREMES:
        value = f"{number} {QUANTITIES[key]}"
        assert run(capsys, *COLLECTIVE, "--set", f"{key}={value}")[0] == 2, value
    cluster = tmp_path / "c.toml"
    cluster.write_text(f'base = "dgx-h100"\n{key} = "1e-308 {QUANTITIES[key]}"\n')
    status, out, err = run(capsys, *COLLECTIVE[:-1], str(cluster))
    assert (status, out) == (2, "")
    assert "beyond anything built; expected" in err


@pytest.mark.parametrize("key", [*RATIOS, *COUNTS])
@pytest.mark.parametrize("number", [*EXTREMES, "99999999999999999999", "1"])
def test_ratios_and_counts_give_an_answer_or_a_reason(
    capsys: pytest.CaptureFixture[str], key: str, number: str
) -> None:
    answered = check_answer(capsys, *COLLECTIVE, "--set", f"{key}={number}")
    assert not answered or number == "1"


@pytest.mark.parametrize("dimension", Dimension)
@given(exponent=st.integers(-330, 310), digit=st.integers(1, 9))
def test_every_quantity_is_within_its_limits(dimension: Dimension, exponent: int, digit: int) -> None:
    for unit in UNITS[dimension]:
        try:
            value = parse_quantity(f"{digit}e{exponent} {unit}", dimension)
        except ValueError:
            continue
        assert value == 0 or LIMITS[dimension][0] <= value <= LIMITS[dimension][1]


@pytest.mark.parametrize("key", ["factor", "slope", "least_s", "spread"])
@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1e-300", "1e300", "1e28"])
def test_a_calibration_says_what_can_be_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, number: str
) -> None:
    path = tmp_path / "c.toml"
    values = {"factor": "1.0", key: number}
    lines = "".join(f"{name} = {value}\n" for name, value in values.items())
    path.write_text(f'gpu = "h100-sxm"\n[class."matmul.bf16"]\n{lines}')
    harmless = number == "1e-300" and key != "factor"
    for words in (PREDICT, OP):
        assert check_answer(capsys, *words, "--calibration", str(path)) == harmless
    status, out, err = run(capsys, "show", str(path))
    assert status == (0 if harmless else 2)
    assert "inf" not in out.split()
    assert harmless or f"{path}: class 'matmul.bf16': " in err


@pytest.mark.parametrize("number", ["inf", "nan", "-inf"])
def test_constants_are_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str], number: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'gpu = "a40"\nsequences = [1.0]\n[constants]\nmatmul_efficiency = {number}\n')
    assert run(capsys, "show", str(path))[0] == 2
    assert run(capsys, "analyze", str(EXAMPLES / "optimus-llama-1b.txt"), "--calibration", str(path))[0] == 2


@given(st.dictionaries(st.sampled_from(["factor", "slope", "least_s", "spread"]), st.floats(), min_size=1))
def test_no_correction_leaves_what_is_plausible(values: dict[str, float]) -> None:
    try:
        found = calibration({"gpu": "g", "class": {"matmul.bf16": {"factor": 1.0, **values}}})
    except CalibrationError:
        return
    for name, (least, most) in PLAUSIBLE.items():
        assert least <= getattr(found.corrections["matmul.bf16"], name) <= most


def test_products_faster_than_the_peak_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text('gpu = "h100-sxm"\n[class."matmul.bf16"]\nfactor = 0.001\n')
    for words, expected in ((PREDICT, "no GPU does more than its peak"), (OP, "more than the peak of h100-sxm")):
        status, _, err = run(capsys, *words, "--calibration", str(path))
        assert status == 0
        assert expected in " ".join(err.split())


def test_a_step_of_aeons_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.txt"
    text = (EXAMPLES / "simai-gpt-13b.txt").read_text().splitlines()
    cells = text[5].split("\t")
    path.write_text("\n".join([*text[:5], "\t".join([*cells[:2], "9" * 27, *cells[3:]]), *text[6:]]) + "\n")
    for engine in (["--cluster", "dgx-h100"], ["--engine", "simai"]):
        status, _, err = run(capsys, "simulate", str(path), *engine)
        assert status == 0
        assert "longer than thirty years" in " ".join(err.split())
    huge = ["op", "matmul", "--m", "10" * 6, "--n", "10" * 6, "--k", "10" * 6, "--gpu", "h200"]
    assert "longer than thirty years" in " ".join(run(capsys, *huge)[2].split())


def test_a_run_of_aeons_is_warned_of_and_an_infinite_cost_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--gpus", "8", "--checkpoint-size", "1GB", "--runs", "2", "--step-s", "1"]
    assert "longer than thirty years" in " ".join(run(capsys, *words, "--steps", "9" * 11)[2].split())
    status, out, err = run(capsys, *words, "--steps", "9000", "--price", "1e308")
    assert (status, out) == (2, "")
    assert "cost comes out as inf" in err


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_is_no_answer(number: float) -> None:
    with pytest.raises(ValueError, match="low_s comes out as"):
        find_doubts({"uncertainty": [{"low_s": number}]})


def test_usual_answers_are_not_doubted() -> None:
    facts = {"step_s": 3.5, "tokens_per_s": 1e12, "mfu": 0.99, "stages": [{"busy_s": 1.0}], "breakdown_s": {"dp": 2.0}}
    assert find_doubts(facts) == []
    assert len(find_doubts(facts | {"mfu": 1.2, "breakdown_s": {"dp": 1e28}})) == 2


DEEP = 60_000
NESTED = {
    "list.json": "[" * DEEP + "]" * DEEP,
    "object.json": '{"a":' * DEEP + "1" + "}" * DEEP,
    "step.json": '{"step_s": 1.0, "x":' + "[" * DEEP + "]" * DEEP + "}",
    "trace.json": '{"schemaVersion": 1, "traceEvents": ' + "[" * DEEP + "]" * DEEP + "}",
    "config.json": '{"model_type": "llama", "x": ' + "[" * DEEP + "]" * DEEP + "}",
    "c.toml": 'base = "dgx-h100"\nx = ' + "[" * 5000 + "]" * 5000 + "\n",
    "f.toml": 'extends = "megatron-core"\nx = ' + "{a = " * 3000 + "1" + "}" * 3000 + "\n",
    "k.toml": 'gpu = "h200"\n[class.x]\nfactor = ' + "[" * 5000 + "]" * 5000 + "\n",
}


@pytest.mark.parametrize("name", NESTED)
def test_deep_nesting_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = tmp_path / name
    path.write_text(NESTED[name])
    file = str(path)
    for words in (
        ["show", file],
        ["compare", file, file],
        ["predict", "--model", file, "--cluster", "dgx-h100", "--gpus", "8"],
        ["predict", "--model", "llama-3.1-8b", "--cluster", file, "--gpus", "8"],
        [*PREDICT, "--framework", file],
        [*OP, "--calibration", file],
    ):
        status, out, err = run(capsys, *words)
        assert (status, out, err.count("\n")) == (2, "", 1)
