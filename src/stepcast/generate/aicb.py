"""The ``aicb-1.1`` dialect: a workload in the shape in which AICB v1.1 writes SimAI text.

AICB describes one pipeline stage with the embedding at its start and the output projection at its end, one
line per linear layer and one collective per phase. What it counts differs from the model's own weights, and
is kept here because SimAI's users compare against it:

- the word embedding counts four times, positions always count (one row per token of the sequence),
- queries, keys and values are all as wide as the hidden size, an MLP has one matrix in, gated or not,
- the sequence-parallel reduce-scatter of a column's backward is written with size 0,
- the embedding's gradient is an all-reduce of the activations' size.

Source: github.com/aliyun/aicb, ``workload_generator/SimAI_training_workload_generator.py``,
``mocked_model/MockedMegatron.py`` and, for what it demands, ``utils/utils.py``.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from stepcast.ir.layout import Group
from stepcast.ir.model import Model
from stepcast.ir.strategy import Strategy, StrategyError
from stepcast.ir.types import dataclass
from stepcast.ir.work import Collective, CollectiveKind, Recorded, Transfer, Work
from stepcast.ir.workload import Block, Layer, Op, Phase, Role, Stage, Workload, with_ops
from stepcast.units import NS

GATHER, SCATTER = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
REDUCE, EXCHANGE = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_TO_ALL
DIALECT = "aicb-1.1"
PROCESS_S = 100 * NS
# The times that AICB writes where it has measured none.
NO_TIME = (1 * NS, 1 * NS, 1 * NS)

# Lines in which AICB writes the experts of one layer.
EXPERT_LINES = 7

Times = Mapping[str, tuple[float, float, float]]
"""Seconds of a line by its name: forward, input gradient, weight gradient."""


def aicb_workload(model: Model, strategy: Strategy, times: Times | None = None) -> Workload:
    """Return one stage of *model* as AICB v1.1 would write it."""
    layout = strategy.layout
    if model.layers % layout.pp:
        raise StrategyError(f"{DIALECT} writes equal stages: pp {layout.pp} does not divide {model.layers} layers")
    lines = _Lines(model, strategy, times or {})
    return Workload(
        stages=(Stage(lines.body(), lines.prologue(), lines.epilogue()),),
        layout=layout,
        micro_batches=strategy.micro_batches,
        name=model.name,
        source=DIALECT,
        notes=(("simai.header", lines.header()),),
    )


@dataclass(frozen=True)
class _Lines:
    model: Model
    strategy: Strategy
    times: Times

    @property
    def line_per_matrix(self) -> bool:
        """AICB's form with sequence parallelism, which it demands for experts, whatever tp is."""
        return self.strategy.sequence_parallel or self.model.experts is not None

    @property
    def activation_bytes(self) -> int:
        return 2 * self.strategy.micro_batch * self.strategy.seq * self.model.hidden

    def header(self) -> str:
        layout = self.strategy.layout
        return (
            f"HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: {layout.tp} ep: {layout.ep} "
            f"pp: {layout.pp} ga: {self.strategy.micro_batches} all_gpus: {layout.gpus} "
            "checkpoints: 0 checkpoint_initiates: 0"
        )

    def parameters(self) -> tuple[int, int]:
        """Return the parameters of the stage as AICB counts them, experts apart from the rest."""
        model, layout, seq = self.model, self.strategy.layout, self.strategy.seq
        hidden, tp = model.hidden, layout.tp
        layers = model.layers // layout.pp
        vocab = _pad_vocab(model.vocab, tp) // tp
        dense = 4 * vocab * hidden + seq * hidden
        attention = 4 * hidden * hidden // tp
        expert = 0
        if model.experts is not None:
            inner = model.experts.ffn * (model.experts.count // layout.ep) // tp
            expert = layers * 2 * hidden * inner
            mlp = 0
        else:
            mlp = 2 * hidden * model.ffn // tp
        dense += layers * (attention + mlp)
        if self.line_per_matrix:
            dense += layers * 2 * hidden + vocab * hidden  # norms and output projection
        return dense, expert

    def prologue(self) -> tuple[Layer, ...]:
        """Return the lines that run once per step, before the micro-batches."""
        (dense, experts), layout = self.parameters(), self.strategy.layout
        layers = [
            self._line("grad_gather", weight=Collective(GATHER, 2 * dense, Group.DP)),
            self._line("grad_param_comm", weight=Collective(SCATTER, 4 * dense, Group.DP)),
            self._line("grad_param_compute"),
        ]
        if not self.line_per_matrix:
            size = 2 * (dense + experts)
            layers.append(self._line("layernorm", inputs=Collective(REDUCE, size, Group.TP)))
        embedding = Collective(REDUCE, self.activation_bytes, Group.TP) if layout.tp > 1 else None
        layers.append(self._line("embedding_grads", inputs=embedding))
        if layout.ep != layout.dp:
            layers.append(self._line("moe_grad_norm1", weight=Collective(GATHER, 2 * experts, Group.EXPERT_DP)))
            layers.append(self._line("moe_grad_norm2", weight=Collective(SCATTER, 4 * experts, Group.EXPERT_DP)))
        return tuple(layers)

    def body(self) -> tuple[Block, ...]:
        """Return the lines of one micro-batch."""
        layout, size = self.strategy.layout, self.activation_bytes
        layers = self.model.layers // layout.pp
        reduce = Collective(REDUCE, size, Group.TP) if layout.tp > 1 else None
        embedding = Block((self._line("embedding_layer", reduce),))
        if not self.line_per_matrix:
            # AICB has no line for the output projection here: its time stands with the embedding's.
            embedding = Block((self._line("embedding_layer", reduce, timed_as="both_embeddings"),))
            pair = (self._line("attention_layer", reduce), self._line("mlp_layer", reduce))
            return (embedding, Block(pair, layers))
        mlp = self._experts() if self.model.experts else (self._column("mlp_column"), self._row("mlp_row"))
        block = (self._column("attention_column"), self._row("attention_row"), *mlp)
        return (embedding, Block(block, layers), Block((self._column("final_column"),)))

    def epilogue(self) -> tuple[Layer, ...]:
        """Return the lines after the micro-batches; they are tensor-parallel even where tp is 1."""
        losses = Collective(REDUCE, 4 * self.strategy.seq * self.strategy.micro_batch, Group.TP)
        norms = Collective(REDUCE, 4, Group.TP)
        optimizer = (self._line(f"optimizer{index}", norms) for index in (1, 2, 3, 4))
        return (
            *(self._line(f"cross_entropy{index}", losses) for index in (1, 2, 3)),
            *(replace(line, role=Role.OPTIMIZER) for line in optimizer),
        )

    def _column(self, name: str) -> Layer:
        if self.strategy.layout.tp == 1:
            return self._line(name)
        gather = Collective(GATHER, self.activation_bytes, Group.TP)
        return self._line(name, gather, Collective(SCATTER, 0, Group.TP))

    def _row(self, name: str) -> Layer:
        if self.strategy.layout.tp == 1:
            return self._line(name)
        size = self.activation_bytes
        return self._line(name, Collective(SCATTER, size, Group.TP), Collective(GATHER, size, Group.TP))

    def _experts(self) -> tuple[Layer, ...]:
        """Return router gather, exchange within the tensor group, dispatch, gather, and the way back."""
        experts, layout, name = self.model.experts, self.strategy.layout, "mlp_moelayer"
        assert experts is not None
        size, tp = self.activation_bytes, layout.tp
        router = 2 * self.strategy.micro_batch * self.strategy.seq * experts.count
        routed = size * experts.top_k
        dispatch = Collective(EXCHANGE, routed // tp if layout.ep > 1 else 1, Group.EP)
        scores = inner = gather = scatter = back = None
        if tp > 1:
            scores, inner = Collective(GATHER, router, Group.TP), Collective(EXCHANGE, size // tp, Group.TP)
            gather, scatter = Collective(GATHER, routed, Group.TP), Collective(SCATTER, routed, Group.TP)
            # Without expert parallelism AICB gathers in the backward of both.
            back = scatter if layout.ep > 1 else gather
        forwards = (scores, inner, dispatch, gather, scatter, dispatch, inner)
        backwards = (scores, inner, dispatch, back, gather, dispatch, inner)
        steps = zip(forwards, backwards, strict=True)
        return tuple(self._line(name, forward, inputs) for forward, inputs in steps)

    def _line(
        self,
        name: str,
        forward: Collective | None = None,
        inputs: Collective | None = None,
        weight: Collective | None = None,
        timed_as: str = "",
    ) -> Layer:
        times = self.times.get(timed_as, self.times.get(name, NO_TIME))
        phases = [
            (Op("", Recorded(seconds)), *((Op(work.kind, work),) if work else ()))
            for seconds, work in zip(times, (forward, inputs, weight), strict=True)
        ]
        return Layer(name, phases[0], phases[1], phases[2], PROCESS_S)


def _pad_vocab(vocab: int, tp: int) -> int:
    """Pad rows as Megatron does: to a multiple of 128 on every tensor rank."""
    step = 128 * tp
    return -(-vocab // step) * step


# Generated workloads for other simulators: shapes become seconds, because their files hold times.

Seconds = Callable[[Work], float]

R = Role
# The lines of AICB and the generated layers whose computation belongs to them.
LINES: dict[str, tuple[Role, ...]] = {
    "embedding_layer": (R.EMBEDDING,),
    "attention_column": (R.ATTENTION_NORM, R.QKV, R.LATENT_DOWN, R.LATENT_UP, R.CORE, R.ATTENTION_POST_NORM),
    "attention_row": (R.ATTENTION_OUTPUT,),
    "mlp_column": (R.MLP_NORM, R.MLP_UP, R.MLP_POST_NORM),
    "mlp_row": (R.MLP_DOWN,),
    "mlp_moelayer": (
        *(R.EXPERTS_NORM, R.ROUTER, R.DISPATCH, R.EXPERTS_UP, R.EXPERTS_DOWN, R.COMBINE),
        *(R.EXPERTS_SUM, R.EXPERTS_POST_NORM),
    ),
    "final_column": (R.FINAL_NORM, R.HEAD_PROJECTION, R.HEAD, R.LOSS),
}
LINE_OF = {role: line for line, roles in LINES.items() for role in roles}
# Lines that stand for several: AICB's form without sequence parallelism.
JOINED = {
    "both_embeddings": ("embedding_layer", "final_column"),
    "attention_layer": ("attention_column", "attention_row"),
    "mlp_layer": ("mlp_column", "mlp_row"),
}
ONCE = ("embedding_layer", "final_column")  # per micro-batch; the others per layer


def record_times(workload: Workload, seconds: Seconds) -> Workload:
    """Return *workload* with every computation as its time."""

    def timed(op: Op) -> Op:
        return op if isinstance(op.work, Collective | Transfer) else replace(op, work=Recorded(seconds(op.work)))

    return with_ops(workload, timed)


def aicb_times(workload: Workload, seconds: Seconds, layers_per_stage: int) -> Times:
    """Return the seconds of AICB's lines, from the computation of the generated layers they stand for."""
    middle = workload.stages[len(workload.stages) // 2]
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for layer in middle.body_layers():
        if layer.role not in LINE_OF:
            continue
        line = LINE_OF[layer.role]
        for index, phase in enumerate(Phase):
            totals[line][index] += sum(
                seconds(op.work) for op in layer.ops(phase) if not isinstance(op.work, Collective | Transfer)
            )
    times = {line: _divide(spent, 1 if line in ONCE else layers_per_stage) for line, spent in totals.items()}
    for joined, lines in JOINED.items():
        if parts := [times[line] for line in lines if line in times]:
            forward, inputs, weights = (sum(phase) for phase in zip(*parts, strict=True))
            times[joined] = (forward, inputs, weights)
    if "mlp_moelayer" in times:
        times["mlp_moelayer"] = _divide(times["mlp_moelayer"], EXPERT_LINES)
    return times


def _divide(spent: Sequence[float], share: int) -> tuple[float, float, float]:
    forward, inputs, weights = spent
    return forward / share, inputs / share, weights / share
