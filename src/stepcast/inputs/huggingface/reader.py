"""Hugging Face ``config.json`` -> Model."""

import os
import re
from dataclasses import replace

from stepcast.inputs.configs.peers import as_hugging_face
from stepcast.inputs.huggingface.families import ConfigTable, families, read_fields, shown
from stepcast.inputs.model_table import build_model
from stepcast.inputs.source import FormatError, Source, read_words
from stepcast.ir.limits import CONFIG
from stepcast.ir.model import Model
from stepcast.ir.model_parts import PositionKind

FAMILIES = families()
# Parts of often requested types that are not modelled.
LACKING = read_words("configs")["not_modelled"]
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
        from stepcast.inputs.captured import refuse_captured

        refuse_captured(source)
        raise


def read_config(data: bytes | str, name: str) -> Model:
    """Return the Model that the text of a config.json describes."""
    try:
        table = _decode(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)
        if not isinstance(table, dict):
            raise FormatError(f"expected a JSON object with a model's sizes, not {shown(table)}")
        table = as_hugging_face(table) or table
        keys = _text_keys(ConfigTable(table, ""))
        model = build_model(name or keys.kind, read_fields(keys))
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
    import json

    import msgspec

    data = data.removeprefix(b"\xef\xbb\xbf")
    line = None
    try:
        try:
            return msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            if b"Infinity" in data or b"NaN" in data:
                return json.loads(data.decode())
            position = re.search(r"\(byte (\d+)\)", str(error))
            line = data.count(b"\n", 0, int(position[1])) + 1 if position else None
            raise ValueError(f"{error}; expected a Hugging Face config.json") from None
    except RecursionError:
        raise FormatError("is nested too deeply for a model's config") from None
    except ValueError as error:
        raise FormatError(f"cannot be read as JSON: {error}", line=line) from None


def _text_keys(keys: ConfigTable) -> ConfigTable:
    """Return the keys of the language model, which multimodal configs hold in a part, with their type."""
    kind = _model_type(keys)
    part = next((name for name in TEXT_PARTS if keys.has(name)), None)
    if kind in FAMILIES and part is None:
        return ConfigTable(keys.table, kind)
    if part is not None:
        inner = keys.inner(part)
        inner_kind = _model_type(inner) or kind
        if inner_kind in FAMILIES:
            return ConfigTable(inner.table, inner_kind)
        kind = inner_kind
    raise FormatError(_explain_unknown(kind))


def _explain_unknown(kind: str) -> str:
    """Return what is missing, and the way that needs no family."""
    if not kind:
        return f"names no model_type; known: {', '.join(FAMILIES)}"
    why = f": it has {LACKING[kind]}, which are not modelled" if kind in LACKING else ""
    other = "'stepcast capture' takes it as PyTorch runs it, where transformers knows it"
    return f"unknown model_type {shown(kind)}{why}; {other}; known: {', '.join(FAMILIES)}"


def _model_type(keys: ConfigTable) -> str:
    """Return model_type, or what the class named in architectures implies."""
    kind = keys.word("model_type", default="")
    if kind:
        return kind
    for architecture in keys.items("architectures"):
        stem = CLASS_ENDINGS.sub("", str(architecture)).lower()
        for family in FAMILIES:
            if family.replace("_", "") == stem:
                return family
    return ""
