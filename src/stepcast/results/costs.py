"""The answers of verbs about costs: operators, collectives, validation and fitted constants."""

from typing import Literal, NotRequired, TypedDict


class EndsFacts(TypedDict):
    """The ends of a 90 % interval."""

    low_s: float
    high_s: float


class OperatorTimeFacts(TypedDict):
    """The estimated time of an operator of one size."""

    size: dict[str, int]
    time_s: float
    bound: str
    efficiency: float
    source: str
    uncertainty: EndsFacts
    flops: float
    bytes: float
    flops_per_s: float
    bytes_per_s: float


class AboutOperatorFacts(TypedDict):
    """The operator that was asked for."""

    operator: str
    gpu: str
    dtype: str
    backward: bool
    warnings: list[str]


class OperatorAnswer(AboutOperatorFacts, OperatorTimeFacts):
    """``op``: the estimated time of an operator."""


class OperatorSweepAnswer(AboutOperatorFacts):
    """``op --sweep``: the same for many sizes."""

    rows: list[OperatorTimeFacts]


class CollectiveTimeFacts(TypedDict):
    """The estimated time of a collective of one size."""

    size_bytes: int
    time_s: float
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    algorithm: str | None
    protocol: str | None


class AboutCollectiveFacts(TypedDict):
    """The collective that was asked for."""

    collective: str
    cluster: str
    ranks: int
    warnings: list[str]


class BusyLinkFacts(TypedDict):
    """A link and the share of the time it is busy."""

    link: str
    busy: float


class CollectiveAnswer(AboutCollectiveFacts, CollectiveTimeFacts):
    """``collective``: the estimated time of a collective."""

    nodes: int


class CollectiveSweepAnswer(AboutCollectiveFacts):
    """``collective --sweep``: the same for many sizes."""

    nodes: int
    rows: list[CollectiveTimeFacts]


class SharedCollectiveAnswer(AboutCollectiveFacts, CollectiveTimeFacts):
    """``collective --engine fluid``: a collective as flows over the links of a network."""

    engine: Literal["fluid"]
    alone_s: float
    slowdown: float
    rates_within: float
    links: list[BusyLinkFacts]


class SummaryFacts(TypedDict):
    """The errors of some rows; ``mean_error`` is above zero where predictions are too slow."""

    rows: int
    mean_abs_error: float
    median_abs_error: float
    p90_abs_error: float
    worst_abs_error: float
    mean_error: float
    time_weighted_error: float
    coverage: float | None


class ScoreboardFacts(TypedDict):
    """A measurement set: a SummaryFacts unless no row could be compared, and what it is made of."""

    rows: int
    mean_abs_error: NotRequired[float]
    median_abs_error: NotRequired[float]
    p90_abs_error: NotRequired[float]
    worst_abs_error: NotRequired[float]
    mean_error: NotRequired[float]
    time_weighted_error: NotRequired[float]
    coverage: NotRequired[float | None]
    skipped: int
    skip_reasons: dict[str, int]
    figures: dict[str, float]
    selections: dict[str, SummaryFacts]
    groups: dict[str, dict[str, SummaryFacts]]
    worst: list[dict[str, str | float]]
    notes: list[str]


class ValidateAnswer(TypedDict):
    """``validate``: the scoreboard of every set, and the sets that are not at hand."""

    sets: dict[str, ScoreboardFacts]
    absent: list[str]


class FitFacts(TypedDict):
    """``calibrate``: fitted constants; errors before and after, and on points left out of the fit."""

    kind: Literal["calibration"]
    source: str
    gpu: NotRequired[str]
    cluster: NotRequired[str]
    points: NotRequired[int]
    logs: NotRequired[list[str]]
    constants: NotRequired[dict[str, object]]
    classes: NotRequired[dict[str, dict[str, object]]]
    unidentified: NotRequired[dict[str, str]]
    before: NotRequired[float | None]
    after: NotRequired[float | None]
    left_out: NotRequired[float | None]
    used: NotRequired[bool]
    titles: NotRequired[dict[str, str]]
    spread: NotRequired[dict[str, float]]
    mean_abs_error: NotRequired[float]
    runs: NotRequired[list[dict[str, object]]]
    stages: NotRequired[list[dict[str, object]]]
    assumptions: NotRequired[list[str]]
    warnings: list[str]
