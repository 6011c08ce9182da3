"""Hugging Face configs of dense models, one function per family.

Keys that a config leaves out have the default of its class in transformers; sizes are never guessed, except
where published files rely on the class for them (Gemma 3).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from stepcast.inputs.source import FormatError
from stepcast.ir.architecture import MOST_LAYERS
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Activation, Biases, Norm, NormKind, Position, PositionKind, QkNorm, Window

ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "swiglu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_NEW,
    "gelu_fast": Activation.GELU,
    "gelu_accurate": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU,
    "quick_gelu": Activation.GELU,
    "relu": Activation.RELU,
    "relu2": Activation.SQUARED_RELU,
}

LAYER_TYPES = {"sliding_attention": True, "chunked_attention": True, "full_attention": False}


def shown(value: object) -> str:
    """Return a value for a message: on one line and short."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "a JSON object"
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
            raise FormatError(f"{name} must be a whole number of at least {least}, not {shown(value)}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.table.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
            raise FormatError(f"{name} must be a number, zero or more, not {shown(value)}")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        name, value = self.find(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise FormatError(f"{name} must be true or false, not {shown(value)}")
        return value

    def word(self, *names: str, default: str) -> str:
        name, value = self.find(*names)
        if value is None:
            return default
        if not isinstance(value, str):
            raise FormatError(f"{name} must be text, not {shown(value)}")
        return value

    def items(self, name: str) -> list[object]:
        value = self.table.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise FormatError(f"{name} must be a list, not {shown(value)}")
        return value

    def inner(self, name: str) -> "ConfigTable":
        """Return a nested table; an empty one if it is not there."""
        value = self.table.get(name)
        if value is None:
            return ConfigTable({}, self.kind)
        if not isinstance(value, dict):
            raise FormatError(f"{name} must be a JSON object, not {shown(value)}")
        return ConfigTable(value, self.kind)

    def activation(self, *names: str, default: str) -> Activation:
        word = self.word(*names, default=default)
        if word not in ACTIVATIONS:
            raise FormatError(f"unknown activation {shown(word)}; known: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[word]

    def window(
        self, layers: int, pattern: tuple[bool, ...] = (True,), size_key: str = "sliding_window"
    ) -> Window | None:
        """Return local attention, where *size_key* gives a size; layer_types outranks *pattern*."""
        if not self.has(size_key):
            return None
        size = self.count(size_key)
        if types := self.layer_types(LAYER_TYPES, layers):
            pattern = tuple(LAYER_TYPES[kind] for kind in types)
        is_chunked = size_key == "attention_chunk_size"
        return Window(size, shortest_period(pattern), is_chunked) if any(pattern) else None

    def layer_types(self, known: Iterable[str], layers: int | None = None) -> list[str]:
        """Return the kind of each layer, empty where the config does not list them; each must be *known*."""
        types = self.items("layer_types")
        if types and layers is not None and len(types) != layers:
            raise FormatError(f"layer_types has {len(types)} entries for {layers} layers")
        unknown = [kind for kind in types if not isinstance(kind, str) or kind not in known]
        if unknown:
            raise FormatError(f"unknown layer type {shown(unknown[0])}; known: {', '.join(known)}")
        return [str(kind) for kind in types]

    def layer_numbers(self, name: str, layers: int) -> set[int]:
        """Return the layers that a list names."""
        numbers = set()
        for layer in self.items(name):
            if type(layer) is not int or not 0 <= layer < layers:
                raise FormatError(f"{name} names {shown(layer)}; there are {layers} layers")
            numbers.add(layer)
        return numbers


def shortest_period(pattern: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return the shortest beginning of *pattern* that, repeated, gives all of it."""
    for length in range(1, min(len(pattern), 64)):
        if all(pattern[i] == pattern[i % length] for i in range(len(pattern))):
            return pattern[:length]
    return pattern


LAYER_NORM = Norm(NormKind.LAYER, bias=True)
ALL_BIASES = Biases(qkv=True, attention_output=True, mlp=True)
ALIBI = Position(PositionKind.ALIBI)


def head_dim(keys: ConfigTable, hidden: int, heads: int) -> int:
    """Return the width of a head as given, or the hidden width divided among the heads."""
    if keys.has("head_dim", "attention_head_dim", "kv_channels"):
        return keys.count("head_dim", "attention_head_dim", "kv_channels")
    if hidden % heads:
        raise FormatError(f"hidden size {hidden} is not a multiple of {heads} attention heads")
    return hidden // heads


def llama(keys: ConfigTable, name: str) -> Model:
    """RMS norms, rotary positions, gated MLP; also the frame of most later families."""
    hidden = keys.count("hidden_size")
    heads = keys.count("num_attention_heads")
    attention_bias = keys.flag("attention_bias", "bias", default=False)
    layers = keys.count("num_hidden_layers")
    return Model(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=keys.count("num_key_value_heads", default=heads),
        head_dim=head_dim(keys, hidden, heads),
        ffn=keys.count("intermediate_size"),
        vocab=keys.count("vocab_size"),
        max_seq=keys.count("max_position_embeddings", default=2048),
        tied=keys.flag("tie_word_embeddings", default=False),
        activation=keys.activation("hidden_act", "hidden_activation", default="silu"),
        biases=Biases(attention_bias, attention_bias, keys.flag("mlp_bias", default=False)),
    )


def internlm(keys: ConfigTable, name: str) -> Model:
    bias = keys.flag("bias", default=True)
    return replace(llama(keys, name), biases=Biases(bias, bias))


def mistral(keys: ConfigTable, name: str) -> Model:
    model = llama(keys, name)
    return replace(model, window=keys.window(model.layers))


def qwen2(keys: ConfigTable, name: str) -> Model:
    model = replace(llama(keys, name), biases=Biases(qkv=True))
    return replace(model, window=qwen_window(keys, model.layers))


def qwen_window(keys: ConfigTable, layers: int) -> Window | None:
    """Return Qwen's window: the layers from max_window_layers on, and only if use_sliding_window is set."""
    if not keys.flag("use_sliding_window", default=False):
        return None
    full = min(keys.count("max_window_layers", default=28, least=0), layers)
    if layers > MOST_LAYERS:  # the Model refuses it in a moment; do not build its pattern first
        return None
    return keys.window(layers, (False,) * full + (True,) * (layers - full))


def qwen3(keys: ConfigTable, name: str) -> Model:
    model = llama(keys, name)
    dim = keys.count("head_dim", default=128)
    window = qwen_window(keys, model.layers)
    return replace(model, head_dim=dim, qk_norm=QkNorm.HEAD, window=window)


def olmo2(keys: ConfigTable, name: str) -> Model:
    """Norms after each half alone, and of all queries and all keys of a token (OLMo 2, 2025, section 2)."""
    return replace(llama(keys, name), pre_norms=False, post_norms=True, qk_norm=QkNorm.WHOLE)


def phi3(keys: ConfigTable, name: str) -> Model:
    model = llama(keys, name)
    return replace(model, biases=Biases(), window=keys.window(model.layers))


def gemma(keys: ConfigTable, name: str) -> Model:
    model = llama(keys, name)
    dim = keys.count("head_dim", default=256)
    tied = keys.flag("tie_word_embeddings", default=True)
    return replace(model, head_dim=dim, tied=tied, activation=Activation.GELU)


def gemma2(keys: ConfigTable, name: str) -> Model:
    """Norms before and after each half, soft-capped scores, every second layer windowed."""
    model = gemma(keys, name)
    return replace(
        model,
        post_norms=True,
        attention_softcap=keys.number("attn_logit_softcapping", 50.0),
        logit_softcap=keys.number("final_logit_softcapping", 30.0),
        window=keys.window(model.layers, (True, False)),
    )


# Published Gemma 3 files leave these to the class (transformers Gemma3TextConfig).
GEMMA3_SIZES: dict[str, object] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def gemma3(keys: ConfigTable, name: str) -> Model:
    """Gemma 2 with norms of queries and keys in place of the soft caps, one layer in six full."""
    given = {key: value for key, value in keys.table.items() if value is not None}
    keys = ConfigTable(GEMMA3_SIZES | given, keys.kind)
    every = min(keys.count("sliding_window_pattern", default=6), MOST_LAYERS)
    model = gemma(keys, name)
    return replace(
        model,
        post_norms=True,
        qk_norm=QkNorm.HEAD,
        attention_softcap=keys.number("attn_logit_softcapping", 0.0),
        logit_softcap=keys.number("final_logit_softcapping", 0.0),
        window=keys.window(model.layers, (True,) * (every - 1) + (False,)),
    )


def nemotron(keys: ConfigTable, name: str) -> Model:
    """Layer norms, squared ReLU without a gate, no biases (Nemotron-4, 2024)."""
    model = llama(keys, name)
    activation = keys.activation("hidden_act", default="relu2")
    return replace(model, norm=LAYER_NORM, gated=False, activation=activation)


def starcoder2(keys: ConfigTable, name: str) -> Model:
    bias = keys.flag("use_bias", default=True)
    model = llama(keys, name)
    return replace(
        model,
        norm=LAYER_NORM,
        gated=False,
        activation=keys.activation("hidden_act", default="gelu_pytorch_tanh"),
        biases=Biases(bias, bias, bias),
        tied=keys.flag("tie_word_embeddings", default=True),
        window=keys.window(model.layers),
    )


def _plain_decoder(
    keys: ConfigTable, name: str, layers: tuple[str, ...], hidden: int, heads: int, ffn: int, max_seq: int
) -> Model:
    """Return a decoder without grouped heads or a gate, with layer norms and tied embeddings."""
    return Model(
        name=name,
        layers=keys.count(*layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim(keys, hidden, heads),
        ffn=ffn,
        vocab=keys.count("vocab_size"),
        max_seq=max_seq,
        tied=keys.flag("tie_word_embeddings", default=True),
        gated=False,
        norm=LAYER_NORM,
    )


def gpt2(keys: ConfigTable, name: str) -> Model:
    """Layer norms, learned positions, biases everywhere; also GPT-BigCode with one key/value head."""
    hidden, heads = keys.count("n_embd", "hidden_size"), keys.count("n_head", "num_attention_heads")
    positions = keys.count("n_positions", "n_ctx", "max_position_embeddings")
    layers, ffn = ("n_layer", "num_hidden_layers"), keys.count("n_inner", default=4 * hidden)
    return replace(
        _plain_decoder(keys, name, layers, hidden, heads, ffn, positions),
        kv_heads=1 if keys.flag("multi_query", default=keys.kind == "gpt_bigcode") else heads,
        activation=keys.activation("activation_function", default="gelu_new"),
        biases=ALL_BIASES,
        position=Position(PositionKind.LEARNED, positions),
    )


def gptj(keys: ConfigTable, name: str) -> Model:
    """Attention and MLP in parallel behind one norm; biases in the MLP and the head only."""
    model = gpt2(keys, name)
    return replace(
        model,
        tied=keys.flag("tie_word_embeddings", default=False),
        biases=Biases(mlp=True, head=True),
        position=Position(),
        parallel_block=True,
        shared_norm=True,
    )


def gpt_neox(keys: ConfigTable, name: str) -> Model:
    """Attention and MLP in parallel, each with its own norm."""
    bias = keys.flag("attention_bias", default=True)
    return replace(
        llama(keys, name),
        gated=False,
        activation=keys.activation("hidden_act", default="gelu"),
        norm=LAYER_NORM,
        biases=Biases(bias, bias, mlp=True),
        parallel_block=keys.flag("use_parallel_residual", default=True),
    )


def opt(keys: ConfigTable, name: str) -> Model:
    """Two rows more of learned positions than tokens; the 350M model has a narrower word embedding."""
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    positions = keys.count("max_position_embeddings")
    bias = keys.flag("enable_bias", default=True)
    width = keys.count("word_embed_proj_dim", default=hidden)
    norm_first = keys.flag("do_layer_norm_before", default=True)
    return replace(
        _plain_decoder(keys, name, ("num_hidden_layers",), hidden, heads, keys.count("ffn_dim"), positions),
        activation=keys.activation("activation_function", default="relu"),
        biases=Biases(bias, bias, bias),
        position=Position(PositionKind.LEARNED, positions + 2),
        embedding_width=0 if width == hidden else width,
        final_norm=norm_first and not keys.flag("_remove_final_layer_norm", default=False),
    )


def bloom(keys: ConfigTable, name: str) -> Model:
    hidden, heads = keys.count("hidden_size", "n_embed"), keys.count("n_head", "num_attention_heads")
    layers, max_seq = ("n_layer", "num_hidden_layers"), keys.count("seq_length", default=2048)
    return replace(
        _plain_decoder(keys, name, layers, hidden, heads, 4 * hidden, max_seq),
        activation=Activation.GELU_BLOOM,
        biases=ALL_BIASES,
        position=ALIBI,
        embedding_norm=True,
    )


def falcon(keys: ConfigTable, name: str) -> Model:
    """Falcon-7B shares one key/value head and one norm, Falcon-40B groups heads and has two norms."""
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads", "n_head")
    is_grouped = keys.flag("new_decoder_architecture", default=False)
    is_parallel = is_grouped or keys.flag("parallel_attn", default=True)
    if is_grouped:
        kv_heads = keys.count("num_kv_heads", "n_head_kv", default=heads)
    else:
        kv_heads = 1 if keys.flag("multi_query", default=True) else heads
    bias = keys.flag("bias", default=False)
    has_two_norms = is_grouped and keys.count("num_ln_in_parallel_attn", default=2) == 2
    layers, ffn = ("num_hidden_layers", "n_layer"), keys.count("ffn_hidden_size", default=4 * hidden)
    max_seq = keys.count("max_position_embeddings", default=2048)
    return replace(
        _plain_decoder(keys, name, layers, hidden, heads, ffn, max_seq),
        kv_heads=kv_heads,
        activation=keys.activation("activation", default="gelu"),
        biases=Biases(bias, bias, bias),
        position=ALIBI if keys.flag("alibi", default=False) else Position(),
        parallel_block=is_parallel,
        shared_norm=is_parallel and not has_two_norms,
    )


def phi(keys: ConfigTable, name: str) -> Model:
    """Attention and MLP in parallel behind one norm; biases everywhere, in the head too."""
    normed = keys.flag("qk_layernorm", default=False)
    return replace(
        llama(keys, name),
        gated=False,
        activation=keys.activation("hidden_act", default="gelu_new"),
        norm=LAYER_NORM,
        biases=replace(ALL_BIASES, head=True),
        parallel_block=True,
        shared_norm=True,
        qk_norm=QkNorm.HEAD if normed else QkNorm.NONE,
    )


def mpt(keys: ConfigTable, name: str) -> Model:
    """Defaults of transformers' MptConfig: ALiBi, no biases; its norms never have one."""
    hidden, heads = keys.count("d_model"), keys.count("n_heads")
    attention = keys.inner("attn_config")
    max_seq = keys.count("max_seq_len", default=2048)
    bias = not keys.flag("no_bias", default=True)
    if attention.flag("alibi", default=True):
        position = ALIBI
    elif keys.flag("learned_pos_emb", default=True):
        position = Position(PositionKind.LEARNED, max_seq)
    else:
        position = Position(PositionKind.ROTARY if attention.flag("rope", default=False) else PositionKind.NONE)
    ffn = hidden * keys.count("expansion_ratio", default=4)
    return replace(
        _plain_decoder(keys, name, ("n_layers",), hidden, heads, ffn, max_seq),
        kv_heads=attention.count("kv_n_heads", default=heads),
        activation=Activation.GELU,
        norm=Norm(NormKind.LAYER, bias=bias),
        biases=Biases(bias, bias, bias),
        position=position,
    )
