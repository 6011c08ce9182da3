"""Speed and memory of the OptimusPrime log reader on a seed grown to 100 MB.

    python benchmarks/reader_optimus.py [MEGABYTES or FILE]

The settings are printed once; then come ever later steps, each with its own times, glued as in the seed.
"""

import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

SEED = Path(__file__).parents[1] / "examples" / "optimus-llama-1b.txt"
STEPS = 20
CHANGING = re.compile(r"- step ([0-9]+)|total=([0-9.]+)|([0-9]+)/  323 batches|ms/batch ([0-9.]+)")


def grow(size_bytes: int) -> str:
    """The seed's steps over and over, with later numbers and stretched times."""
    seed = SEED.read_text()
    start = seed.index("[rank:7 stage:7] transformer-block")
    end = seed.index("[rank:7, run completed")
    steps = seed[start:end]
    pieces, total, repeat = [seed[:start]], start, 0
    while total < size_bytes:
        offset, stretch = repeat * STEPS, 1 + repeat % 89 / 1000

        def later(match: re.Match[str], offset: int = offset, stretch: float = stretch) -> str:
            if match[1]:
                return f"- step {int(match[1]) + offset}"
            if match[2]:
                return f"total={float(match[2]) * stretch:.3f}"
            if match[3]:
                return f"{int(match[3]) + offset}/  323 batches"
            return f"ms/batch {float(match[4]) * stretch:.2f}"

        piece = CHANGING.sub(later, steps)
        pieces.append(piece)
        total += len(piece)
        repeat += 1
    return "".join([*pieces, seed[end:]])


def measure(path: Path) -> None:
    from stepcast.inputs.optimus import read
    from stepcast.inputs.source import Source

    size_mb = path.stat().st_size / 1e6
    start, start_cpu = time.perf_counter(), time.process_time()
    log = read(Source(path))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(
        f"optimus: {size_mb:.0f} MB, {log.blocks:,} reports, {len(log.layer_times):,} layer records, "
        f"{seconds:.2f} s, {size_mb / seconds:.1f} MB/s ({size_mb / cpu_seconds:.1f} per CPU second), "
        f"peak {peak_mb:.0f} MB = {peak_mb / size_mb:.1f} x the file"
    )


def main() -> None:
    argument = sys.argv[1] if len(sys.argv) > 1 else "100"
    if Path(argument).is_file():
        measure(Path(argument))
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / "log.txt"
        path.write_text(grow(int(float(argument) * 1e6)))
        # A fresh process, so that growing the file does not count as the reader's memory.
        subprocess.run([sys.executable, __file__, str(path)], check=True)


if __name__ == "__main__":
    main()
