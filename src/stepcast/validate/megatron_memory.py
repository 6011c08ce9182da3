"""The megatron-memory set: peak memory of Megatron-LM's functional tests."""

import re
import shlex
from dataclasses import replace

from stepcast.cost.memory import memory
from stepcast.cost.memory.stages import EXPERT_STREAMS, engine_workspace_bytes
from stepcast.frameworks.catalog import Profile, load_profile, settle
from stepcast.hardware import Cluster
from stepcast.inputs.configs import megatron
from stepcast.inputs.configs.keys import Keys
from stepcast.inputs.model_table import model_of
from stepcast.ir.dtype import DType
from stepcast.ir.facts import FactDict
from stepcast.ir.framework import Dispatcher, Framework, LossKernel, parse_optimizer
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.schedules import default_schedule
from stepcast.ir.strategy import Overlap, Recompute, Sharding, Strategy
from stepcast.models.catalog import COLUMN_SIZES, load_model, words_of
from stepcast.questions.runs import NoOptionError, predict_words
from stepcast.validate.published.setup import Record, read_recompute
from stepcast.validate.scoreboard import Measurements, ScoredRow, cluster_of, columns_of, compare_each, read_records

TERM = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d+))?")


def layer_pattern(text: str) -> tuple[bool, ...]:
    """Return which layers have experts: ``([0]*3+[1]*11)`` is three dense layers, then eleven of experts."""
    plain = text.replace(" ", "").strip("()")
    pattern: list[bool] = []
    for part in plain.split("+"):
        term = TERM.fullmatch(part)
        if term is None:
            raise ValueError(f"moe-layer-freq {text!r} is not known")
        pattern += [digit == "1" for digit in term[1].split(",")] * int(term[2] or 1)
    return tuple(pattern)


# One functional test of Megatron-LM in our nouns: what its arguments say, by their own names.

PROFILE = "megatron-lm"
MOST_DEFERRED = 10**6  # no limit said: all
CUT_OFF = 500  # characters of further arguments that a row has at most
# Kinds that are no training step of one language model.
OTHER_KINDS = ("non-LLM", "multimodal", "multi-run", "distillation")
SIZES = {size: size for size in ("hidden", "heads", "kv_heads", "ffn")}
SIZES |= {"head_dim": "kv_channels", "vocab": "vocab_padded", "max_seq": "seq"}
OVERLAPS = {"gradients": "overlap-grad-reduce", "parameters": "overlap-param-gather", "tensor": "tp-comm-overlap",
            "experts": "overlap-moe-expert-parallel-comm"}  # fmt: skip
LATENT = {size.removeprefix("mla_"): name for size, (name, _) in megatron.LATENT.items()}
MAMBA = {"mamba_heads": "mamba-num-heads", "mamba_head_dim": "mamba-head-dim", "state": "mamba-state-dim",
         "groups": "mamba-num-groups"}  # fmt: skip


class MemoryCase:
    """The columns of one test; ``model``, ``strategy`` and ``framework`` follow from them."""

    def __init__(self, record: Record) -> None:
        self.record = record
        kind = self.text("kind")
        if kind.startswith(OTHER_KINDS):
            raise ValueError(f"no training step of one language model: {kind.partition(' (')[0]}")
        flags = (word.partition("=") for word in self.text("other_flags").split())
        self.flags = Keys({name: value or True for name, _, value in flags}, "megatron")
        self.cut_off = len(self.text("other_flags")) >= CUT_OFF
        for name in ("vocab_padded", "num_gpus", "max_mem_bytes"):
            if not self.text(name):
                raise ValueError(f"{name} is not stated")
        if "fine-grained-activation-offloading" in self.flags:
            raise ValueError("activations are offloaded")
        self.model = model_of(self.text("test"), self._architecture())
        self.strategy, self.framework, self.profile = self._run()

    def text(self, name: str) -> str:
        return (self.record.get(name) or "").strip()

    def number(self, name: str, usual: int = 0) -> int:
        text = self.text(name)
        try:
            return int(float(text)) if text else usual
        except ValueError:
            raise ValueError(f"{name} {text!r} is not a number") from None

    def on(self, name: str) -> bool:
        return self.text(name) == "1"

    def _architecture(self) -> FactDict:
        gated, hidden = self.on("swiglu"), self.number("hidden")
        table: FactDict = {
            **{size: self.number(column) for size, column in SIZES.items()},
            "tied": self.on("tied_embeddings"),
            "gated": gated,
            "activation": "squared-relu" if "squared-relu" in self.flags else "silu" if gated else "gelu",
            "norm": megatron.NORMS[self.text("normalization").lower()],
            "biases": ["qkv", "attention_output", "mlp"] if self.on("bias_linear") else [],
            "position": megatron.POSITIONS[self.text("position")],
        }
        if "qk-layernorm" in self.flags and "multi-latent-attention" not in self.flags:
            table["qk_norm"] = "head"
        if pattern := self._pattern:
            usual = {"mamba_heads": hidden * 2 // 64, "mamba_head_dim": 64, "state": 128, "groups": 8}
            found = {name: self.flags.number(flag) or usual[name] for name, flag in MAMBA.items()}
            table["hybrid"] = {"pattern": pattern.replace("|", ""), **found}
        else:
            table["layers"] = self.number("layers")
        if "multi-latent-attention" in self.flags:
            if missing := [flag for flag in LATENT.values() if self.flags.number(flag) is None]:
                raise ValueError(f"--{missing[0]} is not stated")
            table["latent"] = {name: self.flags.number(flag) for name, flag in LATENT.items()}
            del table["head_dim"], table["kv_heads"]
        if self.number("moe_experts"):
            frequency = self.text("moe_layer_freq")
            table["experts"] = {
                "count": self.number("moe_experts"),
                "top_k": self.number("moe_topk", 2),
                "ffn": self.number("moe_ffn") or self.number("ffn"),
                "shared_ffn": self.number("moe_shared_ffn"),
                **({"pattern": layer_pattern(frequency)} if frequency else {}),
            }
        if further := self.flags.number("mtp-num-layers"):
            table["next_token_layers"] = further
        return table

    @property
    def _pattern(self) -> str:
        """The letters of a hybrid's layers, with a bar between those of different stages and chunks."""
        return self.flags.text("hybrid-layer-pattern", "hybrid-override-pattern").partition("/")[0]

    def _run(self) -> tuple[Strategy, Framework, Profile]:
        profile, pp = load_profile(PROFILE), self.number("pp", 1)
        vpp = self.number("vpp", (self._pattern.count("|") + 1) // pp or 1) if pp > 1 else 1
        degrees = {axis: self.number(axis, 1) for axis in ("tp", "cp", "ep", "dp")}
        layout = Layout(**degrees, pp=pp, vpp=vpp, expert_tp=self.number("etp"))
        settled = settle(profile, self.model, self.text("gpu"), layout, self._given())
        choices = dict(settled.choices)
        if layers := self._stage_layers(layout):
            if self.text("pp_layout"):
                layout = replace(layout, vpp=len(layers) // layout.pp)
            choices["stage_layers"] = layers
        if layout.vpp > 1:
            choices["schedule"] = default_schedule(layout.vpp)
        micro = self.number("micro_batch", 1)
        batch = self.number("global_batch") or micro * layout.dp
        if batch % (micro * layout.dp):
            raise ValueError("the batch is not a multiple of micro-batches")
        strategy = replace(settled, choices=choices).strategy(layout, micro, batch, self.number("seq"))
        return strategy, settled.framework, profile

    def _given(self) -> FactDict:
        engine = self.text("transformer_impl") == "transformer_engine"
        flash = engine and self.text("attention_backend") not in ("unfused", "local")
        dropouts = [self.flags.share(f"{part}-dropout") for part in ("hidden", "attention")]
        sharding = Sharding.ZERO_1 if self.on("distributed_optimizer") else Sharding.NONE
        loss = LossKernel.ENGINE if self.flags.text("cross-entropy-fusion-impl") == "te" else LossKernel.COMPILED
        deferred = self.flags.number("wgrad-deferral-limit") or MOST_DEFERRED
        given: FactDict = {
            "precision": DType(self.text("precision")),
            "sharding": Sharding.FSDP if self.text("fsdp") else sharding,
            "sequence_parallel": self.on("sp"),
            "flash_attention": flash,
            # Long lists of arguments are cut off, and those of large recent models, which have none.
            "dropout": not (self.cut_off or dropouts == [0.0, 0.0]),
            "fused_accumulation": self.on("grad_accum_fusion"),
            "overlap": Overlap(
                **{name: flag in self.flags for name, flag in OVERLAPS.items()},
                tensor_gradients=True,
                transfers=self.number("vpp", 1) > 1,
            ),
            "loss": loss if "cross-entropy-loss-fusion" in self.flags else LossKernel.IN_PLACE,
            "deferred_gradients": deferred if "defer-embedding-wgrad-compute" in self.flags else 0,
            "recompute": read_recompute(self.text("recompute")) or Recompute(),
        }
        if self.number("moe_experts"):
            word = self.flags.text("moe-token-dispatcher-type") or "allgather"
            given["dispatcher"] = Dispatcher.DEEPEP if word == "flex" else Dispatcher(word)
        if self.on("fp8_params"):
            given["fp8_parameters"] = True
        if self.text("optimizer") == "muon":
            given["optimizer"] = parse_optimizer("muon")
        if further := self.flags.number("mtp-num-layers"):
            given["further_tokens"] = further
        return given

    def _stage_layers(self, layout: Layout) -> tuple[int, ...]:
        if written := self.text("pp_layout"):
            return megatron.parse_layout(written.replace("\\", ""), layout.pp)
        return megatron.uneven_stages(self.flags, self.model.layers, layout.pp, layout.vpp)


# The megatron-memory set: bytes allocated at the peak, against those that ``memory`` predicts.

FILE = "megatron_memory.csv"
# Models of the catalogue whose architecture the tests use with sizes of their own.
LIKE = ("megatron-22b",)
LARGE_HIDDEN = 2048
COMMAND = "command"


def measure_peak_memory(*folders: str) -> Measurements:
    """Compare the tests in ``megatron_memory.csv`` of *folders*, or in these files."""
    needed = ("max_mem_bytes", "test", "kind")
    records = (record for folder in folders for record in read_records(folder, FILE, needed=needed))
    rows, skipped = compare_each(records, lambda record: _row(MemoryCase(record)))
    table = columns_of(rows)
    large = {"hidden 2048 and more": table.tags["size"] == "large"} if rows else {}
    return Measurements(table, skipped, large, details=(COMMAND, "size"), unit="bytes")


def _row(test: MemoryCase) -> ScoredRow:
    cluster = cluster_of(test.text("gpu").partition("-")[0])
    *_, last = memory(test.model, test.strategy, cluster.gpu, test.framework)
    if 0 < test.number("mem_bytes") < last.parameters + last.optimizer:
        raise ValueError("less stays allocated between steps than weights and optimizer states take: another model")
    tags = {
        "kind": test.text("kind"),
        "gpu": test.text("gpu"),
        "software": test.text("software"),
        "hidden": test.text("hidden"),
        "attention": "flash" if test.framework.flash_attention else "unfused",
        "optimizer": str(test.strategy.sharding),
        "engine": test.text("transformer_impl"),
        "size": "large" if test.model.hidden >= LARGE_HIDDEN else "small",
        COMMAND: _command(test, cluster),
    }
    allocated = last.allocated
    if test.model.experts and "moe-grouped-gemm" not in test.flags and not test.cut_off:
        allocated -= EXPERT_STREAMS * engine_workspace_bytes(cluster.gpu)  # experts one by one run on one stream
    name = " ".join(map(test.text, ("id", "test", "gpu", "software")))
    return ScoredRow(name, float(test.text("max_mem_bytes")), allocated, tags)


def _command(test: MemoryCase, cluster: Cluster) -> str:
    """Return the command that shows the memory of each stage, or why there is none."""
    try:
        model = _said_model(test.model)
        said = predict_words(test.profile, test.model, test.text("gpu"), test.strategy, test.framework)
    except NoOptionError as error:
        return f"cannot be expressed: {error}"
    words = ["stepcast", "predict", "--model", model, "--cluster", cluster.name, *said, "--explain-memory"]
    return shlex.join(words)


def _said_model(model: Model) -> str:
    """Return a name with sizes, as ``load_model`` takes it, that means *model*."""
    sizes = {name: getattr(model, name) for name in COLUMN_SIZES} | {"seq": model.max_seq}
    for name in LIKE:
        word = words_of(name, sizes)
        if replace(load_model(word), name=model.name, source=model.source) == model:
            return word
    raise NoOptionError("no model of the catalogue is like it; a config.json would have to say it")
