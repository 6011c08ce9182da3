"""Runs commands that write slowly, each in a process of its own, and kills it in the midst; prints what it left.

    python -m tests.faults.killer KILLS plain|whole FOLDER WORDS...

``plain`` writes straight into the target, to show what a kill does then. The last word is the file to write.
"""

import contextlib
import io
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from stepcast.cli.main import main
from stepcast.outputs import files

PIECES = 40
PIECE_S = 2e-3
PATIENCE_S = 60.0


def write_slowly(handle: int, data: bytes) -> None:
    """As a slow disk takes it."""
    step = max(1, len(data) // PIECES)
    for start in range(0, len(data), step):
        os.write(handle, data[start : start + step])
        time.sleep(PIECE_S)


def write_plainly(given: Iterable[tuple[str, bytes]]) -> list[int]:
    sizes = []
    for name, data in given:
        with open(name, "wb", buffering=0) as file:
            write_slowly(file.fileno(), data)
        sizes.append(len(data))
    return sizes


def begun(folder: Path, old: dict[str, bytes]) -> bool:
    """Whether something is being written: a hidden file appeared, or an old one is not what it was."""
    names = set(os.listdir(folder))
    return names != set(old) or any(os.stat(folder / name).st_size != len(old[name]) for name in names)


def run_and_kill(folder: Path, words: list[str], after_s: float) -> bool:
    """Whether a kill *after_s* into the writing met the process alive."""
    old = {path.name: path.read_bytes() for path in folder.iterdir()}
    child = os.fork()
    if child == 0:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            os._exit(main(words))
    end_s = time.monotonic() + PATIENCE_S
    while not begun(folder, old) and time.monotonic() < end_s:
        time.sleep(PIECE_S / 4)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def kills(count: int, folder: Path, words: list[str]) -> dict[str, int]:
    """How often a kill met a write, and how often the file to write was not whole afterwards."""
    target, chance = Path(words[-1]), random.Random(1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(words) == 0
    whole = target.read_bytes()
    before = b"what was there before\n" * 1000
    met = torn = 0
    for _ in range(count):
        for path in folder.iterdir():
            path.unlink()
        target.write_bytes(before)
        met += run_and_kill(folder, words, chance.uniform(0, 0.7 * PIECES * PIECE_S))
        torn += target.read_bytes() not in (before, whole)
    return {"met": met, "torn": torn}


if __name__ == "__main__":
    if sys.argv[2] == "plain":
        files.write_files = write_plainly  # type: ignore[assignment]
    files._write_all = write_slowly
    print(json.dumps(kills(int(sys.argv[1]), Path(sys.argv[3]), sys.argv[4:])))
