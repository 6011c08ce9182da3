"""Hugging Face ``config.json`` -> Model: families are the rows of ``data/configs/huggingface.toml``, and rules that no
row can say.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TypeVar

import msgspec

from stepcast.inputs.configs.peers import as_hugging_face
from stepcast.inputs.model_table import build_model, shortest_period
from stepcast.inputs.source import DATA, FormatError, Source, expect, read_toml, read_words
from stepcast.ir.architecture import MOST_LAYERS
from stepcast.ir.limits import CONFIG
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Activation, PositionKind
from stepcast.ir.types import FactDict

WORDS = read_words("configs")
ACTIVATIONS = {word: Activation(ours) for word, ours in WORDS["activations"].items()}

KIND_WORDS: dict[type, str] = {bool: "true or false", str: "text", list: "a list", dict: "a JSON object"}
Kind = TypeVar("Kind")
LAYER_TYPES = {"sliding_attention": True, "chunked_attention": True, "full_attention": False}


def quote_value(value: object) -> str:
    """Return a value for a message: on one line and short."""
    if isinstance(value, list | dict):
        return KIND_WORDS[type(value)]
    if type(value) is int and value.bit_length() > 128:
        return "a number of more than 38 digits"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


class ConfigTable:
    """A config's keys, checked as they are read; of several names the first that is there and not null counts."""

    def __init__(self, table: Mapping[str, object], kind: str) -> None:
        self.table = table
        self.kind = kind

    def find(self, *names: str) -> tuple[str, object]:
        """Return name and value of the first key present, or the first name and None."""
        return next(((name, self.table[name]) for name in names if self.table.get(name) is not None), (names[0], None))

    def has(self, *names: str) -> bool:
        return self.find(*names)[1] is not None

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number; a missing key is an error unless there is a *default*."""
        name, value = self.find(*names)
        if value is None:
            if default is None:
                raise FormatError(f"the {self.kind} config lacks {' or '.join(names)}")
            return default
        if isinstance(value, float) and math.isfinite(value) and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value < 2**62:
            raise FormatError(f"{name} must be a whole number of at least {least}, not {quote_value(value)}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.table.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
            raise FormatError(f"{name} must be a number, zero or more, not {quote_value(value)}")
        return float(value)

    def _value(self, names: Sequence[str], kind: type[Kind], default: Kind) -> Kind:
        name, value = self.find(*names)
        if value is not None and not isinstance(value, kind):
            raise FormatError(f"{name} must be {KIND_WORDS[kind]}, not {quote_value(value)}")
        return default if value is None else value

    def flag(self, *names: str, default: bool) -> bool:
        return self._value(names, bool, default)

    def word(self, *names: str, default: str) -> str:
        return self._value(names, str, default)

    def items(self, name: str) -> list[object]:
        return self._value([name], list, [])

    def inner(self, name: str) -> "ConfigTable":
        """Return a nested table; an empty one if it is not there."""
        return ConfigTable(self._value([name], dict, {}), self.kind)

    def activation(self, *names: str, default: str) -> Activation:
        word = self.word(*names, default=default)
        expect(word in ACTIVATIONS, f"unknown activation {quote_value(word)}; known: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[word]

    def share(self, name: str, default: float) -> float:
        """Return a share between 0 and 1; all of it where the config states another number."""
        share = self.number(name, default)
        return share if 0 < share < 1 else 1.0

    def window(
        self, name: str, layers: int, pattern: Sequence[bool], default: int | None = None
    ) -> dict[str, object] | None:
        """Return the fields of local attention, where a size is given; layer_types outranks *pattern*."""
        if default is None and not self.has(name):
            return None
        size = self.count(name, default=default)
        if types := self.layer_types(LAYER_TYPES, layers):
            pattern = [LAYER_TYPES[kind] for kind in types]
        if not any(pattern):
            return None
        return {"size": size, "pattern": shortest_period(pattern), "chunked": name == "attention_chunk_size"}

    def layer_types(self, known: Iterable[str], layers: int | None = None) -> list[str]:
        """Return the kind of each layer, empty where the config does not list them; each must be *known*."""
        types = self.items("layer_types")
        if types and layers is not None and len(types) != layers:
            raise FormatError(f"layer_types has {len(types)} entries for {layers} layers")
        unknown = [kind for kind in types if not isinstance(kind, str) or kind not in known]
        if unknown:
            raise FormatError(f"unknown layer type {quote_value(unknown[0])}; known: {', '.join(known)}")
        return [str(kind) for kind in types]

    def layer_numbers(self, name: str, layers: int) -> set[int]:
        """Return the layers that a list names."""
        numbers = self.items(name)
        for layer in numbers:
            if type(layer) is not int or not 0 <= layer < layers:
                raise FormatError(f"{name} names {quote_value(layer)}; there are {layers} layers")
        return {layer for layer in numbers if isinstance(layer, int)}


PUBLISHED = ("fp8", "mxfp4")  # methods of quantisation that are formats of generation
READERS = ("count", "number", "flag", "activation", "share", "window", "all")
# The fields of a model as plain values; parts are tables of their own.
Values = FactDict
Row = FactDict


def read_families() -> dict[str, Row]:
    """Return the rows of each model_type, those of the family that it is derived from first."""
    tables: dict[str, Row] = read_toml(DATA / "configs" / "huggingface.toml")
    complete: dict[str, Row] = {}
    for name, table in tables.items():
        omitted = table.get("omit", "").split()
        base = complete.get(table.get("of", ""), {})
        own = {key: row for key, row in table.items() if key not in ("of", "omit")}
        complete[name] = merge({key: row for key, row in base.items() if key not in (*omitted, "types")}, own)
    return dict(sorted((kind, rows) for name, rows in complete.items() for kind in rows.get("types", name).split()))


def merge(base: Row, own: Row) -> Row:
    """Return *base* with the rows of *own*; the rows of a part join, other rows replace what was there."""
    result = dict(base)
    for key, row in own.items():
        is_part = isinstance(row, dict) and isinstance(base.get(key), dict) and not reader_of(row)
        result[key] = merge(base[key], row) if is_part else row
    return result


def reader_of(row: Row) -> str:
    """Return how a row is read, or nothing for a table of rows; a field may have the name of a reader."""
    return next((name for name in READERS if isinstance(row.get(name), str) and row[name][0] != "$"), "")


def _read_row(row: object, keys: ConfigTable, values: Values) -> object:
    if isinstance(row, str):
        return values[row[1:]] if row.startswith("$") else row
    if not isinstance(row, dict):
        return row
    reader = reader_of(row)
    if not reader:
        parts = {key: _read_row(part, keys, values) for key, part in row.items()}
        return {key: value for key, value in parts.items() if value is not None}
    names: list[str] = row[reader].split()
    default = row.get("default")
    match reader:
        case "all":
            return names[0] * min(values["layers"], MOST_LAYERS + 1)
        case "count":
            optional = row.get("optional") and not keys.has(*names)
            return None if optional else keys.count(*names, default=default, least=row.get("least", 1))
        case "flag":
            is_on = keys.flag(*names, default=row["default"])
            return row.get("yes" if is_on else "no") if "yes" in row else is_on
        case "window":
            pattern = row.get("pattern")
            if pattern is None:  # one layer of so many is full
                every = min(keys.count(row["every"], default=row["most"]), MOST_LAYERS)
                pattern = [True] * (every - 1) + [False]
            return keys.window(names[0], values["layers"], pattern, default)
    return getattr(keys, reader)(*names, default=default)  # activation, share or number


# Rules: each changes the fields that its family reads from several keys.


def qwen_window(keys: ConfigTable, values: Values) -> None:
    """Set Qwen's window: the layers from max_window_layers on, and only if use_sliding_window is set."""
    layers = values["layers"]
    # The Model refuses more layers in a moment; do not build their pattern first.
    if keys.flag("use_sliding_window", default=False) and layers <= MOST_LAYERS:
        full = min(keys.count("max_window_layers", default=28, least=0), layers)
        window = keys.window("sliding_window", layers, (False,) * full + (True,) * (layers - full))
        values |= {} if window is None else {"window": window}


def attention_dropout(keys: ConfigTable, values: Values) -> None:
    """Set whether attention probabilities are dropped, which a config may switch off."""
    values["drops_attention"] = keys.number("attn_pdrop", 0.1) > 0


def opt(keys: ConfigTable, values: Values) -> None:
    width = keys.count("word_embed_proj_dim", default=values["hidden"])
    norm_first = keys.flag("do_layer_norm_before", default=True)
    values["position"]["count"] += 2
    values["embedding_width"] = 0 if width == values["hidden"] else width
    values["final_norm"] = norm_first and not keys.flag("_remove_final_layer_norm", default=False)


def falcon(keys: ConfigTable, values: Values) -> None:
    is_grouped = keys.flag("new_decoder_architecture", default=False)
    is_parallel = is_grouped or keys.flag("parallel_attn", default=True)
    if is_grouped:
        values["kv_heads"] = keys.count("num_kv_heads", "n_head_kv", default=values["heads"])
    else:
        values["kv_heads"] = 1 if keys.flag("multi_query", default=True) else values["heads"]
    has_two_norms = is_grouped and keys.count("num_ln_in_parallel_attn", default=2) == 2
    values |= {"parallel_block": is_parallel, "shared_norm": is_parallel and not has_two_norms}


def mpt(keys: ConfigTable, values: Values) -> None:
    attention = keys.inner("attn_config")
    bias = not keys.flag("no_bias", default=True)
    if attention.flag("alibi", default=True):
        values["position"] = "alibi"
    elif not keys.flag("learned_pos_emb", default=True):
        values["position"] = "rotary" if attention.flag("rope", default=False) else "none"
    values["ffn"] = values["hidden"] * keys.count("expansion_ratio", default=4)
    values["kv_heads"] = attention.count("kv_n_heads", default=values["heads"])
    values["norm"] = "layer+bias" if bias else "layer"
    values["biases"] = dict.fromkeys(("qkv", "attention_output", "mlp"), bias)


def sparse_layers(keys: ConfigTable, layers: int) -> list[bool]:
    """Return which layers have experts: the last of every so many, but not those in mlp_only_layers."""
    every = keys.count("decoder_sparse_step", default=1)
    dense = keys.layer_numbers("mlp_only_layers", layers)
    return [(layer + 1) % every == 0 and layer not in dense for layer in range(layers)]


def qwen_experts(keys: ConfigTable, values: Values) -> None:
    layers, experts = values["layers"], values["experts"]
    # The Model refuses more layers.
    pattern = sparse_layers(keys, layers) if layers <= MOST_LAYERS else [True]
    expect(any(pattern), "decoder_sparse_step and mlp_only_layers leave no layer with experts")
    experts |= {"pattern": shortest_period(pattern), "shared_gate": experts["shared_ffn"] > 0}


def deepseek_experts(keys: ConfigTable, values: Values) -> None:
    if keys.kind != "glm4_moe" and not keys.has("n_routed_experts"):
        return
    ffn = keys.count("moe_intermediate_size")
    every = min(keys.count("moe_layer_freq", default=1), MOST_LAYERS)
    method = keys.word("topk_method", default="greedy" if keys.kind == "deepseek_v2" else "noaux_tc")
    # Left out, these are transformers' own defaults (DeepseekV3Config).
    usual = (8, 4) if keys.kind in ("deepseek_v3", "deepseek_v32") else (1, 1)
    values["experts"] = {
        "count": keys.count("n_routed_experts"),
        "top_k": keys.count("num_experts_per_tok"),
        "ffn": ffn,
        "shared_ffn": ffn * keys.count("n_shared_experts", default=0, least=0),
        "router_bias": method == "noaux_tc",  # the correction added to the scores when choosing
        "first_dense": keys.count("first_k_dense_replace", default=0, least=0),
        "pattern": (True,) + (False,) * (every - 1),
        "wide_weights": keys.kind != "glm4_moe",
        **(expert_groups(keys, *usual) if method != "greedy" else {}),
    }


def expert_groups(keys: ConfigTable, groups: int = 1, top_groups: int = 1) -> dict[str, int]:
    """Return the groups that experts are divided into, and how many of them a token may choose from."""
    return {"groups": keys.count("n_group", default=groups), "top_groups": keys.count("topk_group", default=top_groups)}


def llama4(keys: ConfigTable, values: Values) -> None:
    step = min(keys.count("interleave_moe_layer_step", default=1), MOST_LAYERS)
    values["experts"]["pattern"] = (False,) * (step - 1) + (True,)


# Letter of a layer by whether it mixes by attention and whether experts follow.
DELTA_LETTERS = {(False, False): "d", (False, True): "e", (True, False): "a", (True, True): "y"}
SELECTIVE_LETTERS = {(False, False): "s", (False, True): "t", (True, False): "a", (True, True): "y"}


def nemotron_h(keys: ConfigTable, values: Values) -> None:
    pattern = keys.word("hybrid_override_pattern", default="").replace("|", "")
    if not pattern:
        pattern = "".join(WORDS["letters_block"].get(str(kind), "?") for kind in keys.items("layers_block_type"))
    expect(pattern, "the nemotron_h config lacks hybrid_override_pattern or layers_block_type")
    values["hybrid"]["pattern"] = pattern
    if "E" in pattern:
        values["experts"] = {
            "count": keys.count("n_routed_experts"),
            "top_k": keys.count("num_experts_per_tok"),
            "ffn": keys.count("moe_intermediate_size"),
            "shared_ffn": keys.count("moe_shared_expert_intermediate_size", default=0, least=0),
            "router_bias": True,
            "latent": keys.count("moe_latent_size", default=0, least=0),
            **expert_groups(keys),
        }


def mamba_width(keys: ConfigTable, values: Values) -> None:
    """Set the width of a head as Bamba and Granite 4 name it; it follows from other sizes unless given."""
    heads, inner = values["hybrid"]["mamba_heads"], keys.count("mamba_expand", default=2) * values["hidden"]
    is_derived = keys.table.get("mamba_d_head", "auto") == "auto"
    if is_derived and inner % heads:
        raise FormatError(f"the inner width {inner} is not a multiple of {heads} Mamba heads")
    values["hybrid"]["mamba_head_dim"] = inner // heads if is_derived else keys.count("mamba_d_head")


def bamba(keys: ConfigTable, values: Values) -> None:
    attention = keys.layer_numbers("attn_layer_indices", values["layers"])
    values["hybrid"]["pattern"] = "".join("a" if layer in attention else "m" for layer in range(values["layers"]))


def granite(keys: ConfigTable, values: Values) -> None:
    shared = keys.count("shared_intermediate_size")
    count = keys.count("num_local_experts", default=0, least=0)
    letters = WORDS["letters_experts" if count else "letters_mlp"]
    kinds = keys.layer_types(letters) or ["mamba"] * min(values["layers"], MOST_LAYERS + 1)
    values["hybrid"]["pattern"] = "".join(letters[kind] for kind in kinds)
    values["position"] = "rotary" if keys.word("position_embedding_type", default="nope") == "rope" else "none"
    if count:
        top_k = keys.count("num_experts_per_tok")
        values["experts"] = {"count": count, "top_k": top_k, "ffn": values["ffn"], "shared_ffn": shared}
    values["ffn"] = 0 if count else shared


def qwen3_next(keys: ConfigTable, values: Values) -> None:
    layers = min(values["layers"], MOST_LAYERS + 1)
    every = keys.count("full_attention_interval", default=4)
    attention = [(layer + 1) % every == 0 for layer in range(layers)]
    if types := keys.layer_types(("linear_attention", "full_attention"), layers):
        attention = [kind == "full_attention" for kind in types]
    routed = sparse_layers(keys, layers)
    values["hybrid"] = {"pattern": "".join(DELTA_LETTERS[kind] for kind in zip(attention, routed, strict=True))}
    values["experts"]["shared_gate"] = values["experts"]["shared_ffn"] > 0
    if not any(routed):
        del values["experts"]
    if all(attention):
        del values["delta"]


def jamba(keys: ConfigTable, values: Values) -> None:
    layers = range(min(values["layers"], MOST_LAYERS + 1))
    every, first = keys.count("attn_layer_period", default=8), keys.count("attn_layer_offset", default=4, least=0)
    routed_every = keys.count("expert_layer_period", default=2)
    routed_first = keys.count("expert_layer_offset", default=1, least=0)
    has_experts = values["experts"]["count"] > 1
    kinds = [(layer % every == first, has_experts and layer % routed_every == routed_first) for layer in layers]
    values["hybrid"] = {"pattern": "".join(SELECTIVE_LETTERS[kind] for kind in kinds)}
    if not any(routed for _, routed in kinds):
        del values["experts"]


def selective(keys: ConfigTable, values: Values) -> None:
    """Set the widths of Mamba blocks as Jamba names them, or Mamba."""
    hidden, is_jamba = values["hidden"], keys.kind == "jamba"
    inner = keys.count("mamba_expand" if is_jamba else "expand", default=2) * hidden
    if not is_jamba:
        inner = keys.count("intermediate_size", "d_inner", default=inner)
    rank = "mamba_dt_rank" if is_jamba else "time_step_rank"
    is_auto = keys.table.get(rank, "auto") == "auto"
    values["selective"] |= {"inner": inner, "rank": -(-hidden // 16) if is_auto else keys.count(rank)}


RULES: Mapping[str, Callable[[ConfigTable, Values], None]] = {
    rule.__name__: rule
    for rule in (
        *(qwen_window, attention_dropout, opt, falcon, mpt, qwen_experts, deepseek_experts, llama4, nemotron_h),
        *(mamba_width, bamba, granite, qwen3_next, jamba, selective),
    )
}

FAMILIES = read_families()
# The parts of multimodal configs that hold their language model.
TEXT_PARTS = ("text_config", "llm_config", "language_config")

SIZE_KEYS = re.compile(
    r'"(hidden_size|num_hidden_layers|num_attention_heads|n_layers?|n_embd|n_heads?|d_model|vocab_size|'
    r'head_num|layer_num|attn_heads|num_blocks|hidden)"\s*:'
)
NAMED = re.compile(r'"(model_type|architectures)"\s*:')
CLASS_ENDINGS = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration|Model)$")


def looks_like(head: str) -> bool:
    """Return whether it is a JSON object with a model type or architecture, or three of the usual sizes."""
    if not head.lstrip("\ufeff \t\r\n").startswith("{") or '"traceEvents"' in head:
        return False
    return NAMED.search(head) is not None or len({match[1] for match in SIZE_KEYS.finditer(head)}) >= 3


def read(source: Source) -> Model:
    """Return the model a file describes, named after its folder if the file is called config.json."""
    folder, file = os.path.split(os.path.abspath(source.path))
    stem = file.split(".")[0]
    try:
        return read_config(source.data(CONFIG), os.path.basename(folder) if stem == "config" else stem)
    except FormatError:
        from stepcast.inputs.table import refuse_known

        refuse_known(source, "the configuration of a model is needed")
        raise


def read_config(data: bytes | str, name: str) -> Model:
    """Return the Model that the text of a config.json describes."""
    try:
        table = _decode(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)
        if not isinstance(table, dict):
            raise FormatError(f"expected a JSON object with a model's sizes, not {quote_value(table)}")
        table = as_hugging_face(table) or table
        outer = ConfigTable(table, "")
        keys = _text_keys(outer)
        rows, values = FAMILIES[keys.kind], Values()
        for key in rows.get("unbiased", "").split():
            expect(not keys.flag(key, default=False), f"{key}: Mamba blocks with biased projections are not known")
        for field, row in rows.items():
            if field not in ("types", "unbiased", "rules") and (value := _read_row(row, keys, values)) is not None:
                values[field] = value
        for rule in rows.get("rules", "").split():
            RULES[rule](keys, values)
        model = build_model(name or keys.kind, values)
        if outer.has("quantization_config"):
            method = outer.inner("quantization_config").word("quant_method", default="of no named method")
            note, known = f"quantization_config ({quote_value(method)}) of the model", method in PUBLISHED
            use = "is that of 'stepcast generate', not of training" if known else "is not read"
            unread = (f"{note} {use}: options state the format of weights",)
            model = replace(model, unread=unread, published_weights=method if known else model.published_weights)
        scaling = keys.find("rope_scaling", "rope_parameters")[1]
        is_yarn = isinstance(scaling, dict) and "yarn" in (scaling.get("rope_type"), scaling.get("type"))
        if model.position.kind is PositionKind.ROTARY and model.latent is None and is_yarn:
            # YaRN multiplies cosine and sine by a factor above 1.
            model = replace(model, position=replace(model.position, scaled=True))
        return model
    except FormatError:
        raise
    except ValueError as error:  # a check of the Model or one of its parts
        raise FormatError(str(error)) from None


def _decode(data: bytes) -> object:
    """Decode JSON; also with the NaN and Infinity that Python writes, which some configs hold."""
    data, line = data.removeprefix(b"\xef\xbb\xbf"), None
    try:
        try:
            return msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            if b"Infinity" in data or b"NaN" in data:
                return json.loads(data.decode())
            position = re.search(r"\(byte (\d+)\)", str(error))
            line = data.count(b"\n", 0, int(position[1])) + 1 if position else None
            raise ValueError(f"{error}; expected a config.json of Hugging Face (--config reads others)") from None
    except RecursionError:
        raise FormatError("is nested too deeply for a model's config") from None
    except ValueError as error:
        raise FormatError(f"cannot be read as JSON: {error}", line=line) from None


def _text_keys(keys: ConfigTable) -> ConfigTable:
    """Return the keys of the language model, which multimodal configs hold in a part, with their type."""
    kind = _model_type(keys)
    if part := next((name for name in TEXT_PARTS if keys.has(name)), None):
        keys = keys.inner(part)
        kind = _model_type(keys) or kind
    if kind in FAMILIES:
        return ConfigTable(keys.table, kind)
    listed = f"docs/models.md lists the {len(FAMILIES)} that are known"
    expect(kind, f"names no model_type; {listed}")
    lacking = WORDS["not_modelled"].get(kind)
    why = f": it has {lacking}, which are not modelled" if lacking else ""
    hint = "'stepcast capture' takes it as PyTorch runs it, where transformers knows it"  # needs no family
    names = ", ".join(get_close_matches(kind, FAMILIES, n=3))
    nearest = f"nearest are {names}; " if names else ""
    raise FormatError(f"unknown model_type {quote_value(kind)}{why}; {nearest}{listed}; {hint}")


def _model_type(keys: ConfigTable) -> str:
    """Return model_type, or what the class named in architectures implies."""
    if kind := keys.word("model_type", default=""):
        return kind
    stems = (CLASS_ENDINGS.sub("", str(architecture)).lower() for architecture in keys.items("architectures"))
    return next((family for stem in stems for family in FAMILIES if family.replace("_", "") == stem), "")
