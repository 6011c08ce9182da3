"""torchtitan: the TOML of a training job (torchtitan/config/job_config.py)."""

from collections.abc import Mapping

from stepcast.inputs.configs.keys import Keys, OptionValue, RunConfig, flat, given_options, known_keys
from stepcast.inputs.source import read_words
from stepcast.ir.types import replace

TABLES = known_keys("torchtitan").table
FLAVOURS: Mapping[str, str] = TABLES["flavours"]
FAMILIES: Mapping[str, str] = TABLES["families"]
SCHEDULES = {name.lower(): ours for name, ours in read_words("configs")["torchtitan_schedules"].items()}
LOCAL_BATCH, SEQ_LEN = 8, 2048  # torchtitan's defaults
# Options of weights in bf16: so are their gradients and moments.
BF16_STATES: Mapping[str, OptionValue] = {"master_weights": False, "gradients": "bf16", "optimizer": "adamw:bf16"}
STAGES_OF_A_RANK = 2  # of schedules with several; torchtitan/distributed/pipeline_parallel.py, pipeline_llm


def looks_like(table: Mapping[str, object]) -> bool:
    model = table.get("model")
    is_own = isinstance(table.get("parallelism"), dict) or isinstance(table.get("activation_checkpoint"), dict)
    return is_own or (isinstance(model, dict) and "flavor" in model)


def read(table: Mapping[str, object]) -> RunConfig:
    keys = Keys(flat(table), "torchtitan")
    options = keys.options()
    tp, pp, cp = (int(options.get(axis, 1)) for axis in ("tp", "pp", "cp"))
    copies = keys.number(*_places("data_parallel_replicate_degree")) or 1
    shard = keys.number(*_places("data_parallel_shard_degree"))
    global_batch = int(options.pop("global-batch", -1))
    batch = keys.size("training.local_batch_size", "training.batch_size")
    # torchtitan cuts the local batch into micro-batches for a pipeline only.
    micro = keys.size("parallelism.pipeline_parallel_microbatch_size") or 1
    seq = options.get("seq")
    for name, value, default in (("local_batch_size", batch, LOCAL_BATCH), ("seq_len", seq, SEQ_LEN)):
        if value is None:
            keys.assume(f"no {name}: taken for {default:,}, torchtitan's default")
    batch = batch or LOCAL_BATCH
    sharding = "none" if shard == 1 and cp == 1 else "hybrid-fsdp" if copies > 1 else "fsdp"
    overlaps_tp = keys.flag(*_places("enable_async_tensor_parallel", "parallelism", "experimental")) and tp > 1
    schedule = _schedule(keys) if pp > 1 else None
    rotation = keys.word(*_places("context_parallel_rotate_method", "parallelism", "experimental"))
    compiled = keys.raw("compile.components")
    compiles_model = not isinstance(compiled, list) or "model" in compiled  # not the loss alone
    options |= given_options(
        gpus=copies * shard * tp * pp * cp if shard is not None and shard > 0 else None,
        tp=tp,
        pp=pp,
        cp=cp,
        seq=seq or SEQ_LEN,
        micro_batch=micro if pp > 1 else batch,
        global_batch=global_batch if global_batch > 0 else None,
        accumulation=None if global_batch > 0 else batch // micro if pp > 1 else 1,
        sharding=sharding,
        replicate=copies if sharding == "hybrid-fsdp" else None,
        recompute=_recompute(keys),
        precision=_precision(keys, sharding, is_split=tp * pp > 1),
        schedule=schedule,
        vpp=STAGES_OF_A_RANK if schedule == "interleaved" else None,
        kernels="compiled" if keys.flag("compile.enable", "training.compile") and compiles_model else "plain",
        overlap="gradients,parameters,tensor,transfers" if overlaps_tp else None,
        cp_comm=TABLES["contexts"].get(rotation) if cp > 1 else None,
        **(BF16_STATES if keys.word("training.dtype") == "bfloat16" else {"optimizer": "adamw"}),
    )
    # Logits stay split over tensor parallel ranks unless that is switched off.
    off, on = _places("disable_loss_parallel"), _places("enable_loss_parallel")
    if (keys.flag(*off) or keys.flag(*on) is False) and tp > 1:
        keys.report("the loss is predicted on logits split over tensor parallel ranks", *off, *on)
    name, flavour = keys.word("model.name"), keys.word("model.flavor")
    model = f"{FAMILIES[name]}{flavour}" if name in FAMILIES and flavour[:1].isdigit() else f"{name} {flavour}"
    config = keys.config("torchtitan", "torchtitan", options, model=FLAVOURS.get(f"{name} {flavour}", model))
    cuts = ({"micro_batch": rows, "accumulation": batch // rows} for rows in (batch, micro))
    return replace(config, by_pipeline=dict(zip((False, True), cuts, strict=True)))


def _places(name: str, *tables: str) -> list[str]:
    """Return where a key may be: versions have moved many of them between tables."""
    return [f"{table}.{name}" for table in tables or ("parallelism", "training")]


def _recompute(keys: Keys) -> str | None:
    """Return the kind of recomputation; selective by operators saves every second matmul."""
    kind = keys.word("activation_checkpoint.mode")
    option = keys.text("activation_checkpoint.selective_ac_option")
    if kind in ("", "selective") and option.isdigit():
        why = f"predicted as every second matmul recomputed, not as every {option}. layer"
        keys.report(why, "activation_checkpoint.selective_ac_option")
    if kind not in ("", "none", "selective", "full"):
        keys.report("predicted as selective", "activation_checkpoint.mode")
    return kind if kind in ("none", "selective", "full") else None


def _precision(keys: Keys, sharding: str, is_split: bool) -> str:
    """Return the format of matmuls: ``[float8]`` acts through its converter, until 2024 by its own switch.

    FSDP casts what it gathers. Without it weights are fp32, and autocast casts them for each use unless tensor or
    pipeline ranks split the model (torchtitan/distributed/utils.py, maybe_enable_amp).
    """
    converters = keys.raw("model.converters")
    words = " ".join(map(str, converters)) if isinstance(converters, list) else str(converters or "")
    has_switch = keys.flag("float8.enable_float8_linear") or keys.flag("training.enable_fp8_linear")
    is_wide = keys.word("training.mixed_precision_param") == "float32"
    is_fp8 = "float8" in words or bool(has_switch)
    gathers = [name for name in keys.values if name.endswith("float8_all_gather")]
    if is_fp8 and any(keys.flag(name) for name in gathers):
        keys.report("parameters are predicted as gathered in bf16", *gathers)
    else:
        keys.report_without_effect(*gathers, "float8.enable_float8_linear")
    if "mx" in words:
        return "mxfp8"
    if sharding == "none" and not (is_wide or is_fp8 or keys.word("training.dtype") == "bfloat16"):
        if is_split:
            keys.assume("fp32: torchtitan has no mixed precision with tensor or pipeline parallelism without FSDP")
        return "fp32" if is_split else "autocast-bf16"
    return "fp8" if is_fp8 else "fp32" if is_wide else "bf16"


def _schedule(keys: Keys) -> str | None:
    places = _places("pipeline_parallel_schedule", "parallelism", "experimental")
    name = keys.word(*places)
    if name == "interleavedzerobubble":
        keys.assume("InterleavedZeroBubble is predicted as zb-h1, with one stage for each rank")
    if name and name not in SCHEDULES:
        keys.report("predicted as 1F1B", *places)
    return SCHEDULES.get(name)
