"""Rows and summaries of a store."""

from collections.abc import Sequence

from stepcast.ir.facts import FactDict
from stepcast.sweep.store import COLUMNS, Store
from stepcast.units import DEFAULT_CURRENCY

OUT_OF_TIME = "out of time"
# Rows that are compared: those that fit, or whose memory is not checked.
COMPARED = "fits IS NOT 0 AND step_s IS NOT NULL"
USUAL_ORDER = '"fits" DESC, "tokens_per_s_per_gpu" DESC, "position"'
COMMON_ERRORS = 5
PAGE_ROWS = 200
WIDEST_MAP = 16
NOT_MAPPED = ("gpus", "price", "currency")


def rows_of(
    store: Store, where: str | None = None, sort: str | None = None, top: int | None = None, reverse: bool = False
) -> list[FactDict]:
    """Return answered points, the fastest that fit first."""
    known = store.columns()
    order = USUAL_ORDER
    if sort is not None:
        if sort not in known:
            raise ValueError(f"--sort {sort}: unrecognised column; choose from {', '.join(known)}")
        order = f'"{sort}" IS NULL, "{sort}"{" DESC" if reverse else ""}, "position"'
    condition = f"WHERE ({where})" if where else ""
    limit = f"LIMIT {top}" if top is not None else ""
    query = f"SELECT * FROM results {condition} ORDER BY {order} {limit}"
    if where is None:
        return store.rows(query)
    try:
        with store.limited():
            return store.rows(query)
    except ValueError as error:
        raise ValueError(f"--where {where!r}: {error}; columns are {', '.join(known)}") from None


def page_facts(store: Store) -> FactDict:
    """Return the facts of a sweep's page: the fastest rows, their scaling, and the fastest settings."""
    names = [name for name in store.columns() if name not in (*COLUMNS, "position")]
    counts = ", ".join(f'count(DISTINCT "{name}") + max("{name}" IS NULL) AS "{name}"' for name in names)
    distinct = store.rows(f"SELECT {counts} FROM points")[0] if names else {}
    words = [name for name in names if distinct[name] > 1]
    kinds = [name for name in ("model", "cluster") if name in words]
    return {
        **status_facts(store),
        "words": words,
        "kinds": kinds,
        "rows": rows_of(store, COMPARED, top=PAGE_ROWS),
        "scaling": _fastest(store, [*kinds, "gpus"]) if "gpus" in words else [],
        "heat": _heat(store, kinds, [name for name in words if name not in (*kinds, *NOT_MAPPED)]),
    }


def _fastest(store: Store, names: Sequence[str]) -> list[FactDict]:
    """Return the highest throughput that fits for each combination of *names*."""
    listed = ", ".join(f'"{name}"' for name in names)
    grouped = f"GROUP BY {listed} ORDER BY {listed}" if names else ""
    columns = f"{listed}, " if names else ""
    return store.rows(
        f"SELECT {columns}max(tokens_per_s_per_gpu) AS tokens_per_s_per_gpu FROM results "
        f"WHERE {COMPARED} AND tokens_per_s_per_gpu IS NOT NULL {grouped}"
    )


def _heat(store: Store, kinds: Sequence[str], words: Sequence[str]) -> FactDict | None:
    """Return a heat map of the two settings with most values, for each of *kinds*."""
    values = {
        name: [row[name] for row in store.rows(f'SELECT DISTINCT "{name}" FROM points ORDER BY 1')] for name in words
    }
    fitting = sorted((name for name in words if len(values[name]) <= WIDEST_MAP), key=lambda name: -len(values[name]))
    if len(fitting) < 2:
        return None
    across, down = fitting[:2]
    cells = _fastest(store, [*kinds, across, down])
    return {"across": across, "down": down, "x": values[across], "y": values[down], "cells": cells}


def _currency(store: Store) -> dict[str, str | None]:
    """Return the currency of all points; None if they have several, whose costs are not compared."""
    if "currency" not in store.columns():
        return {"currency": DEFAULT_CURRENCY}
    rows = store.rows("SELECT DISTINCT currency FROM points")
    names = {row["currency"] or DEFAULT_CURRENCY for row in rows}
    return {"currency": names.pop() if len(names) == 1 else None}


def status_facts(store: Store) -> FactDict:
    """Return the counts of points and answers, the best figures, and the most frequent errors."""
    points = store.rows("SELECT count(*) AS points FROM points")[0]["points"]
    found = store.rows(
        "SELECT count(*) AS answered, count(error) AS errors, sum(fits) AS fit, min(step_s) AS least_step_s, "
        f"max(step_s) AS most_step_s, max(CASE WHEN {COMPARED} THEN mfu END) AS best_mfu, "
        f"max(CASE WHEN {COMPARED} THEN tokens_per_s_per_gpu END) AS best_tokens_per_s_per_gpu, "
        f"min(CASE WHEN {COMPARED} THEN days END) AS least_days, "
        f"min(CASE WHEN {COMPARED} THEN cost END) AS least_cost, "
        f"sum(state = '{OUT_OF_TIME}') AS out_of_time FROM results"
    )[0]
    found |= _currency(store)
    if found["currency"] is None:
        found["least_cost"] = None
    errors = found["errors"] and store.rows(
        "SELECT error, count(*) AS points FROM results WHERE error IS NOT NULL "
        "GROUP BY error ORDER BY points DESC, error LIMIT ?",
        (COMMON_ERRORS,),
    )
    return {"points": points, "left": points - found["answered"], **found, "common_errors": errors or []}
