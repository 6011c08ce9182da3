"""Generated workloads for other simulators: shapes become seconds, because their files hold times."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from stepcast.generate.aicb import EXPERT_LINES, Times
from stepcast.ir.edits import with_ops
from stepcast.ir.work import Collective, Recorded, Transfer, Work
from stepcast.ir.workload import Op, Phase, Workload

Seconds = Callable[[Work], float]

# The line of AICB that a generated layer's computation belongs to, by the first words of its name.
LINES = (
    ("embedding", "embedding_layer"),
    ("attention output", "attention_row"),
    ("attention", "attention_column"),
    ("mlp down", "mlp_row"),
    ("mlp", "mlp_column"),
    ("expert", "mlp_moelayer"),
    ("router", "mlp_moelayer"),
    ("final", "final_column"),
    ("head", "final_column"),
    ("loss", "final_column"),
)
# Lines that stand for several: AICB's form without sequence parallelism.
JOINED = {
    "both_embeddings": ("embedding_layer", "final_column"),
    "attention_layer": ("attention_column", "attention_row"),
    "mlp_layer": ("mlp_column", "mlp_row"),
}
ONCE = ("embedding_layer", "final_column")  # per micro-batch; the others per layer


def recorded(workload: Workload, seconds: Seconds) -> Workload:
    """*workload* with every computation as its time."""

    def timed(op: Op) -> Op:
        if isinstance(op.work, Collective | Transfer):
            return op
        return replace(op, work=Recorded(seconds(op.work)))

    return with_ops(workload, timed)


def aicb_times(workload: Workload, seconds: Seconds, layers_per_stage: int) -> Times:
    """Seconds of AICB's lines, from the computation of the generated layers they stand for."""
    middle = workload.stages[len(workload.stages) // 2]
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for each in middle.body_layers():
        line = next((line for words, line in LINES if each.name.startswith(words)), None)
        if line is None:
            continue
        for at, phase in enumerate(Phase):
            totals[line][at] += sum(
                seconds(op.work) for op in each.ops(phase) if not isinstance(op.work, Collective | Transfer)
            )
    times = {line: _scaled(spent, 1 if line in ONCE else layers_per_stage) for line, spent in totals.items()}
    for joined, lines in JOINED.items():
        if parts := [times[line] for line in lines if line in times]:
            forward, inputs, weights = (sum(phase) for phase in zip(*parts, strict=True))
            times[joined] = (forward, inputs, weights)
    if "mlp_moelayer" in times:
        times["mlp_moelayer"] = _scaled(times["mlp_moelayer"], EXPERT_LINES)
    return times


def _scaled(spent: Sequence[float], share: int) -> tuple[float, float, float]:
    forward, inputs, weights = spent
    return forward / share, inputs / share, weights / share
