"""Questions that workers answer without predicting anything; and a driver of them, to be killed."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepcast.sweep.engines import Answers
from stepcast.sweep.spec import Words, read_spec
from stepcast.sweep.store import RETRY, Progress, Store, rows_of, sweep

SPEC = """
[[axis]]
model = ["a", "b", "c"]
[[axis]]
tp = [1, 2, 4, 8]
[[axis]]
pp = "1..1024"
"""
POINTS = 3 * 4 * 11
PAUSE_S = 0.004


def table(folder: Path) -> list[dict[str, Any]]:
    """All answers of a sweep, in the order of its points."""
    with Store(str(folder)) as store:
        return rows_of(store, sort="position")


def product(ask: str, points: Sequence[Words]) -> Answers:
    """Step seconds are tp x pp; a point of tp 8 and pp 8 cannot be answered."""
    return [
        {"error": "no such point"}
        if (words["tp"], words["pp"]) == (8, 8)
        else {"step_s": float(words["tp"] * words["pp"]), "fits": 1, "mfu": 1 / words["tp"]}
        for words in points
    ]


def slow(ask: str, points: Sequence[Words]) -> Answers:
    time.sleep(PAUSE_S * len(points))
    return product(ask, points)


def deadly(ask: str, points: Sequence[Words]) -> Answers:
    """The point of tp 4 and pp 16 kills whoever looks at it."""
    if any((words["model"], words["tp"], words["pp"]) == ("b", 4, 16) for words in points):
        os.kill(os.getpid(), signal.SIGKILL)
    return product(ask, points)


def forgetful(ask: str, points: Sequence[Words]) -> Answers:
    """The points of one model name a file that is not there yet."""
    return [
        {"error": "no such file", "state": RETRY} if words["model"] == "a" else product(ask, [words])[0]
        for words in points
    ]


def reading(ask: str, points: Sequence[Words]) -> Answers:
    """Each point names a file with its seconds."""
    return [{"step_s": float(Path(words["config"]).read_text()), "fits": 1} for words in points]


def other_program() -> str:
    """Return the digest of another version."""
    return "another version"


def broken(ask: str, points: Sequence[Words]) -> Answers:
    raise OSError(28, "no space left")


def run(folder: str, answer: Any = product, text: str = SPEC, program: str = "program", **more: Any) -> Progress:
    return sweep(read_spec(text), folder, answer, lambda name, value: repr(value), program, **more)


if __name__ == "__main__":
    told = Path(sys.argv[1], "workers")

    def note(progress: Progress) -> None:
        """Leave the numbers of the workers where one can be found and killed."""
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
        told.write_text(children)

    run(sys.argv[1], slow, workers=2, watch=note)
