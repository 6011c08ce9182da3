"""A search run with ``--stream``, and the CPU seconds of the whole program until each of its answers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

GOOD = 1.03


class StreamedSearch(NamedTuple):
    """CPU seconds until the first row, until the first within 3 % of the final best, and until the answer."""

    first_s: float
    good_s: float
    last_s: float
    peak_bytes: int
    answer: dict[str, Any]  # empty if the search failed

    @property
    def best_s(self) -> float:
        """The step time of rank 1."""
        return float(self.answer["rows"][0]["step_s"])


def run_search(words: str) -> StreamedSearch:
    """Run the search *words* with one worker."""
    command = [sys.executable, "-m", "stepcast", "search", *words.split(), "--stream", "--workers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    events = [(used_cpu_s(process.pid), json.loads(line)) for line in process.stdout]
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    last_s = usage.ru_utime + usage.ru_stime
    if not events or not events[-1][1].get("rows"):
        return StreamedSearch(last_s, last_s, last_s, usage.ru_maxrss * 1024, {})
    answer = events[-1][1]
    limit_s = GOOD * answer["rows"][0]["step_s"]
    good_s = next((used_s for used_s, event in events[:-1] if event["step_s"] <= limit_s), last_s)
    return StreamedSearch(events[0][0], good_s, last_s, usage.ru_maxrss * 1024, answer)


def used_cpu_s(process: int) -> float:
    """Return the CPU seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
