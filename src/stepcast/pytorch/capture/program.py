"""Build the program to capture, without data, and run it once under the tracer: model, inputs, loss, optimizer."""

import contextlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from stepcast.hardware.cluster import Gpu
from stepcast.inputs.source import Source
from stepcast.ir.captured import Captured
from stepcast.ir.limits import CONFIG
from stepcast.ir.types import dataclass
from stepcast.pytorch.capture import emulation
from stepcast.pytorch.capture.build import build_captured
from stepcast.pytorch.capture.emulation import CALLS, GPU, META, EmulatedGpu, move_to_meta, spend, with_known_values
from stepcast.pytorch.capture.machine import PretendMachine, read_shapes, sizes_of
from stepcast.pytorch.capture.tracer import CaptureError, Moment, StepTrace, Tracer, parameters_of
from stepcast.pytorch.load import load_transformers

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LEARNING_RATE = 1e-5
# Options that apply only to models of transformers.
TRANSFORMERS_OPTIONS = ("checkpoint", "attention", "experts")
MOST_MESSAGE = 300  # characters of a library's error message
# Keys by which model families name their number of layers.
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
TRAINED = ("CausalLM", "MaskedLM", "Seq2SeqLM", "SpeechSeq2Seq", "ImageClassification")
AUTO_CLASSES = tuple(f"AutoModelFor{kind}" for kind in TRAINED)


@dataclass(frozen=True)
class CaptureOptions:
    """The sizes and settings with which a program is captured."""

    batch: int = 1
    seq: int = 2048
    dtype: str = "bf16"  # of the weights
    autocast: bool = False  # weights in fp32, products in bf16
    checkpoint: bool = False  # recompute every layer in the backward
    fused: bool = True  # one kernel for the optimizer's update of all weights
    attention: str = ""  # "": as the model's library chooses
    experts: str = ""  # "": as the model's library chooses
    optimizer: str = "adamw"
    compiled: bool = False  # memory-bound kernels fused, as torch.compile does
    tf32: bool = False  # fp32 products may be rounded to TF32; a program may also ask for that itself
    given: frozenset[str] = frozenset()  # names of the options that the user set

    @property
    def data_dtype(self) -> torch.dtype:
        """Return the format of weights and inputs."""
        return torch.float32 if self.autocast else DTYPES[self.dtype]


@dataclass
class TrainingProgram:
    """A step that can be run; *results* returns the loss of one batch and all other results with a gradient."""

    model: torch.nn.Module
    results: Callable[[], tuple[Tensor, ...]]
    optimizer: torch.optim.Optimizer
    name: str
    tokens: int
    batch: int
    facts: dict[str, str] = field(default_factory=dict)


def build_program(what: str, options: CaptureOptions) -> TrainingProgram:
    """Return the program of *what*, a Hugging Face config or ``module:function``."""
    path, _, sizes = what.rpartition(":")
    if path and "=" in sizes:
        return _build_from_config(path, options, sizes)
    is_function = ":" in what and not os.path.exists(what)
    return _build_from_function(what, options) if is_function else _build_from_config(what, options)


def _build_from_config(path: str, options: CaptureOptions, sizes: str = "") -> TrainingProgram:
    keys = _read_config(path, sizes)
    transformers = load_transformers("capture")
    kind = keys.pop("model_type", None)
    if not isinstance(kind, str):
        raise CaptureError(f"{path}: expected a Hugging Face config with model_type, or module:function")
    for ignored in ("torch_dtype", "dtype", "transformers_version", "quantization_config"):
        keys.pop(ignored, None)
    try:
        config = transformers.AutoConfig.for_model(kind, **keys)
    except Exception as error:  # a library raises errors of many kinds, and all say what the config lacks
        raise CaptureError(f"{path}: transformers knows no such model: {_shorten_message(error)}") from None
    try:
        with EmulatedGpu():
            model = _build_model(_choose_auto_class(transformers, config), config, options)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"{path}: transformers {transformers.__version__}: {_shorten_message(error)}") from None
    model.train()
    if options.checkpoint:
        # Its name since transformers 5.23, where the older one warns.
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    inputs, tokens = _make_batch(config, options)

    def results() -> tuple[Tensor, ...]:
        outputs = model(**inputs)
        others = [value for name, value in outputs.items() if name != "loss" and isinstance(value, Tensor)]
        return (outputs.loss, *(value for value in others if value.requires_grad))

    name = os.path.basename(path).removesuffix(".json")
    facts = {"transformers": transformers.__version__, "model_type": kind}
    return TrainingProgram(model, results, _make_optimizer(model, options), name, tokens, options.batch, facts)


def _build_model(auto_class: Any, config: Any, options: CaptureOptions) -> torch.nn.Module:
    """Return the model.

    Where transformers refuses fused attention because it has no cap of the scores, the model runs without that cap,
    as releases did that chose it (5.17 for Gemma 2; 5.22 refuses).
    """
    chosen = {"experts_implementation": options.experts, "attn_implementation": options.attention}
    arguments: dict[str, Any] = {"dtype": options.data_dtype}
    arguments |= {name: value for name, value in chosen.items() if value}
    try:
        return auto_class.from_config(config, **arguments)
    except ValueError as error:
        if options.attention != "sdpa" or "scaled_dot_product_attention" not in str(error):
            raise
    config.attn_logit_softcapping = None
    model = auto_class.from_config(config, **{**arguments, "attn_implementation": "eager"})
    model.config._attn_implementation = options.attention
    return model


def _read_config(path: str, sizes: str) -> dict[str, Any]:
    """Return the keys of a config with *sizes*, such as ``layers=8,vocab_size=32000``, replaced."""
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    if not os.path.exists(file):
        raise CaptureError(f"{file}: no such file; expected a config.json, module:function, or -- and a command")
    try:
        keys = json.loads(Source(file).text(CONFIG))
    except ValueError as error:
        raise CaptureError(f"{file}: no JSON: {_shorten_message(error)}") from None
    if not isinstance(keys, dict):
        raise CaptureError(f"{file}: expected a JSON object, as config.json holds one")
    changed = dict(keys)
    for part in filter(None, sizes.split(",")):
        name, _, value = part.partition("=")
        known = [key for key in (LAYER_KEYS if name == "layers" else (name,)) if key in keys]
        if not known or not value.isdigit():
            raise CaptureError(f"{path}: {part!r} is no size of it; expected layers=8, or a key of the config")
        changed[known[0]] = int(value)
        if name == "layers" and isinstance(keys.get("layer_types"), list):
            changed["layer_types"] = keys["layer_types"][: int(value)]
    return changed


def _choose_auto_class(transformers: ModuleType, config: Any) -> Any:
    """Return the class of transformers that trains such a model, which computes the loss from labels."""
    models = {
        name: mapping[type(config)].__name__
        for name in AUTO_CLASSES
        if type(config) in (mapping := getattr(transformers, name)._model_mapping)
    }
    if not models:
        raise CaptureError(f"{config.model_type}: no class that trains it is known; give module:function")
    architectures = set(getattr(config, "architectures", None) or ())
    named = [name for name, model in models.items() if model in architectures]
    # Encoders and encoder-decoders could be trained as decoders too, which is not what they are made for.
    if config.is_encoder_decoder:
        preferred = ["AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"]
    else:
        preferred = [] if getattr(config, "is_decoder", False) else ["AutoModelForMaskedLM"]
    return getattr(transformers, next(name for name in (*named, *preferred, *models) if name in models))


def _make_batch(config: Any, options: CaptureOptions) -> tuple[dict[str, Any], int]:
    """Return a batch for a model of this kind, and its tokens."""
    batch, dtype = options.batch, options.data_dtype
    if hasattr(config, "image_size") and hasattr(config, "patch_size"):
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        pixels = torch.empty(batch, config.num_channels, height, width, device=META).to(dtype)
        patch = config.patch_size if isinstance(config.patch_size, int) else config.patch_size[0]
        return {"pixel_values": pixels, "labels": make_token_ids(batch)}, batch * (height // patch) * (width // patch)
    ids = make_token_ids(batch, options.seq)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if config.is_encoder_decoder and hasattr(config, "num_mel_bins"):
        frames = 2 * config.max_source_positions  # the first convolutions take every second frame
        features = torch.empty(batch, config.num_mel_bins, frames, device=META).to(dtype)
        inputs = {"input_features": features, "labels": ids}
    elif not config.is_encoder_decoder and hasattr(config, "use_cache"):
        inputs["use_cache"] = False
    return inputs, batch * options.seq


def make_token_ids(*shape: int) -> Tensor:
    """Return token ids whose values a program may read."""
    return with_known_values(torch.ones(shape, dtype=torch.long))


def _build_from_function(what: str, options: CaptureOptions) -> TrainingProgram:
    """Call ``module:function``, which returns a model, optionally with a batch, a loss and an optimizer.

    It may take ``batch``, ``seq`` and ``dtype``; options without an effect are refused. A tuple or dictionary has
    ``model``; ``inputs``, by position or by name; ``loss``, called with what the model returns; ``optimizer``, an
    object or a function of the parameters.
    """
    function = _import_function(what)
    for option in (option for option in TRANSFORMERS_OPTIONS if option in options.given):
        problem = f"--{option} has no effect on {what}: it configures models of transformers"
        raise CaptureError(f"{problem}; the program itself has to say so")
    arguments = {"batch": options.batch, "seq": options.seq, "dtype": DTYPES[options.dtype]}
    taken = inspect.signature(function).parameters
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(options.data_dtype)
    try:
        with EmulatedGpu():
            returned = function(**{name: value for name, value in arguments.items() if name in taken})
    except CaptureError:
        raise
    except Exception as error:
        from stepcast.pytorch.capture.script import explain_error

        raise explain_error(error, what) from error
    finally:
        torch.set_default_dtype(default_dtype)
    if isinstance(returned, torch.nn.Module):
        returned = {"model": returned}
    elif isinstance(returned, tuple):
        returned = dict(zip(("model", "inputs", "loss", "optimizer"), returned, strict=False))
    if not isinstance(returned, dict) or not isinstance(returned.get("model"), torch.nn.Module):
        raise CaptureError(f"{what}: returned no torch.nn.Module; expected a model, or (model, inputs, ...)")
    model, inputs, given_optimizer = returned["model"].to(META), returned.get("inputs"), returned.get("optimizer")
    fixed = {} if given_optimizer is None else dict.fromkeys(("optimizer", "no_fused_optimizer"), "optimizer")
    fixed |= {} if inputs is None else dict.fromkeys({"batch", "seq"} - set(taken), "inputs")
    for option in sorted(options.given & set(fixed)):
        raise CaptureError(f"--{option.replace('_', '-')} has no effect: {what} returns its own {fixed[option]}")
    inputs = make_token_ids(options.batch, options.seq) if inputs is None else inputs
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    batch, seq = sizes_of(inputs)
    batch, seq = options.batch if "batch" in taken else batch, options.seq if "seq" in taken else seq
    model.train()
    inputs = torch.utils._pytree.tree_map_only(Tensor, move_to_meta, inputs)
    loss = returned.get("loss")

    def results() -> tuple[Tensor, ...]:
        outputs = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        return (loss(outputs) if loss is not None else _default_loss(what, outputs),)

    if callable(given_optimizer):
        given_optimizer = given_optimizer(model.parameters())
    return TrainingProgram(model, results, given_optimizer or _make_optimizer(model, options), what, batch * seq, batch)


def _import_function(what: str) -> Callable[..., Any]:
    module_name, _, function_name = what.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
        return function
    except (ImportError, AttributeError) as error:
        raise CaptureError(f"{what}: {_shorten_message(error)}; expected module:function on the path") from None
    finally:
        sys.path.pop(0)


def _default_loss(what: str, outputs: Any) -> Tensor:
    """Return the model's own loss, or the mean of its result."""
    if (loss := getattr(outputs, "loss", outputs.get("loss") if isinstance(outputs, dict) else None)) is not None:
        return loss
    if isinstance(outputs, tuple | list):
        outputs = outputs[0]
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor):
        raise CaptureError(f"{what}: the model returns no tensor; return a loss function too")
    return outputs if outputs.dim() == 0 else outputs.float().mean()


def _make_optimizer(model: torch.nn.Module, options: CaptureOptions) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if options.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=LEARNING_RATE, foreach=True)
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, foreach=not options.fused or None, fused=options.fused or None)


def _shorten_message(error: BaseException) -> str:
    """Return the message of *error* on one line; a library may explain in its second line."""
    return " ".join(str(error).split())[:MOST_MESSAGE] or type(error).__name__


def wrap_apply(original: Callable[..., object]) -> object:
    """Return ``torch.autograd.Function.apply`` that also counts the CPU's time of a program's own functions."""

    def apply(function: type, /, *args: object, **kwargs: object) -> object:
        if not function.__module__.startswith(__package__):
            emulation.call("function")
        return original(function, *args, **kwargs)

    return classmethod(apply)


def spend_calls(original: Callable[..., object], calls: Callable[..., float]) -> Callable[..., object]:
    """Return *original*, which also counts the CPU's time of *calls* whenever it is called."""

    def spend_and_call(*args: object, **kwargs: object) -> object:
        spend(calls(*args, **kwargs))
        return original(*args, **kwargs)

    return spend_and_call


# Functions by which PyTorch asks about the machine, with the answers of a machine with a GPU: optimizers ask which
# kernels the device of their weights has, autocast whether it is available, and checkpoints, whenever one is entered,
# for which device to restore autocast.
GPU_ANSWERS: dict[tuple[str, str], Callable[..., object]] = {
    ("torch.optim.optimizer", "_get_fused_kernels_supported_devices"): lambda: ["cuda", "cpu", "meta"],
    ("torch.optim.optimizer", "_get_foreach_kernels_supported_devices"): lambda: ["cuda", "cpu", "meta"],
    ("torch.cuda.amp.common", "amp_definitely_not_available"): lambda: False,
    ("torch.cuda", "is_bf16_supported"): lambda including_emulation=True: True,
    ("torch.nn.utils.clip_grad", "_has_foreach_support"): lambda tensors, device: True,
    ("torch.nn.utils.clip_grad", "_device_has_foreach_support"): lambda device: True,
    ("torch.utils.checkpoint", "_infer_device_type"): spend_calls(lambda *_: GPU, lambda *_: CALLS["checkpoint"]),
}
# Functions and classes by module, with the CPU's time of their calls. Checkpoints: an object for each tensor that a
# non-reentrant one saves, and the second forward, non-reentrant (it saves again what hooks saved in the first) and
# reentrant. Then ``torch.autograd.grad``; the time of ``backward()`` is counted elsewhere.
HOST_CALLS: dict[tuple[str, str], Callable[..., float]] = {
    ("torch.utils.checkpoint", "_Holder"): lambda: CALLS["hook"],
    ("torch.utils.checkpoint", "_recomputation_hook"): lambda frame, *_: (
        CALLS["recompute"] + CALLS["unhook"] * len(getattr(frame(), "weak_holders", ()))
    ),
    ("torch.utils.checkpoint", "detach_variable"): lambda inputs: CALLS["recompute"],
    ("torch.autograd", "_engine_run_backward"): lambda *_, accumulate_grad=True, **__: (
        0.0 if accumulate_grad else CALLS["grad"]
    ),
}
LAUNCHERS = ("python", "torchrun", "accelerate", "deepspeed")


def capture(what: str, options: CaptureOptions) -> Captured:
    """Return one step of *what*, a Hugging Face config or ``module:function``."""
    with _answer_as_gpu() as warnings, _restore_precision():
        if options.tf32:
            torch.set_float32_matmul_precision("high")
        program = build_program(what, options)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            trace = _trace_program(program, options)
    settings = {
        "compiled": options.compiled,
        "autocast": options.autocast,
        "checkpoint": options.checkpoint,
        "tf32": options.tf32,
        "fused optimizer": any(group.get("fused") for group in program.optimizer.param_groups),
        f"attention {options.attention}": bool(options.attention),
        f"experts {options.experts}": bool(options.experts),
    }
    facts = {
        "torch": str(torch.__version__),
        **program.facts,
        "seq": str(program.tokens // program.batch),
        "settings": ", ".join(name for name, is_set in settings.items() if is_set),
    }
    precision = "bf16" if options.autocast else options.dtype
    return build_captured(
        trace, name=program.name, tokens=program.tokens, batch=program.batch, precision=precision,
        facts=facts.items(), compiled=options.compiled, warnings=tuple(warnings),
    )  # fmt: skip


def is_command(program: str, words: Sequence[str]) -> bool:
    """Return True if *program* with *words* is the command of a training script."""
    launcher = os.path.basename(program)
    return launcher.endswith(".py") or (bool(words) and launcher.startswith(LAUNCHERS))


def capture_command(command: Sequence[str], gpus: int, gpu: Gpu | None = None, batch: str = "") -> Captured:
    """Return one step of the training script that *command* starts, on at least *gpus* GPUs.

    The script sees *gpu*, or else an H100. If *batch* states shapes, data loaders yield batches of these.
    """
    from stepcast.pytorch.capture.script import capture_script

    machine = PretendMachine(gpus, gpu) if gpu is not None else PretendMachine(gpus)
    machine.batch = read_shapes(batch)
    with _answer_as_gpu() as warnings, _restore_precision():
        machine.notes |= dict.fromkeys(warnings)
        return capture_script(command, machine)


@contextlib.contextmanager
def _answer_as_gpu() -> Iterator[list[str]]:
    """Let PyTorch believe that it runs on a machine with a GPU, and count the CPU's time of HOST_CALLS.

    Yields a warning for each name that this release of PyTorch does not have.
    """
    warnings = list[str]()
    with contextlib.ExitStack() as patches:
        function = torch.autograd.Function
        patches.enter_context(mock.patch.object(function, "apply", wrap_apply(function.apply.__func__)))
        for module, name in (*GPU_ANSWERS, *HOST_CALLS):
            owner = importlib.import_module(module)
            place = module, name
            if hasattr(owner, name):
                answer = GPU_ANSWERS.get(place) or spend_calls(getattr(owner, name), HOST_CALLS[place])
                patches.enter_context(mock.patch.object(owner, name, answer))
            else:
                lacking = "the CPU's time in checkpoints" if place in HOST_CALLS else "the kernels of a GPU"
                release = f"PyTorch {torch.__version__} has no {module}.{name}"
                warnings.append(f"{release}, by which capture knows {lacking}: the step may be predicted too short")
        yield warnings


@contextlib.contextmanager
def _restore_precision() -> Iterator[None]:
    """Restore PyTorch's precision of fp32 products, which the program may set."""
    switches = (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [getattr(switch, "fp32_precision", None) for switch in switches]
    older = None
    with contextlib.suppress(RuntimeError):  # PyTorch refuses to read it once the newer switches were set
        older = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for switch, precision in zip(switches, before, strict=True):
            if precision is not None:
                switch.fp32_precision = precision


def _trace_program(program: TrainingProgram, options: CaptureOptions) -> StepTrace:
    """Trace forward, backward and update of *program*, after an update that makes the states of its optimizer."""
    tracer = Tracer({id(module): name for name, module in program.model.named_modules()})
    tracer.compiles, tracer.moment = options.compiled, Moment.OPTIMIZER
    for parameter in parameters_of(program.optimizer):
        parameter.grad = torch.empty_like(parameter)
    with tracer, torch.no_grad():
        program.optimizer.step()
    program.optimizer.zero_grad(set_to_none=True)
    tracer.trace.events.clear()
    for storage in tracer.trace.storages:
        storage.created = 0
        storage.freed = None if storage.freed is None else 0
    tracer.moment = Moment.FORWARD
    tracer.add_existing([program.model], [program.optimizer])
    try:
        _run_step(program, options, tracer)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, NotImplementedError | RuntimeError) and "meta" in str(error).lower():
            first_line = str(error).strip().splitlines()[0]
            raise CaptureError(f"{program.name}: an operator cannot run without data: {first_line}") from error
        raise CaptureError(f"{program.name}: failed: {type(error).__name__}: {error}") from error
    return tracer.trace


def _run_step(program: TrainingProgram, options: CaptureOptions, tracer: Tracer) -> None:
    """Run forward, backward and update of *program* under *tracer*, which gets the moment of each."""
    gpu = EmulatedGpu()
    with tracer, tracer.follow_modules(), gpu:
        with (
            # Libraries that see that they are compiled leave out what reads values.
            mock.patch.object(torch.compiler, "_is_compiling_flag", options.compiled),
            torch.autocast(GPU, torch.bfloat16) if options.autocast else contextlib.nullcontext(),
        ):
            loss, *others = program.results()
            tracer.add_results((loss, *others))
        gpu.forget_casts()
        tracer.moment = Moment.BACKWARD
        if not options.compiled:
            others.clear()
        # Unread results of a compiled program have gradients too, of zeros; nothing but the graph holds these results.
        roots = (loss, *map(get_gradient_edge, others))
        zeros = [torch.zeros_like(tensor) for tensor in others]
        others.clear()
        tracer.trace.uncompiled.update(range(len(tracer.trace.events) - len(zeros), len(tracer.trace.events)))
        ones = torch.ones_like(loss)
        tracer.begins_backward = True
        # Outside of the modes, where checkpoints recompute a forward.
        torch.autograd.graph._engine_run_backward(
            roots, (ones, *zeros), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
        del roots, zeros
    for parameter in dict.fromkeys((*program.model.parameters(), *parameters_of(program.optimizer))):
        tracer.add_gradient(parameter)
    tracer.moment, tracer.updated = Moment.OPTIMIZER, len(tracer.trace.gradients)
    with tracer, torch.no_grad():
        program.optimizer.step()
        program.optimizer.zero_grad(set_to_none=True)
    del loss
