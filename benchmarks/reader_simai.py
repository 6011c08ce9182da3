"""A large SimAI workload: the Llama example with many more micro-batches, which differ in one line."""

from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "simai-llama-405b.txt"


def grow(target_bytes: int, path: Path) -> None:
    """Write about *target_bytes*: every micro-batch as in the example, one line of each with its own time."""
    header, _, *lines = EXAMPLE.read_text().splitlines()
    prologue, micro_batch, epilogue = lines[:6], lines[40:74], lines[-7:]
    count = target_bytes // (sum(map(len, micro_batch)) + len(micro_batch))
    body = []
    for index in range(count):
        varied = list(micro_batch)
        for at in (1,):
            cells = varied[at].split("\t")
            cells[2] = str(int(cells[2]) + index)
            varied[at] = "\t".join(cells)
        body += varied
    written = [*prologue, *body, *epilogue]
    header = header.replace("ga: 16", f"ga: {count}")
    path.write_text("\n".join([header, str(len(written)), *written, ""]))
