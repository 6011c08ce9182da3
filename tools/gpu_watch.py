# mypy: ignore-errors
"""Clocks and power of the GPU at hand: nvidia-smi in a process of its own, ten times a second."""

import contextlib
import shutil
import subprocess
import tempfile
import time
from datetime import datetime
from pathlib import Path
from statistics import mean, median

FIELDS = (  # the name that nvidia-smi knows: the name in our rows
    ("clocks.sm", "sm_mhz"),
    ("clocks.mem", "mem_mhz"),
    ("power.draw.instant", "power_w"),
    ("temperature.gpu", "celsius"),
    ("clocks_event_reasons.active", "reasons"),
)
SETTLING_S = 0.5  # of a window: a step's power is judged after its first part


class Watch:
    """Samples into a file; ``over`` sums up those of a window of ``time.time()``."""

    def __init__(self, every_ms: int = 100) -> None:
        self.process, self.file = None, Path(tempfile.mkdtemp()) / "smi.csv"
        if shutil.which("nvidia-smi"):
            query = "--query-gpu=timestamp," + ",".join(name for name, _ in FIELDS)
            command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", "0", f"-lms={every_ms}"]
            with self.file.open("w") as out:
                self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def samples(self, start_s: float, end_s: float) -> list[dict[str, str]]:
        found = []
        with contextlib.suppress(OSError):
            for line in self.file.read_text().splitlines():
                at, *values = (part.strip() for part in line.split(","))
                with contextlib.suppress(ValueError):
                    when = datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").timestamp()
                    if start_s <= when <= end_s and len(values) == len(FIELDS):
                        found.append(dict(zip((name for _, name in FIELDS), values, strict=True)))
        return found

    def over(self, start_s: float, end_s: float) -> dict[str, float | str]:
        """Median clock, mean power and the reasons for a lower clock that were named."""
        time.sleep(0.05)  # the last sample
        begin = start_s + min(SETTLING_S, (end_s - start_s) / 2)
        rows = self.samples(begin, end_s) or self.samples(start_s, end_s + 0.2)
        summed = {"samples": len(rows)}
        for name, sum_up in (("sm_mhz", median), ("mem_mhz", median), ("power_w", mean), ("celsius", max)):
            values = []
            for row in rows:
                with contextlib.suppress(ValueError):
                    values.append(float(row[name]))
            summed[name] = round(sum_up(values), 1) if values else ""
        summed["reasons"] = " ".join(sorted({row["reasons"] for row in rows}))
        return summed

    def close(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
