"""Traces of several ranks as one Workload: ranks of one stage must agree, stages may differ."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stepcast.inputs.errors import FormatError
from stepcast.ir.work import Recorded, Work
from stepcast.ir.workload import Layer, Stage, Workload

# Ranks that take longer than others by less than this share are taken for noise.
NOISE = 0.01


def joined_workload(found: Mapping[str, Workload], ranks: Sequence[int | None]) -> Workload:
    """The traces of *ranks*, by path; of each stage the rank that computes longest stands for all."""
    paths = list(found)
    if len(paths) == 1:
        return found[paths[0]]
    first = found[paths[0]]
    layout = first.layout
    per_stage = layout.gpus // layout.pp
    chosen: dict[int, str] = {}
    shortest: dict[int, float] = {}
    spent: dict[str, float] = {path: _spent_s(workload) for path, workload in found.items()}
    structures: dict[int, list[tuple[str, Work | None]]] = {}
    for path, rank in zip(paths, ranks, strict=True):
        stage = (rank or 0) // per_stage
        best, structure = chosen.setdefault(stage, path), _structure(found[path])
        if structures.setdefault(stage, structure) != structure:
            raise FormatError(
                f"runs other ops than {best}, and neither is a stage of its own; expected ranks that do the "
                "same, or the stages of a pipeline that send to each other",
                path,
            )
        shortest[stage] = min(shortest.get(stage, spent[path]), spent[path])
        if spent[path] > spent[best]:
            chosen[stage] = path
    if missing := sorted(set(range(layout.pp)) - chosen.keys()):
        raise FormatError(
            f"no file is of stage {missing[0]} of {layout.pp}; name all files of the run, or their folder",
            paths[0],
        )
    warnings = dict.fromkeys(text for workload in found.values() for text in workload.warnings)
    if len(paths) < layout.gpus:
        warnings[
            f"{len(paths)} of {layout.gpus} ranks' traces were given: the others are taken to do the same"
        ] = None
    for stage, path in sorted(chosen.items()):
        if shortest[stage] < (1 - NOISE) * spent[path]:
            warnings[
                f"ranks of one stage compute for different times: {path}, the longest, stands for all"
            ] = None
    if layout.pp > 1:
        warnings["stages wait for the time of a message, not for its sender: the step may take longer"] = None
    return replace(
        first,
        stages=_shared([found[chosen[stage]].stages[0] for stage in range(layout.pp)]),
        name=first.name.rsplit(".", 1)[0],
        warnings=tuple(warnings),
    )


def _layers(workload: Workload) -> tuple[Layer, ...]:
    stage = workload.stages[0]
    return (*stage.prologue, *stage.body_layers())


def _structure(workload: Workload) -> list[tuple[str, Work | None]]:
    """What a rank runs, whatever time its computation takes."""
    return [
        (layer.name, None if isinstance(op.work, Recorded) else op.work)
        for layer in _layers(workload)
        for op in layer.forward
    ]


def _spent_s(workload: Workload) -> float:
    works = (op.work for layer in _layers(workload) for op in layer.forward)
    return sum(work.duration_s for work in works if isinstance(work, Recorded))


def _shared(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Equal stages as one object; one alone where all are equal."""
    known: dict[Stage, Stage] = {}
    shared = tuple(known.setdefault(stage, stage) for stage in stages)
    return shared[:1] if len(known) == 1 else shared
