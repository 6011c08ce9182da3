"""Work that follows the tokens that a router sends: experts of two ranks do not do the same work."""

from collections.abc import Iterable, Mapping
from statistics import median

from stepcast.analyze.recording import Local, RankRecord


def seconds_per_token(records: Iterable[RankRecord]) -> dict[str, float]:
    """Role -> what one token more takes, for roles whose work follows their tokens.

    Theil's incomplete method (1950): of the pieces in the order of their tokens, each of the lower half makes
    a slope with its partner in the upper half, and the median slope stands. A slow rank does not move it.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for piece in record.pieces():
            if isinstance(piece, Local) and piece.tokens is not None:
                points.setdefault(piece.role, []).append((piece.tokens, piece.duration_s))
    return {role: _slope(listed) for role, listed in points.items()}


def _slope(points: list[tuple[int, float]]) -> float:
    points.sort()
    half = len(points) // 2
    slopes = [
        (upper_s - lower_s) / (upper - lower)
        for (lower, lower_s), (upper, upper_s) in zip(points[:half], points[-half:], strict=True)
        if upper > lower
    ]
    # No tokens cannot take less than no time, so it is never steeper than in proportion.
    steepest = median([seconds / tokens for tokens, seconds in points if tokens] or [0.0])
    return min(max(0.0, median(slopes)), steepest) if slopes else 0.0


def at_tokens_s(duration_s: float, tokens: float, wanted: float, slope_s: float) -> float:
    """What took *duration_s* for *tokens*, for *wanted* tokens."""
    return max(0.0, duration_s + slope_s * (wanted - tokens))


def like_s(piece: Local, other: Local, slopes_s: Mapping[str, float]) -> float:
    """How long *piece* would take at the pace of *other*, which has its role."""
    if piece.tokens is None or other.tokens is None:
        return other.duration_s
    return at_tokens_s(other.duration_s, other.tokens, piece.tokens, slopes_s.get(piece.role, 0.0))
