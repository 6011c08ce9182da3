"""Runs and models of other forecasters: Calculon's execution and application, SimuMax's strategy and model (JSON).

calculon-ai/calculon, calculon/llm/llm.py; MooreThreads/SimuMax, simumax/core/config.py. Both keep the model in a file
of its own, which ``--model`` reads; Calculon's has no vocabulary, so its embedding is left to ours.
"""

from collections.abc import Mapping

from stepcast.inputs.configs.keys import Keys, RunConfig, given_options
from stepcast.inputs.source import read_words

FRAMEWORK = "megatron-core"
WORDS = read_words("configs")
CALCULON_RUN = {"num_procs", "tensor_par", "pipeline_par", "microbatch_size"}
SIMUMAX_RUN = {"world_size", "tp_size", "pp_size", "micro_batch_num"}
SELECTED = ("attn_recompute", "mla_rms_recompute", "mlp_recompute", "mlp_rms_recompute")
CALCULON_MODEL = {"hidden", "attn_heads", "num_blocks"}
SIMUMAX_MODEL = {"hidden_size", "head_num", "layer_num"}
PRECISIONS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float8": "fp8"}
VOCABULARY = 51_200  # Megatron's padded GPT-2 vocabulary, which the models of Calculon were trained with


def read_calculon(table: Mapping[str, object]) -> RunConfig:
    keys = Keys(table, "calculon")
    recompute = keys.text("activation_recompute")
    comm, overlap = keys.text("tensor_par_comm_type"), keys.text("tensor_par_overlap")
    offloads = [name for name in ("weight", "optimizer", "activations") if keys.flag(f"{name}_offload")]
    if offloads:
        keys.report("predicted without offloading", *(f"{name}_offload" for name in offloads))
    if keys.flag("training") is False:
        keys.report("predicted as training", "training")
    keys.number("data_par")  # follows from the others
    sharded, interleaving = keys.flag("optimizer_sharding"), keys.number("pipeline_interleaving") or 1
    options = given_options(
        gpus=keys.number("num_procs"),
        tp=keys.number("tensor_par"),
        pp=keys.number("pipeline_par"),
        vpp=interleaving if interleaving > 1 else None,
        schedule="interleaved" if interleaving > 1 else None,
        global_batch=keys.number("batch_size"),
        micro_batch=keys.number("microbatch_size"),
        precision=PRECISIONS.get(keys.text("datatype")),
        recompute={"full": "full", "attn_only": "selective", "none": "none"}.get(recompute),
        sharding="zero-1" if sharded else "none",
        sequence_parallel="rs_ag" in comm,
        overlap="gradients" if keys.flag("data_par_overlap") else "none",
    )
    if overlap not in ("", "none"):
        keys.report("tensor-parallel communication is not overlapped", "tensor_par_overlap")
    return keys.config("calculon", FRAMEWORK, options)


def read_simumax(table: Mapping[str, object]) -> RunConfig:
    keys = Keys(table, "simumax")
    micro, rounds, world = (keys.number(name) for name in ("micro_batch_size", "micro_batch_num", "world_size"))
    tp, pp, cp = (keys.number(name) or 1 for name in ("tp_size", "pp_size", "cp_size"))
    interleaving, zero = keys.number("interleaving_size") or 1, keys.number("zero_state") or 0
    granularity, layers = keys.text("recompute_granularity"), keys.number("recompute_layer_num") or 0
    recompute = "none"
    if keys.flag("enable_recompute") and layers:
        recompute = "selective" if "selective" in granularity else "full"
    if recompute == "full":
        keys.report(f"predicted with all layers recomputed (--recompute block:{layers}: some)", "recompute_layer_num")
    report = keys.report if recompute == "selective" else lambda _, *names: keys.report_without_effect(*names)
    report("predicted with the core attention of every layer recomputed", *filter(table.__contains__, SELECTED))
    batch = micro * rounds * world // (tp * pp * cp) if micro and rounds and world else None
    options = given_options(
        gpus=world,
        tp=tp,
        pp=pp,
        cp=cp if cp > 1 else None,
        ep=keys.number("ep_size"),
        expert_tp=keys.number("etp_size"),
        vpp=interleaving if interleaving > 1 else None,
        schedule="interleaved" if interleaving > 1 else None,
        seq=keys.number("seq_len"),
        micro_batch=micro,
        global_batch=batch,
        precision="fp8" if keys.flag("fp8") else keys.text("dtype") or None,
        recompute=recompute,
        sharding=f"zero-{zero}" if zero else "none",
        sequence_parallel=keys.flag("enable_sequence_parallel") and tp > 1,
        gradients="fp32" if keys.flag("use_fp32_accum_grad") else None,
    )
    return keys.config("simumax", FRAMEWORK, options)


def as_hugging_face(table: Mapping[str, object]) -> dict[str, object] | None:
    """Return a model of Calculon or SimuMax with the keys of a config.json; None for other files."""
    if set(table) >= CALCULON_MODEL:
        sizes = {ours: table[theirs] for ours, theirs in WORDS["calculon_model"].items() if theirs in table}
        seq, dropout = table.get("seq_size", 2048), {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
        vocabulary = {"vocab_size": table.get("vocab_size", VOCABULARY), "n_positions": seq}
        return {"model_type": "gpt2", **sizes, **vocabulary, **dropout}
    if not set(table) >= SIMUMAX_MODEL:
        return None
    sizes = {ours: table[theirs] for ours, theirs in WORDS["simumax_model"].items() if theirs in table}
    sizes |= {"max_position_embeddings": 131_072, "tie_word_embeddings": False}
    if not table.get("use_swiglu", True):
        return {"model_type": "opt", **sizes, "ffn_dim": table.get("intermediate_size"), "do_layer_norm_before": True}
    experts = table.get("expert_num")
    if not isinstance(experts, int) or experts < 2:
        return {"model_type": "llama", **{key: value for key, value in sizes.items() if key != "num_experts_per_tok"}}
    is_latent, shared = table.get("attention_type") == "mla", table.get("moe_shared_expert_intermediate_size")
    if not is_latent and not shared and not table.get("dense_layers"):
        wide = table.get("moe_ffn_hidden_size", table.get("intermediate_size"))
        return {"model_type": "mixtral", **sizes, "num_local_experts": experts, "intermediate_size": wide}
    sizes |= {ours: table[theirs] for ours, theirs in WORDS["simumax_latent"].items() if theirs in table}
    if is_latent:
        sizes.pop("head_dim", None)
    wide = table.get("moe_ffn_hidden_size")
    many = shared // wide if isinstance(shared, int) and isinstance(wide, int) and wide else 0
    kind = {"model_type": "deepseek_v3"} if is_latent else {"model_type": "glm4_moe", "partial_rotary_factor": 1.0}
    return {**kind, **sizes, "n_routed_experts": experts, "n_shared_experts": many}
