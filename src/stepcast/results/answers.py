"""The answers of verbs as typed dictionaries: what ``--json`` prints is such a dictionary.

Times are seconds (``_s``), sizes bytes (``_bytes``), shares and errors fractions. ``docs/json.md`` is made from
these types. The answers of ``predict``, ``plan`` and ``compare`` build on ``ir/facts.py``.
"""

from typing import NotRequired, TypedDict

from stepcast.ir.facts import PlanFacts, StepFacts

Seconds = dict[str, float]


class LayoutFacts(TypedDict):
    """Degrees of parallelism; their product without ep and vpp is the number of GPUs."""

    tp: int
    cp: int
    ep: int
    dp: int
    pp: int
    vpp: int
    gpus: int


class StrategyFacts(LayoutFacts):
    """A strategy by its choices."""

    expert_tp: int
    schedule: str
    micro_batch: int
    micro_batches: int
    recompute: str
    sharding: str
    sequence_parallel: bool
    precision: str


class AskedStrategyFacts(LayoutFacts, total=False):
    """The strategy of a run with its batch, as far as it is known: a workload file states less than a model."""

    expert_tp: int
    schedule: str
    micro_batch: int
    micro_batches: int
    recompute: str
    sharding: str
    sequence_parallel: bool
    precision: str
    global_batch: int
    seq: int


class AskedFacts(TypedDict):
    """The question that an answer begins with, and the command that asked it."""

    model: NotRequired[str]
    parameters: NotRequired[int]
    workload: NotRequired[str]
    cluster: NotRequired[str]
    gpu: NotRequired[str]
    gpus_per_node: NotRequired[int]
    framework: NotRequired[str]
    execution: NotRequired[str]
    kernels: NotRequired[str]
    strategy: NotRequired[AskedStrategyFacts]
    command: NotRequired[str]
    version: NotRequired[str]


class JitterFacts(TypedDict):
    """Steps simulated with random deviations."""

    deviation: float
    runs: int
    seed: int
    mean_s: float
    deviation_s: float
    percentiles_s: Seconds


class PathFacts(TypedDict):
    """Operations of one name on the critical path."""

    name: str
    count: int
    seconds: float


class TrainingFacts(TypedDict):
    """A training run of many such steps."""

    tokens: float
    steps: int
    days: float
    gpu_hours: float
    cost: float | None
    currency: str | None


class RemedyFacts(TypedDict):
    """A change with which a step fits."""

    options: str
    step_s: float
    slower: float
    memory_bytes: float
    verdict: str


class EmittedFacts(TypedDict):
    """A configuration of another tool; ``remaining``: options for what it has no key for."""

    tool: str
    text: str
    remaining: list[str]
    lost: list[str]


class StepAnswer(AskedFacts, StepFacts):
    """``predict`` and ``simulate``: a simulated step."""

    training: NotRequired[TrainingFacts | None]
    remedies: NotRequired[list[RemedyFacts]]
    jitter: NotRequired[JitterFacts]
    critical_path: NotRequired[list[PathFacts]]
    config: NotRequired[dict[str, object]]
    emitted: NotRequired[EmittedFacts]
    trace: NotRequired[str]


class SearchCountFacts(TypedDict):
    """The candidates of a search, by what became of them."""

    considered: int
    illegal: int
    too_large: int
    pruned: int
    simulated: int
    complete: bool
    unseen: int
    priced: int
    out_of_time: bool


class SearchedFacts(StrategyFacts):
    """A strategy of a search."""

    overlap: str
    stage_layers: str


class FrontFacts(SearchedFacts):
    """A strategy on the Pareto frontier (step time vs memory), or a variant of a ranked one."""

    step_s: float
    memory_bytes: float


class MissedFacts(SearchedFacts):
    """A faster strategy that does not fit."""

    bound_s: float
    memory_bytes: float


class SensitivityFacts(SearchedFacts):
    """The best strategy with one property of the cluster changed."""

    change: str
    step_s: float
    speed: float
    other: bool


class RankedFacts(SearchedFacts):
    """A ranked strategy, the best of its degrees of parallelism; ``equal``: within our error of rank 1."""

    rank: int
    place: str
    kinds: str
    step_s: float
    low_s: float
    high_s: float
    equal: bool
    tokens_per_s_per_gpu: float
    mfu: float
    memory_bytes: float
    free_bytes: float
    breakdown_s: Seconds
    days: float | None
    gpu_hours: float | None
    cost: float | None
    currency: str | None
    variants: list[FrontFacts]
    command: str


class BottleneckFacts(TypedDict):
    """The bottleneck of rank 1, and the shares of its step."""

    what: str
    shares: Seconds


class RunnerUpFacts(TypedDict):
    """The next strategy on as many GPUs, and where it loses time."""

    rank: int
    slower_s: float
    parts_s: Seconds


class LeastChangeFacts(SearchedFacts):
    """The smallest change of the question with which something fits."""

    words: str
    step_s: float
    command: str


class ExplainedFacts(TypedDict):
    """Rank 1 with another value of a choice: its step, or the constraint that rules it out."""

    choice: str
    other: str
    step_s: float | None
    memory_bytes: float | None
    constraint: str
    why: str


class SearchAnswer(AskedFacts):
    """``search``: ranked strategies."""

    precision: str | None
    objective: str
    global_batch: int
    seq: int
    capacity_bytes: float
    gpu_bytes: float
    counts: SearchCountFacts
    least_s: float | None
    rows: list[RankedFacts]
    binds: BottleneckFacts | None
    missed: MissedFacts | None
    runner_up: RunnerUpFacts | None
    sensitivity: list[SensitivityFacts]
    front: list[FrontFacts]
    smallest_bytes: float | None
    change: LeastChangeFacts | None
    explained: NotRequired[list[ExplainedFacts]]
    assumptions: list[str]
    warnings: NotRequired[list[str]]
    emitted: NotRequired[EmittedFacts]


class AlternativeFacts(SearchedFacts):
    """One of several clusters, frameworks or numbers of GPUs with its answer."""

    name: str
    cluster: str
    gpu: str
    framework: str
    global_batch: int
    seq: int
    step_s: float
    low_s: float
    high_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    memory_bytes: float | None
    free_bytes: float | None
    fits: bool | None
    price: float | None
    days: float | None
    gpu_hours: float | None
    cost: float | None
    currency: str | None
    energy_mwh: float | None
    goodput: float | None
    command: str


class WinnerFacts(TypedDict):
    """The best alternative under an objective; ``clear``: beyond our error of both steps."""

    objective: str
    name: str
    value: float
    second: str
    advantage: float
    clear: bool


class BreakEvenFacts(TypedDict):
    """The price per GPU-hour at which an alternative costs as much as the cheapest."""

    name: str
    against: str
    price: float | None
    break_even_price: float


class AlternativesAnswer(TypedDict):
    """``predict``, ``search`` and ``plan`` with several values; ``failed``: why a combination has no answer."""

    verb: str
    model: str
    rows: list[AlternativeFacts]
    failed: dict[str, str]
    winners: list[WinnerFacts]
    break_even: list[BreakEvenFacts]
    assumptions: list[str]
    warnings: list[str]
    command: NotRequired[str]
    version: NotRequired[str]


class IntervalDaysFacts(TypedDict):
    """The days of a run at the ends of the step's interval."""

    low: float
    high: float


class PlanChoiceFacts(TypedDict):
    """Another checkpoint interval or number of spare nodes, in closed form."""

    spares: int | None
    times_best: float
    interval_s: float | None
    goodput: float
    days: float | None


class PlanAnswer(AskedFacts, PlanFacts):
    """``plan``: a training run from its first step to its last."""

    mfu: NotRequired[float | None]
    until: NotRequired[str]
    step_band_days: IntervalDaysFacts | None
    failures: str
    spares: int | None
    checkpoint_bytes: float
    choices: list[PlanChoiceFacts]
    assumptions: list[str]
    warnings: list[str]


class TierFacts(TypedDict):
    """The links of one tier of a network, over a step."""

    tier: str
    links: int
    capacity_bytes_per_s: float
    bytes: float
    share: float
    busiest_share: float
    share_over_time: list[float]
    busiest_over_time: list[float]


class LinkFacts(TypedDict):
    """One of the busiest links; ``full_s``: seconds at capacity."""

    link: str
    tier: str
    alike: int
    bytes: float
    share: float
    full_s: float
    users: dict[str, float]
    share_over_time: list[float]


class SharedOperationFacts(TypedDict):
    """Communication of one kind on one stage, alone and with shared links."""

    group: str
    operation: str
    stage: int
    count: int
    alone_s: float
    took_s: float
    slowdown: float
    slowest: float


class NetworkAnswer(AskedFacts):
    """``network``: a step whose communication shares links."""

    gpus: int
    engine: str
    step_s: float
    alone_step_s: float
    fast_step_s: float
    routing: str
    links: int
    tiers: list[TierFacts]
    hottest: list[LinkFacts]
    operations: list[SharedOperationFacts]
    assumptions: list[str]
    warnings: list[str]


class KindErrorFacts(TypedDict):
    """Ops of one kind that were run, measured and predicted."""

    kind: str
    ops: int
    measured_s: float
    predicted_s: float
    error: float | None


class RunAnswer(AskedFacts):
    """``run``: a workload that was executed."""

    step_s: float
    breakdown_s: Seconds
    device: str
    ranks: list[int]
    ops: int
    kinds: list[KindErrorFacts]
    mean_abs_error: float | None
    priced_collectives_s: float
    predicted_step_s: float
    run: dict[str, object]
    warnings: list[str]


class SweepErrorFacts(TypedDict):
    """An error, and how many points have it."""

    error: str
    points: int


class SweepCountsAnswer(TypedDict, total=False):
    """``sweep``, ``sweep status`` and ``sweep export``: counts and rates."""

    folder: str
    points: int
    of: int
    answered: int
    left: int
    errors: int
    new: int
    seconds: float
    points_per_s: float
    fit: int | None
    least_step_s: float | None
    most_step_s: float | None
    best_mfu: float | None
    best_tokens_per_s_per_gpu: float | None
    least_days: float | None
    least_cost: float | None
    currency: str | None
    out_of_time: int | None
    common_errors: list[SweepErrorFacts]
    written: str
    rows: int


class SweepRowsAnswer(TypedDict):
    """``sweep show``: answered points; a row has the words of its point and the columns of its result."""

    folder: str
    points: int
    answered: int
    rows: list[dict[str, object]]


class ListAnswer(TypedDict, total=False):
    """``list``: the entries of one catalogue."""

    formats: list[dict[str, object]]
    gpus: list[dict[str, object]]
    clusters: list[dict[str, object]]
    models: list[dict[str, object]]
    frameworks: list[dict[str, object]]
    failures: list[dict[str, object]]
