"""Speed and memory of the Megatron-LM trace reader on a seed grown to 100 MB.

Every repetition is one more micro-batch with its own timestamps and durations.
"""

import re
from pathlib import Path

SEED = Path(__file__).parents[1] / "examples" / "megatron-rank7.txt"
STEP_MS = 4000.0
TIMES = re.compile(r"(duration|timestamp)=([0-9.]+)")


def grow(target_bytes: int, path: Path) -> None:
    """The seed's operations over and over, never twice at the same time."""
    seed = SEED.read_text()
    pieces, total, micro_batch = [], 0, 0
    while total < target_bytes:
        shift_ms, stretch = micro_batch * STEP_MS, 1 + micro_batch % 97 / 1000

        def moved(match: re.Match[str], shift_ms: float = shift_ms, stretch: float = stretch) -> str:
            value = float(match[2])
            value = value + shift_ms if match[1] == "timestamp" else value * stretch
            return f"{match[1]}={round(value, 2)}"

        piece = TIMES.sub(moved, seed).replace("batch_id=0", f"batch_id={micro_batch}")
        pieces.append(piece)
        total += len(piece)
        micro_batch += 1
    path.write_text("".join(pieces))
