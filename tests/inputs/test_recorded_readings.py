"""The results of reading slightly damaged files are recorded, so that no change of a reader goes unnoticed.

They are not known to be right: the tests of each reader compare with known answers. Each line of
``tests/data/recorded_readings.jsonl`` holds a format, the number of a damaged file and its error, or a checksum of
what was read. After a change that is meant, ``python -m tests.inputs.test_recorded_readings`` records them again.
"""

import json
import random
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fuzz.targets import Target, targets

pytestmark = pytest.mark.slow
FILE = Path(__file__).parents[1] / "data" / "recorded_readings.jsonl"
NAMES = (
    "simai", "op-times", "nccl-tests", "stragglers", "flight-recorder", "nccl-inspector", "nccl-topo",
    "nvidia-smi-topo", "slurm-topology", "simai-topology", "astra-network", "sweep", "operator table",
)  # fmt: skip
FILES = 80
DECIMAL = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?")
WORDS = (b"0", b"1", b"-1", b"x", b"7", b"1000", b"2.5", b"none")


def damage(text: bytes, number: int) -> bytes:
    """Return *text* with one word or line changed, removed or repeated."""
    chosen = random.Random(number)
    lines = text.split(b"\n")
    if chosen.random() < 0.25:
        line = chosen.randrange(len(lines))
        lines[line : line + 1] = [] if chosen.random() < 0.5 else [lines[line], lines[line]]
        return b"\n".join(lines)
    words = list(re.finditer(rb"[\w.+-]+", text))
    word = chosen.choice(words)
    other = chosen.choice((*WORDS, b"", chosen.choice(words)[0], word[0] + b"0"))
    return text[: word.start()] + other + text[word.end() :]


def outcome(target: Target, data: bytes) -> str:
    """Return the error of reading *data*, or a checksum of the answer."""
    try:
        found = target.run(data)
    except target.errors as error:
        return str(error)
    text = json.dumps(msgspec.to_builtins(found, enc_hook=repr, str_keys=True), sort_keys=True)
    rounded = DECIMAL.sub(lambda number: f"{float(number[0]):.9g}", text)
    return f"{zlib.crc32(rounded.encode()):08x}"


def record(target: Target) -> Iterator[tuple[str, int, str]]:
    """Yield the outcomes of the good files of a format, then of damaged ones."""
    texts = [seed for seed in target.seeds if not seed.startswith((b"\x1f\x8b", b"\x80"))]
    for number in range(FILES):
        text = texts[number % len(texts)]
        yield target.name, number, outcome(target, text if number < len(texts) else damage(text, number))


def chosen_targets() -> list[Target]:
    return [target for target in targets() if target.name in NAMES]


@pytest.mark.parametrize("target", chosen_targets(), ids=lambda target: target.name)
def test_readings_are_the_recorded_ones(target: Target) -> None:
    known: list[list[Any]] = [json.loads(line) for line in FILE.read_text().splitlines()]
    assert [list(entry) for entry in record(target)] == [entry for entry in known if entry[0] == target.name]


if __name__ == "__main__":
    entries = [entry for target in chosen_targets() for entry in record(target)]
    FILE.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
