"""A large operator table: the GPT-2 example written out for many layers, each row with its own name."""

from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "optable-gpt2-large.tsv"


def grow(target_bytes: int, path: Path) -> None:
    """Write about *target_bytes*. Names all differ; equal operators take equal times, as in real tables."""
    header, *rows = EXAMPLE.read_text().splitlines()
    layer = [row.split("\t") for row in rows[7:47]]
    with path.open("w") as file:
        file.write(header + "\n")
        written, index = 0, 0
        while written < target_bytes:
            lines = ["\t".join([f"{cells[0].replace('h_0_', '')}_{index}", *cells[1:]]) for cells in layer]
            text = "\n".join(lines) + "\n"
            written += file.write(text)
            index += 1


def grow_measured(target_bytes: int, path: Path) -> None:
    """The same with times that all differ, as a profiler writes them."""
    header, *rows = EXAMPLE.read_text().splitlines()
    layer = [row.split("\t") for row in rows[7:47]]
    times = [at for at, name in enumerate(header.split("\t")) if name.endswith("compute_time")]
    with path.open("w") as file:
        file.write(header + "\n")
        written, index = 0, 0
        while written < target_bytes:
            lines = []
            for cells in layer:
                index += 1
                grown = [f"{cells[0].replace('h_0_', '')}_{index}", *cells[1:]]
                for at in times:
                    grown[at] = f"{float(cells[at]) + index % 9973 / 7919:.6f}"
                lines.append("\t".join(grown))
            written += file.write("\n".join(lines) + "\n")
