"""Start-up: how long a person waits for help, a first look at a file (bar: 0.25 s), and a first forecast.

Seconds are those that the processor spends on the whole process, start to end, which other programs do not
change. Python must be free to keep its compiled files (no PYTHONDONTWRITEBYTECODE), as it is for a person.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median

EXAMPLES = Path(__file__).parents[1] / "examples"
COMMANDS = {
    "--help": ["--help"],
    "show (SimAI)": ["show", str(EXAMPLES / "simai-llama-405b.txt")],
    "show (operator table)": ["show", str(EXAMPLES / "optable-gpt2-large.tsv")],
    "show (Megatron)": ["show", str(EXAMPLES / "megatron-rank7.txt")],
    "show (OptimusPrime)": ["show", str(EXAMPLES / "optimus-llama-1b.txt")],
    "predict (16,384 GPUs)": [
        *("predict", "--model", "llama-3.1-405b", "--cluster", "dgx-h100", "--gpus", "16384"),
        *("--tp", "8", "--pp", "16", "--seq", "8192", "--global-batch", "2048", "--json"),
    ],
}
TRIES = 15


def times_of(command: list[str]) -> list[float]:
    """Seconds of each try, shortest first; one before them warms the disk's cache."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times = []
    for _ in range(TRIES + 1):
        began = _spent_s()
        quiet = subprocess.DEVNULL
        subprocess.run(command, check=True, stdout=quiet, stderr=quiet, env=environment)
        times.append(_spent_s() - began)
    return sorted(times[1:])


def _spent_s() -> float:
    """User and system time of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run() -> None:
    floors = {"bare Python": ["-c", "pass"], "import numpy": ["-c", "import numpy"]}
    stepcast = {name: ["-m", "stepcast", *arguments] for name, arguments in COMMANDS.items()}
    print(f"{'command':24} {'best, s':>8} {'median':>8}")
    for name, arguments in (floors | stepcast).items():
        times = times_of([sys.executable, *arguments])
        print(f"{name:24} {times[0]:8.3f} {median(times):8.3f}", flush=True)


if __name__ == "__main__":
    run()
