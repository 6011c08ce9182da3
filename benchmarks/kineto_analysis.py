"""A grown profiler trace read and analysed: MB/s overall, and peak memory as a multiple of the file.

Bars: at least 30 MB/s, at most 3 x the file. ``python -m benchmarks.kineto_analysis [MB]`` (1000 by default).
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.reader_kineto import grow

FLOOR_MB_PER_S = 30.0
CEILING_MEMORY = 3.0
PROBE = """
import json, resource, sys, time
from stepcast.analyze.kineto.analysis import analyze_kineto
from stepcast.inputs.table import read
began = time.perf_counter()
timeline = read(sys.argv[1])
was_read = time.perf_counter()
facts = analyze_kineto(timeline).facts()
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"read_s": was_read - began, "analyze_s": done - was_read, "peak_bytes": peak,
                  "spans": len(timeline), "exposed_comm_s": facts["exposed_comm_s"]}))
"""


def run(target_bytes: int = 1_000_000_000) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "grown.json"
        grow(target_bytes, path)
        probe = [sys.executable, "-c", PROBE, str(path)]
        found = json.loads(subprocess.run(probe, capture_output=True, text=True, check=True).stdout)
        size = path.stat().st_size
    rate = size / 1e6 / (found["read_s"] + found["analyze_s"])
    memory = found["peak_bytes"] / size
    print(f"{size / 1e6:.0f} MB, {found['spans']:,} spans")
    print(f"read {found['read_s']:.1f} s, analysed {found['analyze_s']:.2f} s: {rate:.1f} MB/s overall")
    print(f"peak memory {memory:.2f} x the file")
    if rate < FLOOR_MB_PER_S or memory > CEILING_MEMORY:
        sys.exit("below the bar")


if __name__ == "__main__":
    run(int(sys.argv[1]) * 1_000_000 if len(sys.argv) > 1 else 1_000_000_000)
