"""Runs and models of other forecasters: Calculon's execution and application, SimuMax's strategy and model (JSON).

calculon-ai/calculon, calculon/llm/llm.py; MooreThreads/SimuMax, simumax/core/config.py. Both keep the model in a file
of its own, which ``--model`` reads; Calculon's has no vocabulary, so its embedding is left to ours.
"""

from collections.abc import Mapping

from stepcast.inputs.configs.keys import Keys, Options, RunConfig, given_options
from stepcast.inputs.source import read_words

FRAMEWORK = "megatron-core"
WORDS = read_words("configs")
CALCULON_RUN = {"num_procs", "tensor_par", "pipeline_par", "microbatch_size"}
SIMUMAX_RUN = {"world_size", "tp_size", "pp_size", "micro_batch_num"}
SELECTED = ("attn_recompute", "mla_rms_recompute", "mlp_recompute", "mlp_rms_recompute")
VOCABULARY = 51_200  # Megatron's padded GPT-2 vocabulary, which the models of Calculon were trained with


def read_calculon(table: Mapping[str, object]) -> RunConfig:
    keys = Keys(table, "calculon")
    comm, overlap = keys.text("tensor_par_comm_type"), keys.text("tensor_par_overlap")
    offloads = [name for name in ("weight", "optimizer", "activations") if keys.flag(f"{name}_offload")]
    if offloads:
        keys.report("predicted without offloading", *(f"{name}_offload" for name in offloads))
    if keys.flag("training") is False:
        keys.report("predicted as training", "training")
    keys.number("data_par")  # follows from the others
    options: Options = {"sharding": "none", "overlap": "none", "sequence-parallel": "rs_ag" in comm}
    options |= {**keys.options(), **_interleave(keys, "pipeline_interleaving")}
    if overlap not in ("", "none"):
        keys.report("tensor-parallel communication is not overlapped", "tensor_par_overlap")
    return keys.config("calculon", FRAMEWORK, options)


def _interleave(keys: Keys, name: str) -> Options:
    chunks = keys.number(name) or 1
    return {"vpp": chunks, "schedule": "interleaved"} if chunks > 1 else {}


def read_simumax(table: Mapping[str, object]) -> RunConfig:
    keys = Keys(table, "simumax")
    options, rounds = keys.options(), keys.number("micro_batch_num")
    micro, world = (int(options.get(name, 0)) for name in ("micro-batch", "gpus"))
    tp, pp, cp = (keys.number(name) or 1 for name in ("tp_size", "pp_size", "cp_size"))
    zero = keys.number("zero_state") or 0
    granularity, layers = keys.text("recompute_granularity"), keys.number("recompute_layer_num") or 0
    recompute = "none"
    if keys.flag("enable_recompute") and layers:
        recompute = "selective" if "selective" in granularity else "full"
    if recompute == "full":
        keys.report(f"predicted with all layers recomputed (--recompute block:{layers}: some)", "recompute_layer_num")
    report = keys.report if recompute == "selective" else lambda _, *names: keys.report_without_effect(*names)
    report("predicted with the core attention of every layer recomputed", *filter(table.__contains__, SELECTED))
    batch = micro * rounds * world // (tp * pp * cp) if micro and rounds and world else None
    options |= _interleave(keys, "interleaving_size") | given_options(
        tp=tp,
        pp=pp,
        cp=cp if cp > 1 else None,
        global_batch=batch,
        precision="fp8" if keys.flag("fp8") else keys.text("dtype") or None,
        recompute=recompute,
        sharding=f"zero-{zero}" if zero else "none",
        sequence_parallel=keys.flag("enable_sequence_parallel") and tp > 1,
    )
    return keys.config("simumax", FRAMEWORK, options)


def as_hugging_face(table: Mapping[str, object]) -> dict[str, object] | None:
    """Return a model of Calculon or SimuMax with the keys of a config.json; None for other files."""
    if table.keys() >= {"hidden", "attn_heads", "num_blocks"}:
        sizes = {ours: table[theirs] for ours, theirs in WORDS["calculon_model"].items() if theirs in table}
        seq, dropout = table.get("seq_size", 2048), {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
        vocabulary = {"vocab_size": table.get("vocab_size", VOCABULARY), "n_positions": seq}
        return {"model_type": "gpt2", **sizes, **vocabulary, **dropout}
    if not table.keys() >= {"hidden_size", "head_num", "layer_num"}:
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
