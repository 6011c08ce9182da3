"""Hugging Face ``config.json`` -> Model."""

import os
import re
from collections.abc import Callable
from dataclasses import replace

from stepcast.inputs.huggingface import dense, experts, hybrid
from stepcast.inputs.huggingface import hybrid as recurrent
from stepcast.inputs.huggingface.dense import ConfigTable, shown
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import CONFIG
from stepcast.ir.model import Model

FAMILIES: dict[str, Callable[[ConfigTable, str], Model]] = {
    "bamba": hybrid.bamba,
    "bloom": dense.bloom,
    "deepseek_v2": experts.deepseek,
    "deepseek_v3": experts.deepseek,
    "deepseek_v32": experts.deepseek,
    "falcon": dense.falcon,
    "falcon_mamba": recurrent.mamba,
    "gemma": dense.gemma,
    "gemma2": dense.gemma2,
    "gemma3": dense.gemma3,
    "gemma3_text": dense.gemma3,
    "gpt2": dense.gpt2,
    "gpt_bigcode": dense.gpt2,
    "gpt_neox": dense.gpt_neox,
    "gpt_oss": experts.gpt_oss,
    "gptj": dense.gptj,
    "glm4_moe": experts.glm4_moe,
    "granite": dense.llama,
    "granitemoehybrid": hybrid.granite_hybrid,
    "grok": experts.grok,
    "grok-1": experts.grok,
    "internlm": dense.internlm,
    "internlm2": dense.llama,
    "jamba": recurrent.jamba,
    "kimi_k2": experts.deepseek,
    "llama": dense.llama,
    "llama4": experts.llama4,
    "llama4_text": experts.llama4,
    "mamba": recurrent.mamba,
    "mamba2": hybrid.mamba2,
    "mistral": dense.mistral,
    "mixtral": experts.mixtral,
    "mpt": dense.mpt,
    "nemotron": dense.nemotron,
    "nemotron_h": hybrid.nemotron_h,
    "olmo2": dense.olmo2,
    "opt": dense.opt,
    "phi": dense.phi,
    "phi3": dense.phi3,
    "qwen2": dense.qwen2,
    "qwen2_5_vl": dense.qwen2,
    "qwen2_5_vl_text": dense.qwen2,
    "qwen2_moe": experts.qwen2_moe,
    "qwen2_vl": dense.qwen2,
    "qwen2_vl_text": dense.qwen2,
    "qwen3": dense.qwen3,
    "qwen3_moe": experts.qwen3_moe,
    "qwen3_next": recurrent.qwen3_next,
    "qwen3_vl": dense.qwen3,
    "qwen3_vl_moe": experts.qwen3_moe,
    "qwen3_vl_moe_text": experts.qwen3_moe,
    "qwen3_vl_text": dense.qwen3,
    "smollm3": dense.llama,
    "starcoder2": dense.starcoder2,
}

# Families whose code has one matrix for queries, keys and values, and for gate and up.
JOINED = ("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "phi3")
# The key of dropout behind attention and MLP, and what it is where a config does not say.
DROPOUTS: dict[str, tuple[str, float]] = {
    "bloom": ("hidden_dropout", 0.0),
    "gpt2": ("resid_pdrop", 0.1),
    "gpt_bigcode": ("resid_pdrop", 0.1),
    "gpt_neox": ("hidden_dropout", 0.0),
    "gptj": ("resid_pdrop", 0.0),
    "opt": ("dropout", 0.1),
    "phi": ("resid_pdrop", 0.0),
    "phi3": ("resid_pdrop", 0.0),
    "starcoder2": ("residual_dropout", 0.0),
}

# Families that also drop attention probabilities, unless their config says otherwise.
DROPPING = ("gpt2", "gpt_bigcode")
# Families whose code joins the part of a head that is turned and the part that is not: how much is turned.
TAILED: dict[str, tuple[str, float]] = {
    "glm4_moe": ("partial_rotary_factor", 0.5),
    "gpt_neox": ("rotary_pct", 0.25),
    "phi": ("partial_rotary_factor", 0.5),
    "phi3": ("partial_rotary_factor", 1.0),
    "qwen3_next": ("partial_rotary_factor", 0.25),
}
# Families whose routers weigh experts in fp32, whatever the format of the tokens.
WIDE_ROUTERS = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "mixtral")
# Of types that are often asked for, what their layers have and ours do not.
LACKING: dict[str, str] = {
    "minimax": "lightning attention",
    "mllama": "layers of cross-attention to images",
    "recurrent_gemma": "linear recurrences",
    "rwkv": "linear recurrences",
    "t5": "an encoder beside the decoder",
    "bert": "an encoder and a masked loss",
}
# Where configs of several modalities keep their language model.
TEXT_PARTS = ("text_config", "llm_config", "language_config")

SIZE_KEYS = re.compile(
    r'"(hidden_size|num_hidden_layers|num_attention_heads|n_layers?|n_embd|n_heads?|d_model|vocab_size)"\s*:'
)
NAMED = re.compile(r'"(model_type|architectures)"\s*:')
CLASS_ENDINGS = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration|Model)$")


def looks_like(head: str) -> bool:
    """A JSON object that names a model type or architecture, or three of the usual sizes."""
    if not head.lstrip("\ufeff \t\r\n").startswith("{") or '"traceEvents"' in head:
        return False
    return NAMED.search(head) is not None or len({match[1] for match in SIZE_KEYS.finditer(head)}) >= 3


def read(source: Source) -> Model:
    """The model a file describes, named after its folder if the file is called config.json."""
    folder, file = os.path.split(os.path.abspath(source.path))
    stem = file.split(".")[0]
    return read_config(source.data(CONFIG), os.path.basename(folder) if stem == "config" else stem)


def read_config(data: bytes | str, name: str) -> Model:
    """The Model that the text of a config.json describes."""
    try:
        table = _decode(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)
        if not isinstance(table, dict):
            raise FormatError(f"expected a JSON object with a model's sizes, not {shown(table)}")
        keys = _text_keys(ConfigTable(table, ""))
        return _as_coded(FAMILIES[keys.kind](keys, name or keys.kind), keys)
    except FormatError:
        raise
    except ValueError as error:  # a check of the Model or one of its parts
        raise FormatError(str(error)) from None


def _as_coded(model: Model, keys: ConfigTable) -> Model:
    """*model* with what transformers' code of its family does."""
    key, usual = DROPOUTS.get(keys.kind, ("", 0.0))
    dropout = keys.number(key, usual) if key else 0.0
    wide = keys.kind.startswith("gemma") or keys.kind in ("olmo2", "gpt_oss", "qwen3_next")
    position = model.position
    if keys.kind in TAILED:
        share = keys.number(*TAILED[keys.kind])
        position = replace(position, share=share if 0 < share < 1 else 1.0, tailed=True)
    experts = model.experts and replace(model.experts, wide_weights=keys.kind in WIDE_ROUTERS)
    drops = keys.kind in DROPPING and keys.number("attn_pdrop", 0.1) > 0
    model = replace(model, joined=keys.kind in JOINED, wide_norms=wide, dropout=dropout, drops_attention=drops)
    return replace(model, position=position, experts=experts)


def _decode(data: bytes) -> object:
    """JSON; also with the NaN and Infinity that Python writes, which some configs hold."""
    import msgspec

    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        if b"Infinity" in data or b"NaN" in data:
            return _decode_lenient(data)
        place = re.search(r"\(byte (\d+)\)", str(error))
        line = data.count(b"\n", 0, int(place[1])) + 1 if place else None
        raise FormatError(f"cannot be read as JSON: {error}; expected a Hugging Face config.json", line=line) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise FormatError(_why(error)) from None


def _decode_lenient(data: bytes) -> object:
    import json

    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise FormatError(_why(error)) from None


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deeply for a model's config"
    return f"cannot be read as JSON: {error}"


def _text_keys(keys: ConfigTable) -> ConfigTable:
    """The keys of the language model, which multimodal configs hold in a part, with their type."""
    kind = _kind(keys)
    part = next((name for name in TEXT_PARTS if keys.has(name)), None)
    if kind in FAMILIES and part is None:
        return ConfigTable(keys.table, kind)
    if part is not None:
        inner = keys.inner(part)
        inner_kind = _kind(inner) or kind
        if inner_kind in FAMILIES:
            return ConfigTable(inner.table, inner_kind)
        kind = inner_kind
    raise FormatError(_unknown(kind))


def _unknown(kind: str) -> str:
    """What is missing, and the way that needs no family."""
    if not kind:
        return f"names no model_type; known: {', '.join(FAMILIES)}"
    why = f": it has {LACKING[kind]}, which are not modelled" if kind in LACKING else ""
    other = "'stepcast capture' takes it as PyTorch runs it, where transformers knows it"
    return f"unknown model_type {shown(kind)}{why}; {other}; known: {', '.join(FAMILIES)}"


def _kind(keys: ConfigTable) -> str:
    """model_type, or what the class named in architectures implies."""
    kind = keys.word("model_type", default="")
    if kind:
        return kind
    for architecture in keys.items("architectures"):
        stem = CLASS_ENDINGS.sub("", str(architecture)).lower()
        for family in FAMILIES:
            if family.replace("_", "") == stem:
                return family
    return ""
