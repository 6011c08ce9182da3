"""A long table of measured operators: the example's operators with sizes and times that all differ."""

from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "operators-h200.csv"


def grow(target_bytes: int, path: Path) -> None:
    """Write about *target_bytes*: the example's rows over and over, no two of one size or time."""
    header, *rows = EXAMPLE.read_text().splitlines()
    cells = [row.split(",") for row in rows]
    written, index = 0, 0
    with path.open("w") as file:
        file.write(header + "\n")
        while written < target_bytes:
            lines = []
            for op, dtype, *sizes, ms in cells:
                index += 1
                grown = [str(int(size) + index % 9973) if size else "" for size in sizes]
                lines.append(",".join([op, dtype, *grown, f"{float(ms) * (1 + index % 997 / 1000):.6f}"]))
            written += file.write("\n".join(lines) + "\n")
