"""Speed and memory of the Megatron-LM trace reader on a seed grown to 100 MB.

    python benchmarks/reader_megatron.py [MEGABYTES or FILE]

Every repetition is one more micro-batch with its own timestamps and durations.
"""

import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

SEED = Path(__file__).parents[1] / "examples" / "megatron-rank7.txt"
STEP_MS = 4000.0
TIMES = re.compile(r"(duration|timestamp)=([0-9.]+)")


def grow(size_bytes: int) -> str:
    """The seed's operations over and over, never twice at the same time."""
    seed = SEED.read_text()
    pieces, total, micro_batch = [], 0, 0
    while total < size_bytes:
        shift_ms, stretch = micro_batch * STEP_MS, 1 + micro_batch % 97 / 1000

        def moved(match: re.Match[str], shift_ms: float = shift_ms, stretch: float = stretch) -> str:
            value = float(match[2])
            value = value + shift_ms if match[1] == "timestamp" else value * stretch
            return f"{match[1]}={round(value, 2)}"

        piece = TIMES.sub(moved, seed).replace("batch_id=0", f"batch_id={micro_batch}")
        pieces.append(piece)
        total += len(piece)
        micro_batch += 1
    return "".join(pieces)


def measure(path: Path) -> None:
    from stepcast.inputs.megatron import read_run
    from stepcast.inputs.source import Source

    size_mb = path.stat().st_size / 1e6
    start, start_cpu = time.perf_counter(), time.process_time()
    timeline = read_run([Source(path)])
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(
        f"megatron: {size_mb:.0f} MB, {len(timeline):,} rows, {seconds:.2f} s, "
        f"{size_mb / seconds:.1f} MB/s ({size_mb / cpu_seconds:.1f} per CPU second), "
        f"peak {peak_mb:.0f} MB = {peak_mb / size_mb:.1f} x the file"
    )


def main() -> None:
    argument = sys.argv[1] if len(sys.argv) > 1 else "100"
    if Path(argument).is_file():
        measure(Path(argument))
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rank7.txt"
        path.write_text(grow(int(float(argument) * 1e6)))
        # A fresh process, so that growing the file does not count as the reader's memory.
        subprocess.run([sys.executable, __file__, str(path)], check=True)


if __name__ == "__main__":
    main()
