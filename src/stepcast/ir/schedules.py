"""The pipeline schedules as data: what each needs, where its pieces of the model lie, what a stage holds.

A schedule is a row here and a function that writes its order (``simulation.schedules``); everything else that
is known of it follows from the row.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from stepcast.ir.types import dataclass


class ScheduleKind(StrEnum):
    """Order in which a pipeline stage runs its forwards and backwards."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_H2 = "zb-h2"
    ZB_V = "zb-v"
    V_HALF = "v-half"
    V_MIN = "v-min"
    DUALPIPE = "dualpipe"


class PiecePlacement(StrEnum):
    """The order of the stages' pieces along the model."""

    LOOP = "loop"
    """Piece c of stage s is number c * stages + s: every chunk runs from the first stage to the last."""
    V = "v"
    """Two chunks: down the stages with the first and back up with the second."""
    TWO_WAY = "two-way"
    """Two copies of the model: the first half of the micro-batches goes down through one, the second half up
    through the other."""


class Pairs(StrEnum):
    """The overlap of a forward with the backward of another micro-batch."""

    NO = "no"
    ASKED = "asked"  # where a strategy overlaps the exchanges of experts
    OWN = "own"  # always


class Pipeline(NamedTuple):
    """The sizes that decide how many micro-batches a stage holds."""

    stages: int
    chunks: int
    micro_batches: int
    ahead: int = 0  # forwards before the first backward beyond the schedule's own


Held = Callable[[Pipeline, int], tuple[int, ...]]
"""(pipeline, stage) -> the number of micro-batches that each piece of the stage holds at its peak."""


@dataclass(frozen=True, slots=True)
class ScheduleFacts:
    """The properties of one schedule, as its authors give them."""

    held: Held
    # Chunks of the model on a stage (vpp); most None: as many as asked for.
    fewest_chunks: int = 1
    most_chunks: int | None = 1
    placement: PiecePlacement = PiecePlacement.LOOP
    splits_backward: bool = False  # into input and weight gradients
    # Of the micro-batches held, those whose input gradient has not run yet: the others wait for their weight
    # gradient alone. None: all of them.
    before_input_gradient: Held | None = None
    # Stages may stop for their messages; in others, which run ahead of their receivers, they would for ever.
    stops: bool = False
    alone: bool = False  # orders the micro-batches of a single stage too
    pairs: Pairs = Pairs.NO
    stages_step: int = 1  # the number of stages is a multiple of this
    batches_step: int = 1  # so is that of micro-batches, ...
    fewest_batches: int = 0  # ... of which each stage needs as many
    whole_rounds: bool = False  # Megatron-LM wants a multiple of the stages; other numbers can run

    @property
    def copies(self) -> int:
        """Copies of the model on the GPUs of one pipeline."""
        return 2 if self.placement is PiecePlacement.TWO_WAY else 1

    def pieces(self, vpp: int) -> int:
        """Pieces of the model on a stage: what the schedule wants, or *vpp* where that is free."""
        return self.copies * (self.fewest_chunks if self.fewest_chunks == self.most_chunks else vpp)

    def pieces_of_stage(self, stage: int, stages: int, vpp: int) -> tuple[int, ...]:
        """Return the pieces on *stage*, by their number along the model."""
        if self.placement is PiecePlacement.V and vpp == 2:
            return (stage, 2 * stages - 1 - stage)
        if self.placement is PiecePlacement.TWO_WAY and stages > 1:
            return (stage, stages - 1 - stage)
        return tuple(range(stage, stages * vpp, stages))


def find_schedule(kind: ScheduleKind, stages: int) -> ScheduleFacts:
    """Return the facts of the schedule that *stages* run when *kind* is chosen: one stage has no pipeline to order."""
    facts = SCHEDULES[kind]
    return facts if stages > 1 or facts.alone else SCHEDULES[ScheduleKind.ONE_F_ONE_B]


def default_schedule(vpp: int) -> ScheduleKind:
    """Return the default schedule of a pipeline."""
    return ScheduleKind.INTERLEAVED if vpp > 1 else ScheduleKind.ONE_F_ONE_B


def describe_misfit(kind: ScheduleKind, stages: int, micro_batches: int) -> str:
    """Say why *kind* cannot run *micro_batches* on *stages*, and what it could; empty where it can."""
    facts = SCHEDULES[kind]
    if stages % facts.stages_step:
        valid = stages + facts.stages_step - stages % facts.stages_step
        return f"{kind} needs a multiple of {facts.stages_step} stages (pp), not {stages}: use {valid}"
    step, fewest = facts.batches_step, facts.fewest_batches * stages
    if micro_batches % step or micro_batches < fewest:
        unit = f"a multiple of {step} micro-batches" if step > 1 else "micro-batches"
        valid = max(fewest, micro_batches + -micro_batches % step)
        return f"{kind} needs {unit}, at least {facts.fewest_batches} x pp = {fewest}, not {micro_batches}: use {valid}"
    return ""


def _to_the_end_and_back(pipeline: Pipeline, stage: int) -> tuple[int, ...]:
    return (pipeline.stages - stage + pipeline.ahead,) * pipeline.chunks


def _in_rounds(pipeline: Pipeline, stage: int) -> tuple[int, ...]:
    """Run as many through a chunk as there are stages, before the next (Narayanan et al. 2021, section 2.3)."""
    stages, chunks = pipeline.stages, pipeline.chunks
    counts = [0] * chunks
    for slot in range(2 * (stages - stage - 1) + (chunks - 1) * stages + 1 + pipeline.ahead):
        counts[slot // stages % chunks] += 1
    return tuple(counts)


class VeeTimes(NamedTuple):
    """Times of a micro-batch on one stage of a V schedule, in units of a forward: of both chunks' forwards, input
    gradients and weight gradients. The next micro-batch follows VEE_PERIOD later.
    """

    forwards: tuple[int, int]
    inputs: tuple[int, int]
    weights: tuple[int, int]


VEE_PERIOD = 6
"""Units of a micro-batch on a stage: forward, input gradient and weight gradient of two chunks, taken as equal."""


def vee_times(stages: int, stage: int, step: int) -> VeeTimes:
    """Return the repeating pattern of V-Min (*step* 1) or V-Half (2), where no two units of a stage coincide.

    Micro-batches go down the stages by *step* units, up by one, and so do their gradients: they are held for 4 p or 6 p
    units, which is a third or half of what 1F1B holds (Qi et al., Pipeline Parallelism with Controllable Memory, 2024,
    section 4).
    """
    last = stages - 1
    turn = (step + 1) * last + 1
    for slack in range(VEE_PERIOD**3):
        up = turn + slack % VEE_PERIOD
        down = up + 1 + slack // VEE_PERIOD % VEE_PERIOD
        back = down + turn + slack // VEE_PERIOD**2
        times = [
            {(step * i) % VEE_PERIOD, (up - i) % VEE_PERIOD, (down + step * i) % VEE_PERIOD, (back - i) % VEE_PERIOD}
            for i in range(stages)
        ]
        if all(len(units) == 4 for units in times):
            break
    free = sorted(set(range(VEE_PERIOD)) - times[stage])
    inputs = (back - stage, down + step * stage)
    first = inputs[1] + min((unit - inputs[1]) % VEE_PERIOD for unit in free)
    second_unit = free[0] if first % VEE_PERIOD == free[1] else free[1]
    second = inputs[0] + (second_unit - inputs[0]) % VEE_PERIOD
    return VeeTimes((step * stage, up - stage), inputs, (second, first))


def _hold_vee(step: int) -> Held:
    def count_held(pipeline: Pipeline, stage: int) -> tuple[int, ...]:
        times = vee_times(pipeline.stages, stage, step)
        pairs = tuple(zip(times.forwards, times.weights, strict=True))
        moments = range(times.weights[0], times.weights[0] + VEE_PERIOD)
        live = (
            tuple((moment - start) // VEE_PERIOD - (moment - end) // VEE_PERIOD for start, end in pairs)
            for moment in moments
        )
        return tuple(min(pipeline.micro_batches, count) for count in max(live, key=sum))

    return count_held


def _from_both_ends(pipeline: Pipeline, stage: int) -> tuple[int, ...]:
    """Return pp + 1 in all (DeepSeek-V3, 2024, table 2)."""
    stages = pipeline.stages
    from_edge = min(stage, stages - 1 - stage)
    near, far = stages - from_edge, from_edge + 1
    return (near, far) if stage < stages // 2 else (far, near)


SCHEDULES: dict[ScheduleKind, ScheduleFacts] = {
    ScheduleKind.GPIPE: ScheduleFacts(
        lambda pipeline, _: (pipeline.micro_batches,) * pipeline.chunks, most_chunks=None, stops=True, alone=True
    ),
    ScheduleKind.ONE_F_ONE_B: ScheduleFacts(_to_the_end_and_back, stops=True, alone=True),
    ScheduleKind.INTERLEAVED: ScheduleFacts(
        _in_rounds, 2, None, pairs=Pairs.ASKED, fewest_batches=1, whole_rounds=True
    ),
    # Forwards ahead and weight gradients held back make up for each other (Qi et al. 2023, table 2).
    ScheduleKind.ZB_H1: ScheduleFacts(
        lambda pipeline, _: (pipeline.stages,),
        splits_backward=True,
        before_input_gradient=_to_the_end_and_back,
        stops=True,
    ),
    # Twice to the end and back before the first input gradient (figure 3).
    ScheduleKind.ZB_H2: ScheduleFacts(
        lambda pipeline, _: (2 * pipeline.stages - 1,),
        splits_backward=True,
        before_input_gradient=lambda pipeline, stage: (2 * (pipeline.stages - stage) - 1,),
    ),
    # As much as the first stage of 1F1B, spread over both chunks.
    ScheduleKind.ZB_V: ScheduleFacts(
        lambda pipeline, stage: (2 * pipeline.stages - 1 - stage, stage + 1),
        *(2, 2, PiecePlacement.V),
        splits_backward=True,
    ),
    ScheduleKind.V_HALF: ScheduleFacts(_hold_vee(2), 2, 2, PiecePlacement.V, splits_backward=True),
    ScheduleKind.V_MIN: ScheduleFacts(_hold_vee(1), 2, 2, PiecePlacement.V, splits_backward=True),
    ScheduleKind.DUALPIPE: ScheduleFacts(
        _from_both_ends,
        placement=PiecePlacement.TWO_WAY,
        splits_backward=True,
        pairs=Pairs.OWN,
        stages_step=2,
        batches_step=2,
        fewest_batches=2,
    ),
}
