# mypy: ignore-errors
"""What capturing takes here, and how well captured steps agree with measured ones, with the versions at hand.

    PYTHONPATH=src python tools/measure_capture.py FOLDER

Writes ``captured.csv`` and ``captured.txt`` (``stepcast validate --set captured``), and ``speed.json``: how
long a process takes to capture a step of Llama 3 8B once PyTorch has been loaded, and its peak memory.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

ONE = """
import json, resource, sys, time
started = time.perf_counter()
from stepcast.pytorch.capture.program import CaptureOptions
from stepcast.pytorch.capture.program import capture
import transformers
loaded = time.perf_counter()
found = capture(sys.argv[1], CaptureOptions(batch=1, seq=8192))
ended = time.perf_counter()
capture(sys.argv[1], CaptureOptions(batch=1, seq=8192))
again = time.perf_counter() - ended
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"load_s": loaded - started, "capture_s": ended - loaded, "again_s": again,
                  "peak_bytes": peak, "processor_s": time.process_time(), "parameters": found.parameters}))
"""


def main() -> None:
    folder, home = Path(sys.argv[1]), Path(__file__).resolve().parents[1]
    folder.mkdir(parents=True, exist_ok=True)
    config = home / "src" / "stepcast" / "data" / "transformers" / "configs" / "llama-3.1-8b.json"
    one = subprocess.run([sys.executable, "-c", ONE, str(config)], capture_output=True, text=True, check=False)
    began = time.perf_counter()
    sum(range(10)), [each + 1 for each in range(10_000_000)]
    python_s = time.perf_counter() - began
    line = one.stdout.strip().splitlines()[-1] if one.stdout.strip() else json.dumps({"error": one.stderr[-800:]})
    found = {**json.loads(line), "ten_million_additions_s": python_s}
    (folder / "speed.json").write_text(json.dumps(found))
    print(found, flush=True)
    began = time.perf_counter()
    words = [sys.executable, "-m", "stepcast", "validate", "--set", "captured", "-o", str(folder / "captured.csv")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=420, check=False)
    (folder / "captured.txt").write_text(f"{time.perf_counter() - began:.0f} s\n{done.stdout}\n{done.stderr[-3000:]}")
    print(f"{time.perf_counter() - began:.0f} s", done.stdout[:1500], done.stderr[-800:], flush=True)


if __name__ == "__main__":
    main()
