"""A program written out, as tasks and what waits for what."""

import numpy as np

from stepcast.ir.flows import Ints
from stepcast.simulation.arrays import Program

Pairs = tuple[Ints, Ints]
"""The tasks that others wait for, and those that wait for them."""


def waits_of(program: Program) -> Pairs:
    """Of *program*, whose every piece is a call of its own.

    A node of a shape that is a lane means the last task there of the calls before; tasks are numbered in the
    order of calls, so that it is the highest of them so far.
    """
    shapes, shape_of = program.shapes
    shape = shape_of[program.segment]
    lanes, tasks = len(program.lanes), program.task_start
    standing = _standing(program, shape)
    output = np.full((len(shapes), max([1, *(len(each.outputs) for each in shapes)])), -1, np.int64)
    for row, each in zip(output, shapes, strict=True):
        row[: len(each.outputs)] = each.outputs
    sources, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for number, each in enumerate(shapes):
        calls = np.flatnonzero(shape == number)
        if not len(calls) or not each.ops:
            continue
        begins = tasks[calls]
        node = np.full((each.first_op + each.ops, len(calls)), -1, np.int64)
        for lane in {int(node) for node in each.before if node < lanes}:
            node[lane] = standing[lane][calls]
        for port in range(each.inputs):
            call = program.source_call[calls, port]
            op = output[shape[call], np.maximum(program.source_port[calls, port], 0)]
            node[lanes + port] = np.where(call >= 0, tasks[call] + op, -1)
        node[each.first_op :] = begins + np.arange(each.ops)[:, None]
        op_of = np.repeat(np.arange(each.ops), np.diff(each.before_start))
        waited, waits = node[each.before].ravel(), node[each.first_op + op_of].ravel()
        known = waited >= 0
        sources.append(waited[known])
        targets.append(waits[known])
    return np.concatenate(sources), np.concatenate(targets)


def _standing(program: Program, shape: Ints) -> dict[int, Ints]:
    """Of each lane and register that is waited for: for each call the last task in it before, or -1."""
    shapes, _ = program.shapes
    lanes = len(program.lanes)
    read = sorted({int(node) for each in shapes for node in each.before if node < lanes})
    first_of_rank = program.task_start[program.rank_start[:-1]][program.rank]
    found = {}
    for lane in read:
        last = np.array([each.last[lane] for each in shapes], np.int64)[shape]
        left = np.where(last >= 0, program.task_start[:-1] + last, -1)
        before = np.concatenate([[-1], np.maximum.accumulate(left)[:-1]]) if len(left) else left
        found[lane] = np.where(before >= first_of_rank, before, -1)
    return found


def followers(tasks: int, pairs: Pairs) -> Pairs:
    """For each of *tasks* where those begin that wait for it, and all of them."""
    sources, targets = pairs
    order = np.argsort(sources, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=tasks))])
    return first.astype(np.int64), targets[order]
