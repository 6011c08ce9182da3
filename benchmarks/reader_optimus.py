"""Speed and memory of the OptimusPrime log reader on a seed grown to 100 MB.

The settings are printed once; then come ever later steps, each with its own times, glued as in the seed.
"""

import re
from pathlib import Path

SEED = Path(__file__).parents[1] / "examples" / "optimus-llama-1b.txt"
STEPS = 20
CHANGING = re.compile(r"- step ([0-9]+)|total=([0-9.]+)|([0-9]+)/  323 batches|ms/batch ([0-9.]+)")


def grow(target_bytes: int, path: Path) -> None:
    """The seed's steps over and over, with later numbers and stretched times."""
    seed = SEED.read_text()
    start = seed.index("[rank:7 stage:7] transformer-block")
    end = seed.index("[rank:7, run completed")
    steps = seed[start:end]
    pieces, total, repeat = [seed[:start]], start, 0
    while total < target_bytes:
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
    path.write_text("".join([*pieces, seed[end:]]))
