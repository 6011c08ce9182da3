"""Rows of published runs as files."""

import csv
from pathlib import Path


def write(path: Path, *records: dict[str, str]) -> Path:
    names = list(dict.fromkeys(name for record in records for name in record))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(records)
    return path
