"""The keywords of the functions in ``library``; ``python -m tools.write_keywords`` writes this file."""

import datetime
import os
from collections.abc import Mapping, Sequence
from typing import TypedDict

from stepcast.questions.choices import Question

FUNCTIONS: Mapping[str, tuple[str, type[Question], Mapping[str, str]]]
TYPES: Mapping[str, Mapping[str, str]]

class PredictChoices(TypedDict, total=False):
    """Keywords of ``stepcast.predict``."""

    gpu: str | None
    set: list[str] | tuple[str, ...] | str | None
    place: str | None
    gpus: int | str | None
    nodes: int | str | None
    dp: int | str | None
    tp: int | str | None
    cp: int | str | None
    ep: int | str | None
    pp: int | str | None
    vpp: int | str | None
    expert_tp: int | str | None
    shard: int | str | None
    replicate: int | str | None
    stage_layers: list[int] | tuple[int, ...] | str | None
    micro_batch: int | str | None
    global_batch: int | str | None
    accumulation: int | str | None
    seq: int | str | None
    schedule: str | None
    precision: str | None
    sharding: int | str | None
    reshard: bool | None
    backward_prefetch: str | None
    fp8_params: bool | None
    zero_gradients: float | str | None
    recompute: str | None
    offload: str | None
    cp_comm: str | None
    sequence_parallel: bool | None
    flash_attention: bool | None
    attention_kernel: str | None
    overlap: list[str] | tuple[str, ...] | str | None
    bucket_mb: float | str | None
    expert_imbalance: float | str | None
    expert_load: str | None
    expert_replicas: int | str | None
    expert_capacity: float | str | None
    fused_experts: bool | None
    dispatcher: str | None
    lora: int | str | None
    lora_rank: int | str | None
    lora_targets: list[str] | tuple[str, ...] | str | None
    lora_dropout: float | str | None
    dora: bool | None
    liger: bool | None
    lora_a2a: bool | None
    train_layers: int | str | None
    base_weights: str | None
    task: str | None
    lengths: str | None
    batching: str | None
    mtp_layers: int | str | None
    dropout: bool | None
    fp8_activations: bool | None
    fp8_attention: bool | None
    op_fuser: bool | None
    check_gradients: bool | None
    gradient_accumulation_fusion: bool | None
    bf16_final_layers: int | str | None
    loss: str | None
    deferred_gradients: int | str | None
    gradients: str | None
    optimizer: str | None
    master_weights: bool | None
    clipping: bool | None
    kernels: str | None
    ssm_kernels: str | None
    execution: str | None
    engine: str | None
    background: str | os.PathLike[str] | None
    tokens: float | str | None
    samples: float | str | None
    epochs: float | str | None
    steps: float | str | None
    price: float | str | None
    currency: str | None

class SearchChoices(TypedDict, total=False):
    """Keywords of ``stepcast.search``."""

    gpu: str | None
    set: list[str] | tuple[str, ...] | str | None
    tokens_per_batch: float | str | None
    any_framework: bool | None
    lora: int | str | None
    base_weights: str | Sequence[str] | None
    tp: int | str | Sequence[int] | None
    cp: int | str | Sequence[int] | None
    ep: int | str | Sequence[int] | None
    expert_tp: int | str | Sequence[int] | None
    pp: int | str | Sequence[int] | None
    vpp: int | str | Sequence[int] | None
    micro_batch: int | str | Sequence[int] | None
    schedule: str | Sequence[str] | None
    recompute: str | Sequence[str] | None
    sharding: int | str | Sequence[str] | None
    sequence_parallel: bool | str | Sequence[str] | None
    precision: str | Sequence[str] | None
    dispatcher: str | Sequence[str] | None
    cp_comm: str | Sequence[str] | None
    gradients: str | Sequence[str] | None
    optimizer: str | Sequence[str] | None
    offload: str | Sequence[str] | None
    fp8_params: bool | str | Sequence[str] | None
    mtp_layers: int | str | Sequence[int] | None
    overlap: str | Sequence[str] | None
    fix: list[str] | tuple[str, ...] | str | None
    allow: list[str] | tuple[str, ...] | str | None
    objective: str | None
    max_memory: float | str | None
    memory_reserve: float | str | None
    tokens: float | str | None
    price: float | str | None
    currency: str | None
    time: float | str | None
    explain: bool | None
    workers: int | str | None

class PlanChoices(TypedDict, total=False):
    """Keywords of ``stepcast.plan``."""

    model: str | None
    cluster: str | None
    gpu: str | None
    set: list[str] | tuple[str, ...] | str | None
    place: str | None
    framework: str | None
    gpus: int | str | None
    nodes: int | str | None
    dp: int | str | None
    tp: int | str | None
    cp: int | str | None
    ep: int | str | None
    pp: int | str | None
    vpp: int | str | None
    expert_tp: int | str | None
    shard: int | str | None
    replicate: int | str | None
    stage_layers: list[int] | tuple[int, ...] | str | None
    micro_batch: int | str | None
    global_batch: int | str | None
    accumulation: int | str | None
    seq: int | str | None
    schedule: str | None
    precision: str | None
    sharding: int | str | None
    reshard: bool | None
    backward_prefetch: str | None
    fp8_params: bool | None
    zero_gradients: float | str | None
    recompute: str | None
    offload: str | None
    cp_comm: str | None
    sequence_parallel: bool | None
    flash_attention: bool | None
    attention_kernel: str | None
    overlap: list[str] | tuple[str, ...] | str | None
    bucket_mb: float | str | None
    expert_imbalance: float | str | None
    expert_load: str | None
    expert_replicas: int | str | None
    expert_capacity: float | str | None
    fused_experts: bool | None
    dispatcher: str | None
    lora: int | str | None
    lora_rank: int | str | None
    lora_targets: list[str] | tuple[str, ...] | str | None
    lora_dropout: float | str | None
    dora: bool | None
    liger: bool | None
    lora_a2a: bool | None
    train_layers: int | str | None
    base_weights: str | None
    task: str | None
    lengths: str | None
    batching: str | None
    mtp_layers: int | str | None
    dropout: bool | None
    fp8_activations: bool | None
    fp8_attention: bool | None
    op_fuser: bool | None
    check_gradients: bool | None
    gradient_accumulation_fusion: bool | None
    bf16_final_layers: int | str | None
    loss: str | None
    deferred_gradients: int | str | None
    gradients: str | None
    optimizer: str | None
    master_weights: bool | None
    clipping: bool | None
    kernels: str | None
    ssm_kernels: str | None
    execution: str | None
    calibration: str | os.PathLike[str] | None
    engine: str | None
    background: str | os.PathLike[str] | None
    tokens: float | str | None
    samples: float | str | None
    epochs: float | str | None
    steps: int | str | None
    price: float | str | None
    until: datetime.date | str | None
    from_: datetime.date | str | None
    step_s: float | str | None
    stage: list[str] | tuple[str, ...] | str | None
    buy: str | None
    carbon: float | str | None
    host_power: float | str | None
    failures: str | os.PathLike[str] | None
    mtbf: str | None
    spot: float | str | None
    checkpoint_every: str | None
    checkpoint_size: float | str | None
    node_write: str | None
    store_write: str | None
    blocking: bool | None
    restart: str | None
    spares: int | str | None
    shrink: bool | None
    repair: str | None
    stragglers: str | None
    evaluate: str | None
    allow_oom: bool | None
    config: str | os.PathLike[str] | None
    ignore_unknown: bool | None

class GenerateChoices(TypedDict, total=False):
    """Keywords of ``stepcast.predict_generation``."""

    set: list[str] | tuple[str, ...] | str | None
    engine: str | os.PathLike[str] | None
    gpus: int | str | None
    tp: int | str | None
    pp: int | str | None
    ep: int | str | None
    dp: int | str | None
    weights: str | None
    kv_cache: str | None
    memory_share: float | str | None
    speculative_tokens: int | str | None
    acceptance: float | str | None
    prompt_length: int | str | None
    response_length: int | str | None
    concurrency: int | str | None
    requests: int | str | None
    group: int | str | None

class RlChoices(TypedDict, total=False):
    """Keywords of ``stepcast.predict_rl``."""

    set: list[str] | tuple[str, ...] | str | None
    software: str | None
    engine: str | os.PathLike[str] | None
    algorithm: str | None
    prompts: int | str | None
    group: int | str | None
    prompt_length: int | str | None
    response_length: int | str | None
    train_batch: int | str | None
    epochs: int | str | None
    oversampling: float | str | None
    reference: bool | None
    old_logprobs: bool | None
    reward_s: float | str | None
    reward_latency: float | str | None
    mode: str | None
    gpus: int | str | None
    rollout_gpus: int | str | None
    staleness: int | str | None
    partial_rollout: bool | None
    tp: int | str | None
    cp: int | str | None
    ep: int | str | None
    pp: int | str | None
    vpp: int | str | None
    sharding: int | str | None
    recompute: str | None
    precision: str | None
    framework: str | None
    pack_tokens: int | str | None
    gen_tp: int | str | None
    gen_pp: int | str | None
    gen_ep: int | str | None
    gen_dp: int | str | None
    gen_weights: str | None
    kv_cache: str | None
    memory_share: float | str | None
    steps: int | str | None
    price: float | str | None
    currency: str | None

class AnalyzeChoices(TypedDict, total=False):
    """Keywords of ``stepcast.analyze``."""

    format: str | None
    cluster: str | None
    set: list[str] | tuple[str, ...] | str | None
    calibration: str | os.PathLike[str] | None
    trace: str | os.PathLike[str] | None

class ReplayChoices(TypedDict, total=False):
    """Keywords of ``stepcast.replay``."""

    scale_to: str | None
    gpu: str | None
    cluster: str | None
    set: list[str] | tuple[str, ...] | str | None
    engine: str | None
    trace: str | os.PathLike[str] | None
