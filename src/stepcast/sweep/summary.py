"""What a store holds, as rows and in short."""

from typing import Any

from stepcast.sweep.store import Store

USUAL_ORDER = '"fits" DESC, "tokens_per_s_per_gpu" DESC, "position"'
COMMON_ERRORS = 5


def rows_of(
    store: Store,
    where: str | None = None,
    sort: str | None = None,
    top: int | None = None,
    reverse: bool = False,
) -> list[dict[str, Any]]:
    """Answered points, the fastest that fit first."""
    known = store.columns()
    order = USUAL_ORDER
    if sort is not None:
        if sort not in known:
            raise ValueError(f"--sort {sort}: rows have {', '.join(known)}")
        order = f'"{sort}" IS NULL, "{sort}"{" DESC" if reverse else ""}, "position"'
    condition = f"WHERE ({where})" if where else ""
    limit = f"LIMIT {top}" if top is not None else ""
    try:
        return store.rows(f"SELECT * FROM results {condition} ORDER BY {order} {limit}")
    except ValueError as error:
        if where is None:
            raise
        raise ValueError(f"--where {where!r}: {error}; rows have {', '.join(known)}") from None


def status_facts(store: Store) -> dict[str, Any]:
    """Points, answers, what went wrong most often, and the fastest of each model where there are several."""
    points = store.rows("SELECT count(*) AS points FROM points")[0]["points"]
    found = store.rows(
        "SELECT count(*) AS answered, count(error) AS errors, sum(fits) AS fit, min(step_s) AS least_step_s, "
        "max(step_s) AS most_step_s, max(CASE WHEN fits THEN mfu END) AS best_mfu, "
        "max(CASE WHEN fits THEN tokens_per_s_per_gpu END) AS best_tokens_per_s_per_gpu FROM results"
    )[0]
    errors = found["errors"] and store.rows(
        "SELECT error, count(*) AS points FROM results WHERE error IS NOT NULL "
        "GROUP BY error ORDER BY points DESC, error LIMIT ?",
        (COMMON_ERRORS,),
    )
    return {"points": points, "left": points - found["answered"], **found, "common_errors": errors or []}
