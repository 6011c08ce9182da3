"""The question of ``stepcast predict``, every choice of a training step; those of ``analyze`` and ``replay`` about
measured runs; and rules for choices that have no effect, as ``data/choices.txt`` states them, for options that are
fields of no question ``data/rules.toml``.

A choice that differs from its default and cannot change the answer is

- an error if the user surely meant something else: the message says why and what to do;
- a note if the answer is still the one that was asked for.
"""

from collections.abc import Callable, Collection
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Annotated

from stepcast.inputs.source import DATA, read_toml
from stepcast.ir import schedules, strategy
from stepcast.ir.framework import AttentionKernel, Dispatcher, Execution, Kernels, LossKernel, SsmKernels
from stepcast.ir.limits import LAYERS, MICRO_BATCHES, SEQUENCES, TOKENS
from stepcast.ir.strategy import BaseWeights, ContextKind, Objective, RecomputeModule, Sharding
from stepcast.ir.types import DType, Facts, dataclass
from stepcast.questions import choices as readers
from stepcast.questions.choices import Choice, Question, amount, choices_of, count, defaults_of, gpu_count, positive
from stepcast.units import DEFAULT_CURRENCY, parse_count

PIPELINED = tuple(str(kind) for kind, facts in schedules.SCHEDULES.items() if not facts.alone)
PAIRED = tuple(str(kind) for kind, facts in schedules.SCHEDULES.items() if facts.pairs is schedules.Pairs.OWN)
SCHEDULES = tuple(map(str, schedules.ScheduleKind))
PRECISIONS = ("bf16", "fp16", "fp32", "tf32", "fp8", "mxfp8", "nvfp4")
AUTOCASTS = ("autocast-bf16", "autocast-fp16")
MODULES = tuple(map(str, RecomputeModule))
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum", "muon", "adafactor")
# Exchanges that are not modelled, and the exchange whose time is predicted instead, as for Megatron-LM scripts.
PREDICTED_AS = {"cp_comm": {"a2a+p2p": "p2p"}}
PLACES = ("even", "packed")  # a test compares them with hardware.Place
ENGINES = ("fast", "fluid")  # a test compares them with forecast.options.Engine
MOST_MTP_LAYERS = 64
WHAT = "model, cluster and framework"  # the heading below which the help begins


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
    table = _load_tables(str(DATA / "rules.toml")).get(name, {})
    stated = readers.read_rules(f"{name.capitalize()}Question")
    own = [Rule((option,), condition, why, kind == "note") for option, kind, condition, why in stated]
    own += [
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
            raise ValueError(_write_message(option, rule, facts))
    return tuple(_write_message(option, rule, facts) for option, rule in idle)


def _write_message(option: str, rule: Rule, facts: Facts) -> str:
    denied = f"no-{option}" if facts.get(option) is False else option
    reason = rule.otherwise.format_map({"paired_list": " or ".join(PAIRED), **facts})
    return f"{readers.option_of(denied)} has no effect: {reason}"


if TYPE_CHECKING:
    from stepcast.cost.calibration import Calibration
    from stepcast.hardware import Cluster
    from stepcast.inputs.expression import Expression
    from stepcast.ir.framework import Framework
    from stepcast.ir.model import Model


def _name_option(option: str, meaning: Callable[[str], object]) -> Callable[[str], object]:
    """Return *meaning* so that its errors begin with the *option*."""

    def read(text: str) -> object:
        try:
            return meaning(text)
        except ValueError as error:
            message = str(error)
            raise ValueError(f"{option} {message}" if message.startswith(("'", "selective: ")) else message) from None

    return read


def _read_stage_layers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise ValueError(f"--stage-layers {text!r}: expected whole numbers, such as 7,8,8,7")
    return tuple(int(part) for part in parts)


def _check_lengths(text: str) -> str:
    """Return *text*; raise a ValueError if it states no lengths of samples."""
    from stepcast.questions.lengths import read_lengths  # numpy is needed for these questions alone

    read_lengths(text)
    return text


RANKS = Choice(read=gpu_count)


def _flag(sets: str) -> Choice:
    return Choice(deniable=True, sets=sets)


def _one_of(kind: type[StrEnum], sets: str, known: str = "", read: Callable[[str], object] = str) -> Choice:
    """Return a choice among the words *known*, or all values of *kind*, that sets the field *sets*."""
    return Choice(read=read, values=tuple(known.split() or map(str, kind)), sets=sets, means=kind)


class PredictQuestion(Question, frozen=True, kw_only=True):
    """A question about one training step; a default leaves the choice to the framework and the model."""

    # fmt: off
    model: "Model | str | None" = None
    cluster: Annotated["Cluster | str | None", Choice(several=True)] = None
    gpu: Annotated[str | None, Choice(several=True)] = None
    set: tuple[str, ...] = ()
    place: Annotated[str, Choice(values=PLACES)] = "even"
    framework: Annotated["Framework | str | None", Choice(several=True)] = None
    gpus: Annotated[int | None, Choice(read=gpu_count, several=True)] = None
    nodes: Annotated[int | None, RANKS] = None
    dp: Annotated[int | None, RANKS] = None
    tp: Annotated[int, RANKS] = 1
    cp: Annotated[int, RANKS] = 1
    ep: Annotated[int, RANKS] = 1
    pp: Annotated[int, RANKS] = 1
    vpp: Annotated[int | None, Choice(read=count(1, LAYERS.most))] = None
    expert_tp: Annotated[int, RANKS] = 0
    shard: Annotated[int, RANKS] = 0
    replicate: Annotated[int, RANKS] = 0
    stage_layers: Annotated[str | None, Choice(sets="stage_layers", means=_read_stage_layers,
        write=lambda layers: ",".join(map(str, layers)))] = None
    micro_batch: Annotated[int, Choice(read=count(1, SEQUENCES.most, readers.BINARY))] = 1
    global_batch: Annotated[int | None, Choice(read=count(1, SEQUENCES.most, readers.BINARY))] = None
    accumulation: Annotated[int | None, Choice(read=count(1, MICRO_BATCHES.most))] = None
    seq: Annotated[int | None, Choice(read=count(1, TOKENS.most, readers.BINARY))] = None
    schedule: Annotated[str | None, _one_of(schedules.ScheduleKind, "schedule", read=readers.read_schedule)] = None
    precision: Annotated[str | None, Choice(read=readers.read_precision, values=(*PRECISIONS, *AUTOCASTS),
        flags={**{name: name for name in PRECISIONS}, "nvfp4": "nvfp4 fp4", "autocast-bf16": "amp"})] = None
    sharding: Annotated[str | None, _one_of(Sharding, "sharding", read=readers.read_sharding)] = None
    reshard: Annotated[bool | None, _flag("reshard")] = None
    backward_prefetch: Annotated[str | None, Choice(values=("pre", "post"), sets="late_gathers",
        means=lambda word: word == "post", write=lambda late: "post" if late else "pre")] = None
    fp8_params: Annotated[bool, Choice(sets="fp8_parameters")] = False
    zero_gradients: Annotated[float, Choice(read=amount, sets="zero_gradients")] = 0.0
    recompute: Annotated[str | None, Choice(listed=MODULES, read=readers.read_recompute, sets="recompute",
        means=_name_option("--recompute", strategy.recompute_of), write=strategy.recompute_word)] = None
    offload: Annotated[str | None, Choice(sets="offload", means=_name_option("--offload", strategy.offload_of),
        write=strategy.offload_word)] = None
    cp_comm: Annotated[str | None, Choice(values=("p2p", "a2a", "allgather", "a2a+p2p"), read=readers.read_cp_comm,
        sets="context", means=lambda word: ContextKind(PREDICTED_AS["cp_comm"].get(word, word)))] = None
    sequence_parallel: Annotated[bool | None, _flag("sequence_parallel")] = None
    flash_attention: Annotated[bool | None, _flag("flash_attention")] = None
    attention_kernel: Annotated[str | None, _one_of(AttentionKernel, "attention")] = None
    overlap: Annotated[str | None, Choice(listed=strategy.OVERLAPS, sets="overlap",
        means=_name_option("--overlap", lambda text: strategy.overlap_of([] if text == "none" else text.split(","))),
        write=lambda overlap: ",".join(strategy.overlap_words(overlap)) or "none")] = None
    bucket_mb: Annotated[float | str | None, Choice(sets="bucket_bytes",
        read=lambda text: readers.AUTO if text.lower() == readers.AUTO else amount(text),
        means=lambda size: size if size == readers.AUTO else round(size * 1e6),
        write=lambda size_bytes: repr(size_bytes / 1e6))] = None
    expert_imbalance: Annotated[float, Choice(read=amount, sets="expert_imbalance")] = 1.0
    expert_load: str | None = None
    expert_replicas: Annotated[int, Choice(read=count(0, LAYERS.most))] = 0
    expert_capacity: Annotated[float | None, Choice(read=readers.rate, sets="expert_capacity")] = None
    fused_experts: Annotated[bool | None, _flag("fused_experts")] = None
    dispatcher: Annotated[str | None, _one_of(Dispatcher, "dispatcher", read=readers.read_dispatcher)] = None
    lora: Annotated[str | None, Choice(read=readers.read_lora)] = None
    lora_rank: Annotated[int, Choice(read=count(0, TOKENS.most), sets="lora_rank")] = 0
    lora_targets: Annotated[str | None, Choice(read=readers.read_targets, listed=tuple(readers.TARGETS),
        sets="lora_targets", means=lambda text: tuple(text.split(",")) if text else (), write=",".join)] = None
    lora_dropout: Annotated[float, Choice(read=amount, sets="lora_dropout", means=bool,
        write=lambda drops: "0.1" if drops else "0")] = 0.0
    dora: Annotated[bool | None, _flag("dora")] = None
    liger: Annotated[bool | None, _flag("liger")] = None
    lora_a2a: Annotated[bool | None, _flag("exchanges_adapters")] = None
    train_layers: Annotated[int, Choice(read=count(0, LAYERS.most), sets="trained_layers")] = 0
    base_weights: Annotated[str | None, _one_of(BaseWeights, "base_weights", "nf4 nf4-single int8")] = None
    task: Annotated[str | None, _one_of(Objective, "objective")] = None
    lengths: Annotated[str | None, Choice(read=_check_lengths)] = None
    batching: Annotated[str | None, Choice(values=("padded", "grouped", "packed"))] = None
    mtp_layers: Annotated[int | None, Choice(read=count(0, MOST_MTP_LAYERS), sets="mtp_layers")] = None
    dropout: Annotated[bool | None, _flag("dropout")] = None
    fp8_activations: Annotated[bool | None, _flag("fp8_activations")] = None
    fp8_attention: Annotated[bool | None, _flag("fp8_attention")] = None
    op_fuser: Annotated[bool | None, _flag("op_fuser")] = None
    check_gradients: Annotated[bool | None, _flag("checks_gradients")] = None
    gradient_accumulation_fusion: Annotated[bool | None, _flag("fused_accumulation")] = None
    bf16_final_layers: Annotated[int | None, Choice(read=count(0, LAYERS.most), sets="wide_layers")] = None
    loss: Annotated[str | None, _one_of(LossKernel, "loss")] = None
    deferred_gradients: Annotated[int | None, Choice(read=count(0, MICRO_BATCHES.most),
        sets="deferred_gradients")] = None
    gradients: Annotated[str | None, _one_of(DType, "gradient_dtype", "fp32 bf16 fp16", readers.read_precision)] = None
    optimizer: Annotated[str | None, Choice(listed=OPTIMIZERS)] = None
    master_weights: Annotated[bool | None, _flag("")] = None
    clipping: Annotated[bool | None, _flag("")] = None
    kernels: Annotated[str | None, _one_of(Kernels, "kernels", "fused plain compiled")] = None
    ssm_kernels: Annotated[str | None, _one_of(SsmKernels, "ssm_kernels")] = None
    execution: Annotated[str | None, _one_of(Execution, "execution", "graphs partial-graphs eager blocking")] = None
    calibration: "Calibration | str | None" = None
    engine: Annotated[str, Choice(values=ENGINES)] = "fast"
    background: str | None = None
    tokens: Annotated[float | None, Choice(read=positive(parse_count))] = None
    samples: Annotated[float | None, Choice(read=positive(parse_count))] = None
    epochs: Annotated[float | None, Choice(read=positive(float))] = None
    steps: Annotated[float | None, Choice(read=positive(parse_count))] = None
    price: Annotated[float | str | None, Choice(several=True, read=readers.price)] = None
    currency: Annotated[str, Choice(read=readers.currency)] = DEFAULT_CURRENCY
    # fmt: on


CHOICES = choices_of(PredictQuestion)
DEFAULTS = defaults_of(PredictQuestion)


class AnalyzeQuestion(Question, frozen=True, kw_only=True):
    """A question about measured files."""

    format: str | None = None
    cluster: str | None = None
    set: tuple[str, ...] = ()
    calibration: str | None = None


class ReplayQuestion(Question, frozen=True, kw_only=True):
    """A question about measured files under changed conditions."""

    what_if: tuple[str, ...] = ()
    scale_to: str | None = None
    gpu: str | None = None
    cluster: str | None = None
    set: tuple[str, ...] = ()
    engine: Annotated[str, CHOICES["engine"]] = "fast"

    @property
    def changes(self) -> list[str]:
        """The changes of ``--what-if`` and ``--scale-to``."""
        if self.scale_to is not None and not self.scale_to.replace(" ", "").startswith("dp="):
            raise ValueError(f"--scale-to scales the number of replicas; write dp=64, not {self.scale_to!r}")
        return [*self.what_if, *([self.scale_to] if self.scale_to is not None else [])]
