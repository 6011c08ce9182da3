"""A short round of the fuzzers, the cases that earlier rounds found, and that the fuzzers see what is wrong."""

import json
import os
from pathlib import Path
from random import Random

import pytest

from stepcast.inputs.source import FormatError
from stepcast.inputs.table import FORMATS
from tests.fuzz.commands import command
from tests.fuzz.damage import damaged
from tests.fuzz.readers import fault_of, run_cases
from tests.fuzz.targets import Target, seed_files, targets
from tests.fuzz.worker import run_bounded, run_command

CASES = sorted((Path(__file__).parent / "cases").glob("*.*"))
ROUND, COMMANDS = 30, 25
SEED = 1


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_damaged_files_give_an_answer_or_one_line(target: Target) -> None:
    assert all(not fault_of(target, seed) for seed in target.seeds)
    assert list(run_cases(target, SEED, 0, ROUND)) == []


def test_random_commands_give_an_answer_or_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seed_files(tmp_path)
    for number in range(COMMANDS):
        words = command(SEED, number)
        assert run_command(words).fault == "", words


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_what_was_found_once_stays_right(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = path.name.partition(".")[0].replace("-", " ")
    if name == "command":
        monkeypatch.chdir(tmp_path)
        seed_files(tmp_path)
        assert run_command(json.loads(path.read_bytes())).fault == ""
        return
    target = next(one for one in targets() if one.name.replace("-", " ") == name)
    assert fault_of(target, path.read_bytes()) == ""


def test_every_format_is_fuzzed() -> None:
    assert {entry.name for entry in FORMATS} <= {target.name for target in targets()}


def test_the_same_seed_gives_the_same_cases() -> None:
    seed, others = b"a 1\nb 2\n", (b"x\ny\n",)
    assert [damaged(seed, others, Random(7)) for _ in range(3)] == [damaged(seed, others, Random(7)) for _ in range(3)]
    assert len({damaged(seed, others, Random(number)) for number in range(200)}) > 100
    assert command(3, 5) == command(3, 5) != command(3, 6)


@pytest.mark.parametrize(
    ("does", "fault"),
    [
        (lambda data: 1 // 0, "ZeroDivisionError"),
        (lambda data: os.abort(), "signal 6"),
        (lambda data: bytearray(10**11), "MemoryError"),
    ],
    ids=["raises", "dies", "eats memory"],
)
def test_the_fuzzer_notices(does: object, fault: str) -> None:
    target = Target("bad", (b"seed of a file",), does)  # type: ignore[arg-type]
    found = list(run_cases(target, 0, 0, 3))
    assert len(found) == 3
    assert all(fault in bad.fault for bad in found)


def test_the_fuzzer_lets_readers_refuse() -> None:
    def refuse(data: bytes) -> None:
        raise FormatError("is no file of ours")

    assert list(run_cases(Target("good", (b"seed",), refuse), 0, 0, 20)) == []


def test_work_that_takes_long_is_ended() -> None:
    def forever() -> int:
        while True:
            pass

    assert run_bounded(forever, seconds=1).timed_out
