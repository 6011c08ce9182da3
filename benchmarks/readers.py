"""Every reader on a synthetic file of its format: MB/s, and peak memory as a multiple of the file.

Bars: at least 30 MB/s of processor time, at most 3 x the file. Each reading runs in a fresh process,
so that its memory is its own; the interpreter and numpy are counted in.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

# Modules, and the function that makes the file.
READERS = {
    "simai": ("simai", "grow"),
    "optable": ("optable", "grow"),
    "optable, measured": ("optable", "grow_measured"),
    "op-times": ("op_times", "grow"),
    "megatron": ("megatron", "grow"),
    "optimus": ("optimus", "grow"),
    "kineto": ("kineto", "grow"),
    "nccl-tests": ("nccl_tests", "grow"),
    "chakra": ("chakra", "grow_converted"),
}
FLOOR_MB_PER_S = 30.0
CEILING_MEMORY = 3.0
PROBE = """
import json, resource, sys, time
from stepcast.inputs.table import read
began = time.process_time()
read(sys.argv[1])
took = time.process_time() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": took, "peak_bytes": peak}))
"""


def measure(path: Path) -> tuple[float, float]:
    """MB/s of reading *path*, and peak memory over its size."""
    run = subprocess.run([sys.executable, "-c", PROBE, str(path)], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    size = path.stat().st_size
    return size / 1e6 / found["seconds"], found["peak_bytes"] / size


def run(target_bytes: int = 100_000_000) -> None:
    print(f"{'reader':18} {'MB':>7} {'MB/s':>8} {'memory/file':>12}")
    for name, (module, grow) in READERS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"grown.{module}"
            # Grown by another process: a child's peak memory counts what its parent held when it was born.
            program = f"from benchmarks.reader_{module} import {grow}; from pathlib import Path; "
            program += f"{grow}({target_bytes}, Path({str(path)!r}))"
            subprocess.run([sys.executable, "-c", program], check=True)
            rate, memory = measure(path)
            verdict = "" if rate >= FLOOR_MB_PER_S and memory <= CEILING_MEMORY else "   below the bar"
            print(f"{name:18} {path.stat().st_size / 1e6:7.1f} {rate:8.1f} {memory:12.2f}{verdict}", flush=True)


if __name__ == "__main__":
    run()
