"""The program to capture: a model, what it reads, its loss and its optimizer, all without data."""

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from stepcast.pytorch.capture.placed import META, SHADOW, Placed
from stepcast.pytorch.capture.tracer import CaptureError
from stepcast.pytorch.load import load_transformers

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LEARNING_RATE = 1e-5
OF_TRANSFORMERS = {"checkpoint": "--checkpoint", "attention": "--attention", "experts": "--experts"}
SAID = 300  # characters of what a library says


@dataclass(frozen=True)
class Asked:
    """What a user asks for: sizes and the software's choices."""

    batch: int = 1
    seq: int = 2048
    dtype: str = "bf16"  # of the weights
    autocast: bool = False  # weights in fp32, products in bf16
    checkpoint: bool = False  # every layer is computed again in the backward
    fused: bool = True  # one kernel for the optimizer's update of all weights
    attention: str = ""  # as the model's library chooses
    experts: str = ""  # likewise
    optimizer: str = "adamw"
    compiled: bool = False  # memory-bound kernels fused, as torch.compile does
    tf32: bool = False  # products of fp32 may be rounded to TF32; a program may also ask for that itself
    given: frozenset[str] = frozenset()  # options that the user gave


@dataclass
class CapturedStep:
    """A step that can be run: the loss of one batch and what else has a gradient, and the optimizer."""

    model: Any
    results: Callable[[], tuple[Any, ...]]
    optimizer: Any
    name: str
    tokens: int
    batch: int
    facts: dict[str, str] = field(default_factory=dict)


def _dtype_of(asked: Asked) -> Any:
    """Of weights and inputs."""
    return torch.float32 if asked.autocast else DTYPES[asked.dtype]


def program_of(what: str, asked: Asked) -> CapturedStep:
    """*what* is a Hugging Face config, or ``module:function``."""
    path, _, sizes = what.rpartition(":")
    if path and "=" in sizes:
        return _configured(path, asked, sizes)
    if ":" in what and not os.path.exists(what):
        return _called(what, asked)
    return _configured(what, asked)


def _configured(path: str, asked: Asked, sizes: str = "") -> CapturedStep:
    keys = _sized(_keys(path), path, sizes)
    transformers = load_transformers("capture")
    kind = keys.pop("model_type", None)
    if not isinstance(kind, str):
        raise CaptureError(f"{path}: expected a Hugging Face config with model_type, or module:function")
    for given in ("torch_dtype", "dtype", "transformers_version", "quantization_config"):
        keys.pop(given, None)
    try:
        config = transformers.AutoConfig.for_model(kind, **keys)
    except Exception as error:  # a library's own kinds of faults are many, and all say what the config lacks
        raise CaptureError(f"{path}: transformers knows no such model: {_said(error)}") from None
    try:
        with Placed():
            model = _built(_auto_class(transformers, config), config, asked)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"{path}: transformers {transformers.__version__}: {_said(error)}") from None
    model.train()
    if asked.checkpoint:
        model.gradient_checkpointing_enable()
    inputs, tokens = _inputs(config, asked)

    def results() -> tuple[Any, ...]:
        found = model(**inputs)
        others = [each for name, each in found.items() if name != "loss" and isinstance(each, torch.Tensor)]
        return (found.loss, *(each for each in others if each.requires_grad))

    name = os.path.basename(path).removesuffix(".json")
    facts = {"transformers": transformers.__version__, "model_type": kind}
    return CapturedStep(model, results, _optimizer(model, asked), name, tokens, asked.batch, facts)


def _built(made_by: Any, config: Any, asked: Asked) -> Any:
    """The model. Where its library refuses fused attention, which knows no cap of the scores, it runs without
    that cap, as releases did that chose it (transformers 5.17 for Gemma 2; 5.22 refuses).
    """
    options = {"dtype": _dtype_of(asked)}
    if asked.experts:
        options["experts_implementation"] = asked.experts
    if not asked.attention:
        return made_by.from_config(config, **options)
    try:
        return made_by.from_config(config, attn_implementation=asked.attention, **options)
    except ValueError as error:
        if asked.attention != "sdpa" or "scaled_dot_product_attention" not in str(error):
            raise
    config.attn_logit_softcapping = None
    model = made_by.from_config(config, attn_implementation="eager", **options)
    model.config._attn_implementation = asked.attention
    return model


def _keys(path: str) -> dict[str, Any]:
    from stepcast.inputs.source import Source
    from stepcast.ir.limits import CONFIG

    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    try:
        keys = json.loads(Source(path).text(CONFIG))
    except ValueError as error:
        raise CaptureError(f"{path}: no JSON: {_first_line(error)}") from None
    if not isinstance(keys, dict):
        raise CaptureError(f"{path}: expected a JSON object, as config.json holds one")
    return keys


# What families call the number of their layers.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def _sized(keys: dict[str, Any], path: str, sizes: str) -> dict[str, Any]:
    """*keys* with ``layers=8,vocab_size=32000`` in their place."""
    changed = dict(keys)
    for part in filter(None, sizes.split(",")):
        name, _, value = part.partition("=")
        known = [each for each in (LAYERS if name == "layers" else (name,)) if each in keys]
        if not known or not value.isdigit():
            raise CaptureError(f"{path}: {part!r} is no size of it; expected layers=8, or a key of the config")
        changed[known[0]] = int(value)
        if name == "layers" and isinstance(keys.get("layer_types"), list):
            changed["layer_types"] = keys["layer_types"][: int(value)]
    return changed


AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageClassification",
)


def _auto_class(transformers: Any, config: Any) -> Any:
    """The class that trains such a model: the one whose loss follows from its labels."""
    found = {
        name: known[type(config)].__name__
        for name in AUTO_CLASSES
        if type(config) in (known := getattr(transformers, name)._model_mapping)
    }
    if not found:
        raise CaptureError(f"{config.model_type}: no class that trains it is known; give module:function")
    said = set(getattr(config, "architectures", None) or ())
    for name, model in found.items():
        if model in said:
            return getattr(transformers, name)
    # Encoders and both halves can be trained as decoders too, which is not what they are made for.
    if config.is_encoder_decoder:
        usual = ["AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"]
    else:
        usual = [] if getattr(config, "is_decoder", False) else ["AutoModelForMaskedLM"]
    return getattr(transformers, next((name for name in usual if name in found), next(iter(found))))


def _inputs(config: Any, asked: Asked) -> tuple[dict[str, Any], int]:
    """A batch as the model's kind reads it, on no device; and its tokens."""
    if hasattr(config, "image_size") and hasattr(config, "patch_size"):
        size = config.image_size
        side = size if isinstance(size, list | tuple) else (size, size)
        pixels = torch.empty(asked.batch, config.num_channels, *side, device=META)
        patch = config.patch_size if isinstance(config.patch_size, int) else config.patch_size[0]
        tokens = asked.batch * (side[0] // patch) * (side[1] // patch)
        return {"pixel_values": pixels.to(_dtype_of(asked)), "labels": numbers(asked.batch)}, tokens
    ids = numbers(asked.batch, asked.seq)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if config.is_encoder_decoder and hasattr(config, "num_mel_bins"):
        frames = 2 * config.max_source_positions  # the first convolutions take every second
        heard = torch.empty(asked.batch, config.num_mel_bins, frames, device=META)
        return {"input_features": heard.to(_dtype_of(asked)), "labels": ids}, asked.batch * asked.seq
    if not config.is_encoder_decoder and hasattr(config, "use_cache"):
        inputs["use_cache"] = False
    return inputs, asked.batch * asked.seq


def numbers(*shape: int) -> Any:
    """Whole numbers without data, whose values a program may look at."""
    found = torch.empty(shape, dtype=torch.long, device=META)
    setattr(found, SHADOW, torch.ones(shape, dtype=torch.long))
    return found


def _called(what: str, asked: Asked) -> CapturedStep:
    """``module:function`` returns a model, or it with a batch, a loss and an optimizer.

    It may take ``batch``, ``seq`` and ``dtype``; options that would have no effect are refused. Of a tuple or
    dictionary: ``model``; ``inputs``, by position or by name; ``loss``, called with what the model returns;
    ``optimizer``, made or a function of parameters.
    """
    module_name, _, function_name = what.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name)
    except (ImportError, AttributeError) as error:
        raise CaptureError(f"{what}: {_first_line(error)}; expected module:function on the path") from None
    finally:
        sys.path.pop(0)
    for option, word in OF_TRANSFORMERS.items():
        if option in asked.given:
            raise CaptureError(
                f"{word} has no effect on {what}: it configures models of transformers; the program itself "
                "has to say so"
            )
    known = {"batch": asked.batch, "seq": asked.seq, "dtype": DTYPES[asked.dtype]}
    taken = inspect.signature(function).parameters
    previous = torch.get_default_dtype()
    torch.set_default_dtype(_dtype_of(asked))
    try:
        with Placed():
            made = function(**{name: value for name, value in known.items() if name in taken})
    finally:
        torch.set_default_dtype(previous)
    if isinstance(made, torch.nn.Module):
        made = {"model": made}
    elif isinstance(made, tuple):
        made = dict(zip(("model", "inputs", "loss", "optimizer"), made, strict=False))
    if not isinstance(made, dict) or not isinstance(made.get("model"), torch.nn.Module):
        raise CaptureError(f"{what}: returned no torch.nn.Module; expected a model, or (model, inputs, ...)")
    model, inputs, given = made["model"].to(META), made.get("inputs"), made.get("optimizer")
    fixed = {
        **({} if given is None else dict.fromkeys(("optimizer", "no_fused_optimizer"), "optimizer")),
        **({} if inputs is None else dict.fromkeys({"batch", "seq"} - set(taken), "inputs")),
    }
    for option in sorted(asked.given & set(fixed)):
        raise CaptureError(f"--{option.replace('_', '-')} has no effect: {what} returns its own {fixed[option]}")
    batch, seq = asked.batch, asked.seq
    if inputs is None:
        inputs = (numbers(batch, seq),)
    else:
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        own_batch, own_seq = _sizes_of(inputs)
        batch, seq = batch if "batch" in taken else own_batch, seq if "seq" in taken else own_seq
    model.train()
    inputs = torch.utils._pytree.tree_map_only(torch.Tensor, _placed, inputs)
    called = made.get("loss")

    def results() -> tuple[Any, ...]:
        found = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        return (called(found) if called is not None else _usual_loss(what, found),)

    optimizer = given(model.parameters()) if callable(given) else given or _optimizer(model, asked)
    return CapturedStep(model, results, optimizer, what, batch * seq, batch)


def _sizes_of(inputs: Any) -> tuple[int, int]:
    """Sequences and their tokens of *inputs*: the first dimension and, of whole numbers by sequence and place
    and of vectors by both, the second; other samples count as one token each.
    """
    tensors = [each for each in torch.utils._pytree.tree_leaves(inputs) if isinstance(each, torch.Tensor)]
    first = next((each for each in tensors if each.dim()), None)
    if first is None:
        return 1, 1
    by_token = first.dim() == (3 if first.is_floating_point() else 2)
    return max(1, first.shape[0]), max(1, first.shape[1]) if by_token else 1


def _placed(tensor: Any) -> Any:
    if tensor.device == META:
        return tensor
    found = tensor.to(META)
    if not tensor.is_floating_point():
        setattr(found, SHADOW, tensor)
    return found


def _usual_loss(what: str, found: Any) -> Any:
    """The model's own loss, or the mean of what it returns."""
    loss = getattr(found, "loss", None)
    if loss is None and isinstance(found, dict):
        loss = found.get("loss")
    if loss is not None:
        return loss
    if isinstance(found, tuple | list):
        found = found[0]
    found = getattr(found, "logits", found)
    if not isinstance(found, torch.Tensor):
        raise CaptureError(f"{what}: the model returns no tensor; return a loss function too")
    return found if found.dim() == 0 else found.float().mean()


def _optimizer(model: Any, asked: Asked) -> Any:
    trained = [each for each in model.parameters() if each.requires_grad]
    if asked.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=LEARNING_RATE, foreach=True)
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, foreach=None if asked.fused else True,
                             fused=asked.fused or None)  # fmt: skip


def _said(error: BaseException) -> str:
    """What is wrong, which a library may say in a second line."""
    return " ".join(str(error).split())[:SAID] or type(error).__name__


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
