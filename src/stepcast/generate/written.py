"""Generated workloads for other simulators: shapes become seconds, because their files hold times."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from stepcast.generate.aicb import EXPERT_LINES, Times
from stepcast.ir.work import Collective, Recorded, Transfer, Work
from stepcast.ir.workload import Op, Phase, Role, Workload, with_ops

Seconds = Callable[[Work], float]

R = Role
# The lines of AICB and the generated layers whose computation belongs to them.
LINES: dict[str, tuple[Role, ...]] = {
    "embedding_layer": (R.EMBEDDING,),
    "attention_column": (*(R.ATTENTION_NORM, R.QKV, R.LATENT_DOWN, R.LATENT_UP, R.CORE, R.ATTENTION_POST_NORM),),
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
        if each.role not in LINE_OF:
            continue
        line = LINE_OF[each.role]
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
