"""Fit the residuals of frameworks to rows that ``stepcast validate`` wrote, and write them into the profiles.

    stepcast validate --set published --set mlperf -o rows.csv
    python tools/fit_residual.py rows.csv

Each profile gets a table for every generation of GPUs and kind of model of which the rows hold enough; those
it had are replaced. ``validate/residual.py`` says what is fitted.
"""

import csv
import re
import sys
from collections import defaultdict
from pathlib import Path

from stepcast.frameworks.catalog import DATA
from stepcast.ir.band import Residual
from stepcast.validate.residual import fit_residuals
from stepcast.validate.scoreboard import ScoredRow, columns_of

FITTED_BY = "tools/fit_residual.py: median of measured over predicted in the sets published and mlperf"
SOURCE = f'residual = "{FITTED_BY}"'
TABLES = re.compile(r"^\[residual\.[^\]]*\]\n(?:[^\[\n][^\n]*\n)*\n?", re.MULTILINE)


def rows_of(path: str) -> list[ScoredRow]:
    with open(path, newline="", encoding="utf-8") as file:
        return [
            ScoredRow(
                row["name"],
                float(row["measured_s"]),
                float(row["predicted_s"]),
                {name: row[name] for name in ("source", "profile", "kind")},
            )
            for row in csv.DictReader(file)
            if row.get("profile")
        ]


def written(text: str, residuals: list[Residual]) -> str:
    """*text* of a profile with these residuals and no others."""
    text = TABLES.sub("", text).replace(SOURCE + "\n", "")
    if not residuals:
        return text
    before, sources, after = text.partition("[sources]\n")
    tables = "".join(
        f"[residual.{each.generation}.{'experts' if each.experts else 'dense'}]\n"
        f"factor = {each.factor}\nrows = {each.rows}\nsources = {each.sources}\nspread = {each.spread}\n\n"
        for each in sorted(residuals, key=lambda each: (each.generation, each.experts))
    )
    return f"{before}{tables}{sources or '[sources]' + chr(10)}{SOURCE}\n{after}"


def main(path: str) -> None:
    found: dict[str, list[Residual]] = defaultdict(list)
    for (profile, _), residual in fit_residuals(columns_of(rows_of(path))).items():
        found[profile].append(residual)
    for file in sorted((DATA / "frameworks").glob("*.toml")):
        text = Path(file).read_text(encoding="utf-8")
        changed = written(text, found.get(file.stem, []))
        if changed != text:
            Path(file).write_text(changed, encoding="utf-8")
            print(f"{file.stem}: {', '.join(f'{each.kind} {each.factor}' for each in found[file.stem])}")


if __name__ == "__main__":
    main(sys.argv[1])
