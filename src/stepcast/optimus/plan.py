"""The plan of an OptimusPrime run: model, layout, batch sizes, sequence length and stages.

A plan has no measured times: it is all that a prediction may know of a run.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from stepcast.ir.layout import Layout
from stepcast.ir.measured import FIRST_WARM_STEP, RunLog
from stepcast.ir.model import Model
from stepcast.ir.types import Size, dataclass, require

LAYER_MODULE = re.compile(r"model_layers_([0-9]{1,6})_(?:self_attn|mlp)_([a-z_]{1,20})")
# Leaf modules of one layer in the order of running; the log times each of them.
LAYER_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "act_fn", "up_proj", "down_proj")
STAGE_0_TENSORS = 3  # the mask and rotary tables that stage 0 sends with its own tensors


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One pipeline stage: its modules in layers, and the weights of their matmuls."""

    layers: float
    weights: int  # of its layers, before tensor parallelism
    embeds: bool
    heads: bool

    def __post_init__(self) -> None:
        require(self.layers > 0 or self.heads or self.embeds, "a stage runs at least one module")


@dataclass(frozen=True, slots=True)
class OptimusPlan:
    """*sequence* is the padded length of a step's samples; *inside* means that stages end inside an MLP."""

    model: Model
    layout: Layout
    micro_batch: Size
    micro_batches: Size
    sequence: float
    stages: tuple[StagePlan, ...]
    inside: bool

    def __post_init__(self) -> None:
        require(self.sequence > 0, f"the sequence length must be above zero, not {self.sequence!r}")
        require(len(self.stages) == self.layout.pp, f"{len(self.stages)} stages, but PP is {self.layout.pp}")

    @property
    def tokens(self) -> float:
        """The tokens of one micro-batch."""
        return self.micro_batch * self.sequence

    @property
    def head_weights(self) -> int:
        """The weights of the embedding or the output projection, which tensor parallelism does not shard."""
        return self.model.vocab * self.model.hidden

    def forward_messages(self, hop: int) -> int:
        """Return the point-to-point messages from stage *hop* to the next for one micro-batch.

        Source: opt_prime/comm.py of ai-computing/aicomp. A tuple is announced by its type and length, each
        tensor by its type, dimensions, shape and format, then sent; stage 0's tuple travels all the way.
        """
        own = 3 if self.inside else 2
        return 2 + 5 * (own + STAGE_0_TENSORS) + (2 + 5 * own if hop else 0)

    def backward_messages(self) -> int:
        """Return the messages of the gradients: one for each input, in a list in a tuple that ends with None."""
        return 2 + (2 + 5 * ((3 if self.inside else 2) + STAGE_0_TENSORS)) + 1

    def boundary_elements(self) -> float:
        """Return the values a stage sends for one micro-batch: the residual and its last layer's partial result."""
        width = self.model.hidden + (2 * self.model.ffn if self.inside else self.model.hidden)
        return self.tokens * width


def module_weights(model: Model) -> dict[str, int]:
    """Return the weights of each leaf module of a layer."""
    inner, shared = model.heads * model.head_dim, model.kv_heads * model.head_dim
    sizes = (inner, shared, shared, inner, model.ffn, 0, model.ffn, model.ffn)
    return {name: model.hidden * size for name, size in zip(LAYER_MODULES, sizes, strict=True)}


def plan_of_log(log: RunLog, model: Model, sequences: Sequence[float]) -> OptimusPlan:
    """Return the plan of *log*; *sequences* are the padded lengths of steps 1, 2, ..."""
    if log.parameters and log.parameters != model.parameters:
        raise ValueError(f"{log.source}: has {log.parameters:,} parameters, but {model.name} has {model.parameters:,}")
    batch_s(log)  # says so where there is none
    indices = sorted({batch.index for batch in log.batches if batch.index >= FIRST_WARM_STEP})
    used = [sequences[index] for index in indices if index < len(sequences)]
    if not used:
        raise ValueError(f"{log.source}: no sequence length is known for its batches")
    return plan(model, log.layout, log.micro_batch, log.micro_batches, float(median(used)), log.stage_ends)


def batch_s(log: RunLog) -> float:
    """Return the median wall time of the batches of *log*."""
    batch = log.batch_time()
    if batch is None:
        raise ValueError(f"{log.source}: no batch after the first is printed; expected '| ms/batch' lines")
    return batch.seconds


def plan(
    model: Model, layout: Layout, micro_batch: int, micro_batches: int, sequence: float, stage_ends: Sequence[str] = ()
) -> OptimusPlan:
    """Return the plan with *stage_ends* as the log prints them, or with those that OptimusPrime would choose."""
    names = _module_names(model)
    ends = []
    for name in stage_ends:
        match = LAYER_MODULE.fullmatch(name)
        module = (int(match[1]), match[2]) if match else (-1, name)
        if module not in names:
            raise ValueError(f"{name!r} is no module of the model; expected one like model_layers_1_mlp_up_proj")
        ends.append(names.index(module))
    ends = ends or default_cuts(model, layout.tp, layout.pp)
    if len(ends) != layout.pp:
        raise ValueError(f"{len(ends)} stage ends are printed, but PP is {layout.pp}")
    # The last stage always runs to the end of the model.
    bounds = [0, *(end + 1 for end in ends[:-1]), len(names)]
    weights = module_weights(model)
    stages = []
    for start, stop in pairwise(bounds):
        inside = [name for layer, name in names[start:stop] if layer >= 0]
        layers, stage_weights = len(inside) / len(LAYER_MODULES), sum(weights[name] for name in inside)
        stages.append(StagePlan(layers, stage_weights, embeds=start == 0, heads=stop == len(names)))
    cut_inside = any(names[stop - 1][1] != "down_proj" for stop in bounds[1:-1])
    return OptimusPlan(model, layout, micro_batch, micro_batches, sequence, tuple(stages), cut_inside)


def default_cuts(model: Model, tp: int, pp: int) -> list[int]:
    """Return the last module of each stage: after every (modules // pp) of them.

    With tensor parallelism it is the first end of a layer behind that.
    """
    names = _module_names(model)
    segment, count = len(names) // pp, 0
    cuts: list[int] = []
    for position, (_, name) in enumerate(names):
        count += 1
        is_full = count == segment if tp == 1 else count > segment and name == "down_proj"
        if is_full and len(cuts) < pp - 1:
            cuts.append(position)
            count = 0
    if len(cuts) != pp - 1:
        raise ValueError(f"{model.name} cannot be cut into {pp} stages")
    return [*cuts, len(names) - 1]


def _module_names(model: Model) -> list[tuple[int, str]]:
    """Return layer and name of every timed module; layer -1 for the embedding and the output projection."""
    layers = [(layer, name) for layer in range(model.layers) for name in LAYER_MODULES]
    return [(-1, "embed_tokens"), *layers, (-1, "lm_head")]
