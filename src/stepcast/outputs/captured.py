"""Captured programs as JSON: each distinct work and layer once, the repeats by their numbers."""

from dataclasses import fields
from typing import Any

import msgspec

from stepcast.ir.captured import Captured, LayerPart
from stepcast.ir.work import Work
from stepcast.ir.workload import Layer, Op, Phase

FORMAT, VERSION = "stepcast-captured", 3
PLAIN_PART = 7  # numbers of a part that nothing splits


def write(captured: Captured) -> bytes:
    works: dict[Work, int] = {}
    layers: dict[Layer, int] = {}
    rows: list[dict[str, Any]] = []

    def op_row(op: Op) -> list[Any]:
        row = [op.name, works.setdefault(op.work, len(works))]
        if op.host_reads:
            return [*row, op.kernels, 1]
        return [*row, op.kernels] if op.kernels > 1 else row

    def number(layer: Layer) -> int:
        if layer not in layers:
            layers[layer] = len(layers)
            rows.append({"name": layer.name, **{str(phase): list(map(op_row, layer.ops(phase))) for phase in Phase}})
        return layers[layer]

    stage = captured.stage
    body = [[list(map(number, block.layers)), block.repeat] for block in stage.body]
    epilogue = list(map(number, stage.epilogue))
    memory = captured.memory
    found = {
        "format": FORMAT,
        "version": VERSION,
        "name": captured.name,
        "parameters": captured.parameters,
        "tokens": captured.tokens,
        "batch": captured.batch,
        "precision": str(captured.precision),
        "compiled": captured.compiled,
        "facts": dict(captured.facts),
        "warnings": list(captured.warnings),
        "memory": {each.name: getattr(memory, each.name) for each in fields(memory)},
        "works": [_work_row(work) for work in works],
        "layers": rows,
        "body": body,
        "epilogue": epilogue,
        "parts": [_part_row(part) for part in captured.parts],
        "ties": [[list(tie.parts), tie.size_bytes, tie.split_bytes] for tie in captured.ties],
    }
    return msgspec.json.encode(found) + b"\n"


def _part_row(part: LayerPart) -> list[Any]:
    row = [getattr(part, each.name) for each in fields(part)]
    return row if part.split_bytes or part.split else row[:PLAIN_PART]


def _work_row(work: Work) -> list[Any]:
    return [type(work).__name__.lower(), *(getattr(work, each.name) for each in fields(work))]
