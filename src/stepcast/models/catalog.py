"""Models by name, by columns of measured runs, and by the sizes of a configuration.

The catalogue is data/models/*.toml, one file per family; only the file that is asked for is read.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from stepcast.inputs.model_table import PART_WORDS, model_of, part_of, part_words
from stepcast.inputs.source import FormatError, Source, prefix_errors, read_toml
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Experts, FeedForward, Latent, PositionKind, Window
from stepcast.ir.tables import parse_tables
from stepcast.ir.types import FactDict, Facts, group_by_key, require

FOLDER = Path(__file__).parents[1] / "data" / "models"
INDEX = "index"

# Fine-tuned and quantised checkpoints have the architecture of their base.
TUNED = re.compile(r"(hf|base|instruct|chat|it|pt|nvfp4|fp4|fp8)$")
CUT = re.compile(r"^(.+?)[-_ ]+(?:l(\d+)|(\d+)[-_ ]?(?:l|layers?))$", re.IGNORECASE)
SIZED = re.compile(r"^(.+?):(\w+\s*=[^/\\]*)$")  # a name and sizes of its own


class UnknownModelError(ValueError):
    """A name that is neither in the catalogue nor a file."""


def model_names() -> tuple[str, ...]:
    """Return every name of the catalogue, in the order of its files."""
    return tuple(_index()[1])


def load_model(name_or_path: str | os.PathLike[str] | Model) -> Model:
    """Return a model of the catalogue, or of a file: Hugging Face config.json, its folder, or TOML; a Model is itself.

    Case and punctuation do not matter. A last word such as ``l12`` or ``12layers`` cuts the model to that
    many layers: ``llama3-70b-l12``. A name may carry sizes that differ, or all of a model that is not known:
    ``llama3-8b:layers=16,vocab=32000``, ``mine:layers=24,hidden=2048``.
    """
    if isinstance(name_or_path, Model):
        return name_or_path
    text = os.fspath(name_or_path).strip()
    if sized := SIZED.match(text):
        model = model_of_columns(sized[1], sizes_of(sized[2], text))
        return replace(model, name=Path(sized[1]).stem) if os.path.exists(sized[1]) else model
    if os.path.basename(text) != text and os.path.exists(text):
        return _model_of_file(Path(text))
    if known := find_name(text):
        return catalogue_model(known)
    if os.path.exists(text):
        return _model_of_file(Path(text))
    if (cut := CUT.match(text)) and (base := find_name(cut[1])):
        model, layers = catalogue_model(base), int(cut[2] or cut[3])
        if not 1 <= layers <= model.layers:
            raise UnknownModelError(f"{text}: {model.name} has {model.layers} layers; it cannot be cut to {layers}")
        return replace(model.with_layers(layers), name=f"{model.name}-l{layers}")
    raise UnknownModelError(_explain_unknown(text))


def find_name(text: str) -> str | None:
    """Return the catalogue's own name for *text*, or None."""
    known = _index()[0]
    word = _plain(text)
    while word:
        # A point between digits matters (gpt3-1.3b is not gpt3-13b), but may be left out.
        if name := known.get(word) or known.get(f"no point {word}"):
            return name
        word, changed = TUNED.subn("", word)
        if not changed:
            return None
    return None


@lru_cache(maxsize=512)
def catalogue_model(name: str) -> Model:
    """Return the model of that exact name."""
    return model_of(name, _family(_index()[1][name])[name])


def family_of(name: str) -> str:
    """Return the file of a name of the catalogue, without its suffix."""
    return _index()[1][name]


def _plain(text: str) -> str:
    """Return *text* in lower case, without owner and punctuation other than points."""
    return re.sub(r"[^a-z0-9.]", "", text.rsplit("/", 1)[-1].lower())


@lru_cache(maxsize=1)
def _index() -> tuple[dict[str, str], dict[str, str]]:
    """Return plain spelling -> name, and name -> family."""
    spellings: dict[str, str] = {}
    families: dict[str, str] = {}
    for family, models in _toml(INDEX).items():
        for name, aliases in models.items():
            families[name] = family
            for alias in (name, *aliases):
                spellings[_plain(alias)] = name
    without = group_by_key((word.replace(".", ""), name) for word, name in spellings.items())
    spellings |= {f"no point {word}": names[0] for word, names in without.items() if len(set(names)) == 1}
    return spellings, families


@lru_cache(maxsize=64)
def _family(family: str) -> dict[str, dict[str, object]]:
    """Return name -> full table, with the common values of the family filled in."""
    groups = _toml(family)["family"]
    commons = [{key: value for key, value in group.items() if key != "models"} for group in groups]
    pairs = zip(groups, commons, strict=True)
    return {name: common | table for group, common in pairs for name, table in group["models"].items()}


def _toml(stem: str) -> FactDict:
    return parse_tables((FOLDER / f"{stem}.toml").read_text(encoding="utf-8"))


def _model_of_file(path: Path) -> Model:
    from stepcast.inputs.huggingface.reader import read

    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".toml":
        table = read_toml(path)
        with prefix_errors(str(path)):
            return model_of(str(table.pop("name", path.stem)), table)
    try:
        return read(Source(path))
    except FormatError as error:
        raise error.in_file(str(path)) from None


def _explain_unknown(text: str) -> str:
    from difflib import get_close_matches

    spellings, families = _index()
    plain, words = _plain(text), [word for word in spellings if " " not in word]
    begun = sorted(word for word in words if plain and word.startswith(plain))  # names that begin so
    near = [*begun, *get_close_matches(plain, words, n=5, cutoff=0.6)]
    names = list(dict.fromkeys(spellings[word] for word in near))[:3]
    hint = f"did you mean {' or '.join(names)}?" if names else f"'stepcast list models' has {len(families)}"
    return f"unknown model {text!r}, and no such file; {hint}"


# Models of a row of a table of measurements: by its name where the catalogue knows it, else by its sizes.

# Columns that are fields of the Model; ``seq`` and ``window`` are treated apart.
COLUMN_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "vocab_multiple",
                "next_token_layers")  # fmt: skip
# Column -> field of the experts, and of multi-head latent attention.
EXPERT_SIZES = {"moe_experts": "count", "moe_topk": "top_k", "moe_ffn": "ffn", "moe_shared_ffn": "shared_ffn",
                "moe_shared_gate": "shared_gate", "moe_dense_layers": "first_dense", "moe_groups": "groups",
                "moe_top_groups": "top_groups"}  # fmt: skip
LATENT_SIZES = {f"mla_{name}": name for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim", "query_rank")}
# Column with a digit for each layer, repeated -> the part that layers with 1 have.
PATTERNS = {"moe_pattern": "experts", "window_pattern": "window"}
WORDS = (*PART_WORDS, *PATTERNS)
STRUCTURE = ("gated", "embedding_norm", "post_norms", "parallel_block")  # 1 or 0, like the next
SWITCHES = (*STRUCTURE, "tied", "attention_sinks", "attention_gate")
ALL_SIZES = (*COLUMN_SIZES, "seq", "window", *EXPERT_SIZES, *LATENT_SIZES, *SWITCHES)
PADDED_GPT_VOCAB = 51200  # Megatron's GPT-2 vocabulary of 50,257 padded for eight-way tensor parallelism
# Shares of a published parameter count, which may be rounded, by which one architecture is preferred to another.
EXACT_PARAMETERS, CERTAINLY_ANOTHER = 0.0005, 0.002


def model_of_columns(name: str, columns: Mapping[str, object]) -> Model:
    """Return the model of a row with the columns of ``ALL_SIZES``, ``WORDS`` and params_b, any of them blank.

    A known name gives the architecture and the columns correct its sizes. An unknown name needs hidden; an MLP four
    times as wide (or of no given width) makes it a GPT unless params_b is that of a Llama, else it is a Llama. Missing
    layers follow from params_b, which also separates tied from untied weights; missing heads are about 128 wide.
    """
    sizes = {key: _read_whole_number(key, columns[key]) for key in ALL_SIZES if not _blank(columns, key)}
    words = {key: str(columns[key]) for key in PART_WORDS if not _blank(columns, key)}
    try:
        model = load_model(name)
    except UnknownModelError:
        model = _model_of_sizes(name, sizes, columns)
    model = _with_sizes(model, sizes)
    model_parts = part_words(model)
    parts = {key: part_of(key, word, model.max_seq) for key, word in words.items() if word != model_parts[key]}
    for column, part in PATTERNS.items():
        if not _blank(columns, column) and (layered := getattr(model, part)) is not None:
            digits = str(columns[column])
            if set(digits) - {"0", "1"}:
                raise ValueError(f"column {column}: {digits!r} has not a 1 or a 0 for each layer")
            parts[part] = replace(layered, pattern=tuple(digit == "1" for digit in digits))
    model = replace(model, **parts)  # type: ignore[arg-type]
    seq = sizes.get("seq", model.max_seq)
    if model.position.kind is PositionKind.LEARNED or seq > model.max_seq:
        model = model.with_max_seq(seq)
    return replace(model, name=name)


def sizes_of(text: str, where: str) -> dict[str, str]:
    """Return the columns that ``layers=16,vocab=32000`` gives."""
    known, columns = (*ALL_SIZES, *WORDS, "params_b"), {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in known or not (equals and value):
            raise ValueError(f"model {where}: {part.strip()!r} is no size; expected {', '.join(known)}, as layers=16")
        try:
            columns[key] = value if key in WORDS else f"{float(value):.15g}"
        except ValueError:
            raise ValueError(f"model {where}: {key} {value!r} is not a number") from None
    return columns


def words_of(name: str, columns: Mapping[str, object]) -> str:
    """Return the name with the sizes of *columns*, as ``load_model`` takes it."""
    filled = {key: columns[key] for key in (*ALL_SIZES, *WORDS, "params_b") if not _blank(columns, key)}
    numbers = {key: value if key in WORDS else f"{float(str(value)):.15g}" for key, value in filled.items()}
    return f"{name}:{','.join(f'{key}={value}' for key, value in numbers.items())}"


def _blank(columns: Mapping[str, object], key: str) -> bool:
    value = columns.get(key)
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _write_pattern(part: Experts | Window | None) -> str:
    return "".join("1" if is_set else "0" for is_set in part.pattern) if part else "1"


def _read_whole_number(key: str, value: object) -> int:
    try:
        number = float(str(value))
    except ValueError:
        raise ValueError(f"column {key}: {value!r} is not a number") from None
    require(number.is_integer() and number >= 0, f"column {key}: {value!r} is not a whole number")
    return int(number)


def _with_sizes(model: Model, sizes: Mapping[str, int]) -> Model:
    """Return *model* with the row's own sizes."""
    changes: FactDict = {key: sizes[key] for key in COLUMN_SIZES if key in sizes and key != "layers"}
    changes |= {key: bool(sizes[key]) for key in SWITCHES if key in sizes}
    if model.latent is not None:
        changes.pop("kv_heads", None)
    hidden, heads = changes.get("hidden", model.hidden), changes.get("heads", model.heads)
    if (hidden, heads) != (model.hidden, model.heads):
        changes.setdefault("kv_heads", heads if model.kv_heads == model.heads else model.kv_heads)
        if model.head_dim * model.heads == model.hidden:
            changes.setdefault("head_dim", hidden // heads)
    experts = model.experts
    routed = {field: sizes[key] for key, field in EXPERT_SIZES.items() if key in sizes}
    if experts is not None and routed:
        experts = replace(experts, **routed)  # type: ignore[arg-type]
    elif routed.get("count"):
        require("top_k" in routed, "moe_experts needs moe_topk, the number of experts of each token")
        # Megatron-LM gives experts the width of an MLP where a run states no other.
        experts = Experts(**{"ffn": sizes.get("ffn", model.ffn), **routed})  # type: ignore[arg-type]
    if "window" in sizes:
        size, window = sizes["window"], model.window
        changes["window"] = (replace(window, size=size) if window else Window(size)) if size else None
    latent = {field: sizes[key] for key, field in LATENT_SIZES.items() if key in sizes}
    if latent:
        changes["latent"] = replace(model.latent, **latent) if model.latent else Latent(**latent)
        changes["head_dim"] = changes["latent"].nope_dim + changes["latent"].rope_dim
        changes["kv_heads"] = heads
    model = replace(model, experts=experts, **changes)
    return model.with_layers(sizes["layers"]) if "layers" in sizes else model


def _model_of_sizes(name: str, sizes: Mapping[str, int], columns: Mapping[str, object]) -> Model:
    if "hidden" not in sizes:
        raise UnknownModelError(f"model {name!r} is not in the catalogue, and the row gives no hidden size")
    hidden = sizes["hidden"]
    # By default the number of heads that divides hidden and comes closest to a width of 128.
    divisors = (heads for heads in range(1, min(hidden, 1024) + 1) if hidden % heads == 0)
    heads = sizes.get("heads") or min(divisors, key=lambda heads: abs(hidden / heads - 128))
    # Without a width, that of Megatron-LM (training/arguments.py).
    ffn = sizes.get("ffn", 4 * hidden * 2 // 3 // 64 * 64 if sizes.get("gated") else 4 * hidden)
    widths = {"hidden": hidden, "heads": heads, "ffn": ffn}
    llama = model_of(name, {"layers": 1, "vocab": 32000, "max_seq": sizes.get("seq", 2048), **widths})
    gpt = replace(catalogue_model("megatron-22b"), ffn=ffn, vocab=PADDED_GPT_VOCAB)
    if re.match(r"bloom", name, re.IGNORECASE):
        bases = [replace(catalogue_model("bloom-176b"), ffn=4 * hidden)]
    elif "gated" in sizes:
        bases = [llama if sizes["gated"] else gpt]
    elif ffn == 4 * hidden:
        bases = [gpt, llama]
    else:
        bases = [llama]
    single_sizes = {"hidden": hidden, "heads": heads, **sizes, "layers": 1}
    single_sizes |= {"moe_dense_layers": 0} if "moe_dense_layers" in sizes else {}  # corrected with the depth
    singles = [_with_sizes(replace(base, layers=1), single_sizes) for base in bases]
    single = singles[0]
    published = None if _blank(columns, "params_b") else float(str(columns["params_b"])) * 1e9
    if "layers" in sizes:
        if not published:
            return single.with_layers(sizes["layers"])
        # Gated MLPs, and whether embedding and head are tied, are rarely stated; the parameter count decides.
        models = [kind.with_layers(sizes["layers"]) for kind in singles]
        models = [replace(model, tied=tied) for model in models for tied in (model.tied, not model.tied)]
        nearest_first = sorted(models, key=lambda model: abs(model.parameters - published))
        gpt = next(model for model in nearest_first if model.gated == single.gated)
        exact = abs(nearest_first[0].parameters / published - 1) < EXACT_PARAMETERS
        return nearest_first[0] if exact and abs(gpt.parameters / published - 1) > CERTAINLY_ANOTHER else gpt
    if published is None:
        raise UnknownModelError(f"model {name!r}: the row gives neither layers nor params_b")
    layer = single.shard_of(range(1)).total
    return single.with_layers(max(round((published - single.parameters + layer) / layer), 1))


# Models of the sizes in a configuration: one of the catalogue, cut or not, or one of its own.


def model_words(sizes: Facts, names: Sequence[str], seq: int = 0) -> str:
    """Return what ``load_model`` takes for *sizes*, else for *names* that may be known; empty if neither is enough.

    Of several models with these sizes it is the one that *names*, the other *sizes* or a sequence of *seq* tokens
    suggest.
    """
    hints = [_known_start(name) for name in names]
    if not sizes.get("hidden"):
        return next(filter(None, hints), "")
    layers = sizes.get("layers", math.inf)
    models = [model for model in map(catalogue_model, model_names()) if model.layers >= layers]

    def rank(model: Model) -> tuple[bool, bool, int, bool]:
        return model.layers != layers, model.name not in hints, len(_other_sizes(model, sizes)), model.max_seq < seq

    if model := min((model for model in models if _has_sizes(model, sizes)), key=rank, default=None):
        name = model.name if model.layers == layers else f"{model.name}-l{layers}"
        differing = _other_sizes(model, sizes)
        return words_of(name, differing) if differing else name
    stated = {key: value for key, value in sizes.items() if value or key in ("gated", "tied", "mla_query_rank")}
    return words_of("configured", {**({"seq": seq} if seq else {}), **stated})


def _known_sizes(model: Model) -> FactDict:
    """Return the columns of *model* that mean something for it: ``model_of_columns`` makes the same of them."""
    experts, latent = model.experts, model.latent
    sizes: FactDict = {key: getattr(model, key) for key in (*COLUMN_SIZES, *SWITCHES)}
    if experts is not None:
        sizes |= {key: getattr(experts, field) for key, field in EXPERT_SIZES.items()}
        sizes["moe_pattern"] = _write_pattern(experts)
        if all(block.feed_forward is not FeedForward.DENSE for block in model.block_kinds):
            del sizes["ffn"]
    if latent is not None:
        sizes |= {key: getattr(latent, field) for key, field in LATENT_SIZES.items()}
        del sizes["kv_heads"], sizes["head_dim"]
    if model.position.kind is PositionKind.LEARNED:
        sizes["seq"] = model.max_seq
    sizes |= {"window": model.window.size if model.window else 0, "window_pattern": _write_pattern(model.window)}
    return {**sizes, **part_words(model)}


def _other_sizes(model: Model, sizes: Facts) -> FactDict:
    """Return the *sizes* that *model* has not, its depth aside."""
    known = _known_sizes(model)
    differing = {key: value for key, value in sizes.items() if key in known and value != known[key] and key != "layers"}
    if differing.get("position") == "learned" and "seq" in sizes:
        differing["seq"] = sizes["seq"]
    return differing


def _known_start(name: str) -> str:
    """Return the model that *name* begins with: llama3_8b of llama3_8b_pretrain_perf."""
    words = re.split(r"[_\-\s]+", name.rsplit("/", 1)[-1])
    for count in range(len(words), 0, -1):
        if known := find_name("-".join(words[:count])):
            return known
    return ""


# Sizes that make another model of it, not the same with a change.
DECISIVE = ("hidden", "heads", "kv_heads", "head_dim", "ffn", "moe_ffn", "moe_topk", *LATENT_SIZES, *STRUCTURE)


def _has_sizes(model: Model, sizes: Facts) -> bool:
    """Return whether *model* has *sizes*, as far as both give them, and the same kind of attention and experts."""
    known = _known_sizes(model)
    if known.get("moe_experts", 0) != sizes.get("moe_experts", 0):
        return False
    if ("mla_kv_rank" if model.latent is None else "kv_heads") in sizes:
        return False
    return all(key not in known or sizes.get(key, known[key]) == known[key] for key in DECISIVE)
