"""Start-up: how long a person waits for help and for a first look at a file (bar: 0.25 s)."""

import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
COMMANDS = {
    "--help": ["--help"],
    "show (SimAI)": ["show", str(EXAMPLES / "simai-llama-405b.txt")],
    "show (operator table)": ["show", str(EXAMPLES / "optable-gpt2-large.tsv")],
    "show (Megatron)": ["show", str(EXAMPLES / "megatron-rank7.txt")],
    "show (OptimusPrime)": ["show", str(EXAMPLES / "optimus-llama-1b.txt")],
}


def best_of(command: list[str], tries: int = 7) -> float:
    times = []
    for _ in range(tries):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return min(times)


def run() -> None:
    bare = best_of([sys.executable, "-c", "pass"])
    print(f"{'command':24} {'seconds':>8} {'x bare Python':>14}")
    for name, arguments in COMMANDS.items():
        took = best_of([sys.executable, "-m", "stepcast", *arguments])
        print(f"{name:24} {took:8.3f} {took / bare:14.1f}")


if __name__ == "__main__":
    run()
