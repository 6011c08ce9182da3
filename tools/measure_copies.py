# mypy: ignore-errors
"""Time copies between the host and a GPU: of pageable and pinned memory, waiting or not, also behind queued work.

    python tools/measure_copies.py FILE

Writes a JSON list: for each size and kind of memory the CPU's microseconds in a call on an idle GPU, those until the
GPU is done, and those in a call while the GPU is busy for 10 ms: whether the CPU waits for what was launched before.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median

SIZES = [2**power for power in (10, 12, 14, 15, 16, 17, 18, 20, 22, 24, 26, 28)]
BUSY_CYCLES = 20_000_000


def measure_copies() -> list:
    import torch

    def call_us(call, runs, queued=0) -> float:
        times = []
        for _ in range(runs + 2):
            torch.cuda.synchronize()
            if queued:
                torch.cuda._sleep(queued)
            began = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - began))
        torch.cuda.synchronize()
        return median(times[2:])

    def finished_us(call, runs) -> float:
        def wait() -> None:
            call()
            torch.cuda.synchronize()

        return call_us(wait, runs)

    rows = []
    for size in SIZES:
        pageable = torch.empty(size, dtype=torch.uint8).random_(0, 255)
        pinned, runs = pageable.pin_memory(), 15 if size < 2**22 else 7
        on_gpu = pageable.to("cuda")
        for memory, source in (("pageable", pageable), ("pinned", pinned)):
            for non_blocking in (False, True):

                def copy(source=source, non_blocking=non_blocking) -> None:
                    source.to("cuda", non_blocking=non_blocking)

                rows.append({
                    "bytes": size, "memory": memory, "non_blocking": non_blocking, "call_us": call_us(copy, runs),
                    "finished_us": finished_us(copy, runs), "behind_us": call_us(copy, 3, BUSY_CYCLES),
                })  # fmt: skip
        fresh = [torch.empty(size, dtype=torch.uint8).fill_(3) for _ in range(9 if size < 2**26 else 4)]
        fresh_us = call_us(lambda written=fresh: written.pop().to("cuda"), len(fresh) - 2)
        rows.append({"bytes": size, "memory": "fresh", "call_us": fresh_us})
        rows.append({"bytes": size, "memory": "to host", "call_us": call_us(on_gpu.cpu, runs)})
        rows.append({"bytes": size, "memory": "pinning", "call_us": call_us(pageable.pin_memory, runs)})
    return rows


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measure_copies(), indent=1))
