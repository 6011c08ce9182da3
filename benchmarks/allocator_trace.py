"""What PyTorch's caching allocator holds after each of many allocations, on a GPU of one's own.

``python benchmarks/allocator_trace.py FILE`` writes sizes, frees and the bytes reserved after each: what
``tests/cost/test_allocator.py`` plays through ``stepcast.cost.memory.allocator``. Needs torch.
"""

import json
import random
import sys
from pathlib import Path

STEPS = 6000
KIND = (300, 4_000, 60_000, 900_000, 1_400_000, 6_000_000, 13_000_000, 70_000_000, 400_000_000)


def events(seed: int) -> list[int]:
    """Above zero: bytes to allocate. Below: free the n-th of those alive, from 1. Zero: empty the cache."""
    chance = random.Random(seed)
    alive, found = 0, []
    for step in range(STEPS):
        if step % 1000 == 999:
            found.append(0)
        elif alive > chance.randint(2, 120):
            found.append(-chance.randint(1, alive))
            alive -= 1
        else:
            found.append(round(chance.choice(KIND) * chance.uniform(0.5, 1.5)))
            alive += 1
    return found


def main() -> None:
    import torch

    todo, alive, reserved = events(7), [], []
    for event in todo:
        if event > 0:
            alive.append(torch.empty(event, dtype=torch.uint8, device="cuda"))
        elif event < 0:
            del alive[-event - 1]
        else:
            torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    text = json.dumps({"torch": torch.__version__, "events": todo, "reserved": reserved})
    Path(sys.argv[1]).write_text(text.replace("], ", "],\n") + "\n")


if __name__ == "__main__":
    main() if sys.argv[1:] else sys.exit(__doc__)
