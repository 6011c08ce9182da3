"""The question of ``stepcast predict``, every choice of a training step; those of ``analyze`` and ``replay`` about
measured runs; and rules for choices that have no effect, as ``data/rules.toml`` states them.

A choice that differs from its default and cannot change the answer is

- an error if the user surely meant something else: the message says why and what to do;
- a note if the answer is still the one that was asked for.
"""

from collections.abc import Callable, Collection
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from stepcast.inputs.source import DATA, read_toml
from stepcast.ir import schedules, strategy
from stepcast.ir.framework import AttentionKernel, Dispatcher, Execution, Kernels, LossKernel, SsmKernels
from stepcast.ir.limits import LAYERS, MICRO_BATCHES, SEQUENCES, TOKENS
from stepcast.ir.strategy import BaseWeights, ContextKind, Objective, RecomputeModule, Sharding
from stepcast.ir.types import DType, FactDict, Facts, dataclass, replace
from stepcast.questions import choices as readers
from stepcast.questions.choices import Choice, Question, amount, choices_of, count, defaults_of, gpu_count, positive
from stepcast.units import DEFAULT_CURRENCY, parse_count

PIPELINED = tuple(str(kind) for kind, facts in schedules.SCHEDULES.items() if not facts.alone)
PAIRED = tuple(str(kind) for kind, facts in schedules.SCHEDULES.items() if facts.pairs is schedules.Pairs.OWN)
SCHEDULES = tuple(map(str, schedules.ScheduleKind))
SHARDINGS = tuple(map(str, Sharding))
PRECISIONS = ("bf16", "fp16", "fp32", "tf32", "fp8", "mxfp8", "nvfp4")
AUTOCASTS = ("autocast-bf16", "autocast-fp16")
MODULES = tuple(map(str, RecomputeModule))
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum", "muon", "adafactor")
# Exchanges without a model of their own, each with the one that predicts it; as Megatron-LM scripts are read.
PREDICTED_AS = {"cp_comm": {"a2a+p2p": "p2p"}}
PLACES = ("even", "packed")  # a test compares them with hardware.Place
ENGINES = ("fast", "fluid")  # a test compares them with forecast.options.Engine
ENGINE_HELP = "fluid: concurrent communication shares the links of the network"
MOST_MTP_LAYERS = 64
# Headings of the help.
WHAT = "model, cluster and framework"
LAYOUT = "parallelism (data parallelism uses the remaining GPUs)"
BATCH = "batch"
EXECUTION = "execution"
TUNING = "fine-tuning"
PRICES = "cost estimates"
NETWORK = "network simulation"
TRAINING = "training run"


@dataclass(frozen=True, slots=True)
class Rule:
    """Options that have an effect only where a condition holds; *otherwise* is why there is none and what to do."""

    options: tuple[str, ...]
    condition: str
    otherwise: str
    harmless: bool = False

    def holds(self, option: str, facts: Facts) -> bool:
        """Return True if *option* has an effect; conditions also name lists of words in choices, and schedules."""
        kind, _, modules = (facts.get("recompute") or "").partition(":")
        words = facts.get("overlap")
        derived = {
            "overlapped": words.split(",") if isinstance(words, str) else (),
            "recomputed": set(modules.split(",")) & set(MODULES) if kind == "selective" else set(),
            "pipelined": PIPELINED,
            "paired": PAIRED,
        }
        return _read_condition(self.condition)({**facts, **derived, "option": option})


@cache
def _read_condition(text: str) -> "Expression":
    from stepcast.inputs.expression import Expression

    return Expression(text)


_load_tables = cache(read_toml)


@cache
def rules_of(name: str) -> tuple[Rule, ...]:
    """Return the rules of a verb, and the shared ones that it uses."""
    table = _load_tables(str(DATA / "rules.toml"))[name]
    own = [
        Rule(tuple(options.split()), condition, otherwise, harmless)
        for key, harmless in (("rules", False), ("notes", True))
        for options, condition, otherwise in table.get(key, ())
    ]
    return (*own, *(rule for shared in table.get("uses", ()) for rule in rules_of(shared)))


def check_rules(name: str, given: Collection[str], facts: Facts) -> tuple[str, ...]:
    """Raise a ValueError for the first option of a verb without effect; return notes for the harmless ones."""
    used = ((option, rule) for rule in rules_of(name) for option in rule.options if option in given)
    idle = [(option, rule) for option, rule in used if not rule.holds(option, facts)]
    for option, rule in idle:
        if not rule.harmless:
            raise ValueError(_message(option, rule, facts))
    return tuple(_message(option, rule, facts) for option, rule in idle)


def _message(option: str, rule: Rule, facts: Facts) -> str:
    denied = f"no-{option}" if option == "sequence_parallel" and facts[option] is False else option
    reason = rule.otherwise.format_map({"paired_list": " or ".join(PAIRED), **facts})
    return f"{readers.option_of(denied)} has no effect: {reason}"


if TYPE_CHECKING:
    from stepcast.cost.calibration import Calibration
    from stepcast.hardware import Cluster
    from stepcast.inputs.expression import Expression
    from stepcast.ir.framework import Framework
    from stepcast.ir.model import Model


def _read_by(option: str, meaning: Callable[[str], object]) -> Callable[[str], object]:
    """Return *meaning* with errors that name the *option* before the wrong word."""

    def read(text: str) -> object:
        try:
            return meaning(text)
        except ValueError as error:
            message = str(error)
            named = f"{option} {message}" if message.startswith(("'", "selective: ")) else message
            raise ValueError(named) from None

    return read


def _read_stage_layers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise ValueError(f"--stage-layers {text!r}: expected whole numbers, such as 7,8,8,7")
    return tuple(int(part) for part in parts)


def _check_lengths(text: str) -> str:
    """Return *text* if lengths of samples can be read from it."""
    from stepcast.questions.lengths import read_lengths  # numpy is needed for these questions alone

    read_lengths(text)
    return text


RANKS = Choice(group=LAYOUT, read=gpu_count)


def _number(read: Callable[[str], float], *, group: str = EXECUTION, **known: Any) -> Choice:
    return Choice(group=group, read=read, **known)


def _flag(sets: str) -> Choice:
    return Choice(group=EXECUTION, deniable=True, sets=sets)


def _one_of(sets: str, values: type) -> Choice:
    known = tuple(map(str, values))  # type: ignore[call-overload]
    return Choice(group=EXECUTION, values=known, sets=sets, means=values)


class PredictQuestion(Question, frozen=True, kw_only=True):
    """A question about one training step; a default leaves the choice to the framework and the model."""

    # fmt: off
    model: Annotated["Model | str | None", Choice(group=WHAT)] = None
    cluster: Annotated["Cluster | str | None", Choice(group=WHAT, several=True)] = None
    gpu: Annotated[str | None, Choice(group=WHAT, several=True)] = None
    set: Annotated[tuple[str, ...], Choice(group=WHAT)] = ()
    place: Annotated[str, Choice(group=WHAT, values=PLACES)] = "even"
    framework: Annotated["Framework | str | None", Choice(group=WHAT, several=True)] = None
    gpus: Annotated[int | None, replace(RANKS, several=True)] = None
    nodes: Annotated[int | None, RANKS] = None
    dp: Annotated[int | None, RANKS] = None
    tp: Annotated[int, RANKS] = 1
    cp: Annotated[int, RANKS] = 1
    ep: Annotated[int, RANKS] = 1
    pp: Annotated[int, RANKS] = 1
    vpp: Annotated[int | None, _number(count(1, LAYERS.most), group=LAYOUT)] = None
    expert_tp: Annotated[int, RANKS] = 0
    shard: Annotated[int, RANKS] = 0
    replicate: Annotated[int, RANKS] = 0
    stage_layers: Annotated[str | None, Choice(group=LAYOUT, sets="stage_layers", means=_read_stage_layers,
        write=lambda layers: ",".join(map(str, layers)))] = None
    micro_batch: Annotated[int, _number(count(1, SEQUENCES.most, readers.BINARY), group=BATCH)] = 1
    global_batch: Annotated[int | None, _number(count(1, SEQUENCES.most, readers.BINARY), group=BATCH)] = None
    accumulation: Annotated[int | None, _number(count(1, MICRO_BATCHES.most), group=BATCH)] = None
    seq: Annotated[int | None, _number(count(1, TOKENS.most, readers.BINARY), group=BATCH)] = None
    schedule: Annotated[str | None, Choice(group=EXECUTION, read=readers.read_schedule, values=SCHEDULES,
        sets="schedule", means=schedules.ScheduleKind)] = None
    precision: Annotated[str | None, Choice(group=EXECUTION, read=readers.read_precision,
        values=(*PRECISIONS, *AUTOCASTS),
        flags={**{name: name for name in PRECISIONS}, "nvfp4": "nvfp4 fp4", "autocast-bf16": "amp"})] = None
    sharding: Annotated[str | None, Choice(group=EXECUTION, read=readers.read_sharding, values=SHARDINGS,
        sets="sharding", means=Sharding)] = None
    reshard: Annotated[bool | None, _flag("reshard")] = None
    backward_prefetch: Annotated[str | None, Choice(group=EXECUTION, values=("pre", "post"), sets="late_gathers",
        means=lambda word: word == "post", write=lambda late: "post" if late else "pre")] = None
    fp8_params: Annotated[bool, Choice(group=EXECUTION, sets="fp8_parameters")] = False
    zero_gradients: Annotated[float, _number(amount, sets="zero_gradients")] = 0.0
    recompute: Annotated[str | None, Choice(group=EXECUTION, listed=MODULES, read=readers.read_recompute,
        sets="recompute", means=_read_by("--recompute", strategy.recompute_of), write=strategy.recompute_word)] = None
    offload: Annotated[str | None, Choice(group=EXECUTION, sets="offload",
        means=_read_by("--offload", strategy.offload_of), write=strategy.offload_word)] = None
    cp_comm: Annotated[str | None, Choice(group=EXECUTION, values=("p2p", "a2a", "allgather", "a2a+p2p"),
        read=readers.read_cp_comm, sets="context",
        means=lambda word: ContextKind(PREDICTED_AS["cp_comm"].get(word, word)))] = None
    sequence_parallel: Annotated[bool | None, _flag("sequence_parallel")] = None
    flash_attention: Annotated[bool | None, _flag("flash_attention")] = None
    attention_kernel: Annotated[str | None, _one_of("attention", AttentionKernel)] = None
    overlap: Annotated[str | None, Choice(group=EXECUTION, listed=strategy.OVERLAPS, sets="overlap",
        means=_read_by("--overlap", lambda text: strategy.overlap_of([] if text == "none" else text.split(","))),
        write=lambda overlap: ",".join(strategy.overlap_words(overlap)) or "none")] = None
    bucket_mb: Annotated[float | str | None, Choice(group=EXECUTION, sets="bucket_bytes",
        read=lambda text: readers.AUTO if text.lower() == readers.AUTO else amount(text),
        means=lambda size: size if size == readers.AUTO else round(size * 1e6),
        write=lambda size_bytes: repr(size_bytes / 1e6))] = None
    expert_imbalance: Annotated[float, _number(amount, sets="expert_imbalance")] = 1.0
    expert_load: Annotated[str | None, Choice(group=EXECUTION)] = None
    expert_replicas: Annotated[int, _number(count(0, LAYERS.most))] = 0
    expert_capacity: Annotated[float | None, _number(amount, sets="expert_capacity")] = None
    fused_experts: Annotated[bool | None, _flag("fused_experts")] = None
    dispatcher: Annotated[str | None, Choice(group=EXECUTION, values=("alltoall", "allgather", "deepep", "hybridep"),
        read=readers.read_dispatcher, sets="dispatcher", means=Dispatcher)] = None
    lora: Annotated[str | None, Choice(group=TUNING, read=readers.read_lora)] = None
    lora_rank: Annotated[int, _number(count(0, TOKENS.most), sets="lora_rank", group=TUNING)] = 0
    lora_targets: Annotated[str | None, Choice(group=TUNING, read=readers.read_targets, sets="lora_targets",
        listed=tuple(readers.TARGETS), means=lambda text: tuple(text.split(",")) if text else (),
        write=",".join)] = None
    lora_dropout: Annotated[float, _number(amount, sets="lora_dropout", group=TUNING, means=bool,
        write=lambda drops: "0.1" if drops else "0")] = 0.0
    dora: Annotated[bool | None, Choice(group=TUNING, sets="dora", deniable=True)] = None
    liger: Annotated[bool | None, Choice(group=TUNING, sets="liger", deniable=True)] = None
    lora_a2a: Annotated[bool | None, Choice(group=TUNING, deniable=True, sets="exchanges_adapters")] = None
    train_layers: Annotated[int, _number(count(0, LAYERS.most), sets="trained_layers", group=TUNING)] = 0
    base_weights: Annotated[str | None, Choice(group=TUNING, values=("nf4", "nf4-single", "int8"), sets="base_weights",
        means=BaseWeights)] = None
    task: Annotated[str | None, Choice(group=TUNING, values=tuple(map(str, Objective)), sets="objective",
        means=Objective)] = None
    lengths: Annotated[str | None, Choice(group=TUNING, read=_check_lengths)] = None
    batching: Annotated[str | None, Choice(group=TUNING, values=("padded", "grouped", "packed"))] = None
    mtp_layers: Annotated[int | None, _number(count(0, MOST_MTP_LAYERS), sets="mtp_layers")] = None
    dropout: Annotated[bool | None, _flag("dropout")] = None
    fp8_activations: Annotated[bool | None, _flag("fp8_activations")] = None
    fp8_attention: Annotated[bool | None, _flag("fp8_attention")] = None
    op_fuser: Annotated[bool | None, _flag("op_fuser")] = None
    check_gradients: Annotated[bool | None, _flag("checks_gradients")] = None
    bf16_final_layers: Annotated[int | None, _number(count(0, LAYERS.most), sets="wide_layers")] = None
    loss: Annotated[str | None, _one_of("loss", LossKernel)] = None
    deferred_gradients: Annotated[int | None, _number(count(0, MICRO_BATCHES.most), sets="deferred_gradients")] = None
    gradients: Annotated[str | None, Choice(group=EXECUTION, read=readers.read_precision,
        values=("fp32", "bf16", "fp16"), sets="gradient_dtype", means=DType)] = None
    optimizer: Annotated[str | None, Choice(group=EXECUTION, listed=OPTIMIZERS)] = None
    master_weights: Annotated[bool | None, _flag("")] = None
    clipping: Annotated[bool | None, _flag("")] = None
    kernels: Annotated[str | None, Choice(group=EXECUTION, values=("fused", "plain", "compiled"), sets="kernels",
        means=Kernels)] = None
    ssm_kernels: Annotated[str | None, _one_of("ssm_kernels", SsmKernels)] = None
    execution: Annotated[str | None, Choice(group=EXECUTION, values=("graphs", "partial-graphs", "eager", "blocking"),
        sets="execution", means=Execution)] = None
    calibration: Annotated["Calibration | str | None", Choice(group=PRICES)] = None
    engine: Annotated[str, Choice(group=NETWORK, help=f"{ENGINE_HELP} (default: fast)", values=ENGINES)] = "fast"
    background: Annotated[str | None, Choice(group=NETWORK)] = None
    tokens: Annotated[float | None, Choice(group=TRAINING, read=positive(parse_count))] = None
    samples: Annotated[float | None, Choice(group=TRAINING, read=positive(parse_count))] = None
    epochs: Annotated[float | None, Choice(group=TRAINING, read=positive(float))] = None
    steps: Annotated[float | None, Choice(group=TRAINING, read=positive(parse_count))] = None
    price: Annotated[float | str | None, Choice(group=TRAINING, several=True, read=readers.price)] = None
    currency: Annotated[str, Choice(group=TRAINING, read=readers.currency)] = DEFAULT_CURRENCY
    # fmt: on

    @property
    def choices(self) -> FactDict:
        """Return the choices that differ from their defaults, in the order of the help."""
        values = {name: getattr(self, name) for name in CHOICES}
        return {name: value for name, value in values.items() if value != DEFAULTS[name]}


CHOICES = choices_of(PredictQuestion)
DEFAULTS = defaults_of(PredictQuestion)

INPUT = "input"


class AnalyzeQuestion(Question, frozen=True, kw_only=True):
    """A question about measured files."""

    # fmt: off
    format: Annotated[str | None, Choice(group=INPUT)] = None
    cluster: Annotated[str | None, Choice(group=INPUT)] = None
    set: Annotated[tuple[str, ...], Choice(group=INPUT)] = ()
    calibration: Annotated[str | None, Choice(group=INPUT)] = None
    # fmt: on


class ReplayQuestion(Question, frozen=True, kw_only=True):
    """A question about measured files under changed conditions."""

    # fmt: off
    what_if: Annotated[tuple[str, ...], Choice(group=INPUT)] = ()
    scale_to: Annotated[str | None, Choice(group=INPUT)] = None
    gpu: Annotated[str | None, Choice(group=INPUT)] = None
    cluster: Annotated[str | None, Choice(group=INPUT)] = None
    set: Annotated[tuple[str, ...], Choice(group=INPUT)] = ()
    engine: Annotated[str, replace(CHOICES["engine"], group=INPUT)] = "fast"
    # fmt: on

    @property
    def changes(self) -> list[str]:
        """The changes of ``--what-if`` and ``--scale-to``."""
        if self.scale_to is not None and not self.scale_to.replace(" ", "").startswith("dp="):
            raise ValueError(f"--scale-to scales the number of replicas; write dp=64, not {self.scale_to!r}")
        return [*self.what_if, *([self.scale_to] if self.scale_to is not None else [])]
