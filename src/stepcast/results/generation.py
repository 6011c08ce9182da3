"""The answers of ``generate`` and ``rl``."""

from typing import TypedDict

from stepcast.results.answers import Seconds


class EngineLayoutFacts(TypedDict):
    """The layout of generation engines."""

    tp: int
    pp: int
    dp: int
    ep: int
    replicas: int


class RunningFacts(TypedDict):
    """The sequences that run at a time."""

    time_s: float
    running: float


class GenerationAnswer(TypedDict):
    """``generate``: serving at a concurrency, or a batch of responses."""

    model: str
    cluster: str
    gpu: str
    gpus: int
    engine: str
    layout: EngineLayoutFacts
    weights: str
    kv_cache: str
    prompt: str
    response: str
    concurrency: int | None
    requests: int | None
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    decode_step_s: float | None
    prefill_s: float
    batch_s: float | None
    tail_s: float | None
    mean_batch: float
    waiting: float
    concurrency_that_fits: int
    memory_bytes: dict[str, float]
    curve: list[RunningFacts]
    assumptions: list[str]
    warnings: list[str]
    command: str
    version: str


class RlRunFacts(TypedDict):
    """A run of many RL steps."""

    steps: int
    days: float
    gpu_hours: float
    cost: float | None
    currency: str


class RlAnswer(TypedDict):
    """``rl``: a step of RL post-training."""

    model: str
    cluster: str
    gpu: str
    gpus: int
    train_gpus: int
    rollout_gpus: int
    mode: str
    software: str
    engine: str
    algorithm: str
    responses: int
    mean_length: float
    response: str
    step_s: float
    phases_s: Seconds
    pools_s: Seconds
    idle_share: dict[str, float]
    bottleneck: str
    tokens_per_s_per_gpu: float
    tail_s: float
    rollout_layout: EngineLayoutFacts
    training_layout: dict[str, str]
    memory_bytes: dict[str, float]
    fits: bool
    run: RlRunFacts | None
    sensitivity_s: Seconds
    config: dict[str, object]
    assumptions: list[str]
    warnings: list[str]
    command: str
    version: str


class RlCandidateFacts(TypedDict):
    """A use of the GPUs of an RL search."""

    mode: str
    train_gpus: int
    rollout_gpus: int
    step_s: float
    training: str
    rollout: str
    staleness: int
    bottleneck: str
    idle_share: float
    phases_s: Seconds
    cost_per_million_tokens: float | None
    options: str


class RlSearchAnswer(TypedDict):
    """``rl --search``: the best uses of a number of GPUs."""

    model: str
    cluster: str
    gpu: str
    gpus: int
    considered: int
    too_large: int
    currency: str
    rows: list[RlCandidateFacts]
    config: dict[str, object]
    assumptions: list[str]
    warnings: list[str]
    command: str
    version: str
