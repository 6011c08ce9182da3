"""``stepcast run WORKLOAD``: execute a workload for real over torch.distributed."""

import argparse
import os
from types import ModuleType

import msgspec

from stepcast.analyze.recorded import by_kind, mean_abs_error, step_parts
from stepcast.cli.capture import load_place, predict_program
from stepcast.cli.documents import read_document
from stepcast.cli.output import origin, print_notes, show_view, write_file, write_trace
from stepcast.forecast.options import Options
from stepcast.forecast.predict import compute_pricer
from stepcast.forecast.prediction import Prediction
from stepcast.forecast.simulate import simulate
from stepcast.ir.captured import Captured
from stepcast.ir.schedules import PiecePlacement
from stepcast.ir.timeline import NONE, SpanKind, Timeline, TimelineBuilder
from stepcast.ir.types import FactDict, replace
from stepcast.ir.work import Collective
from stepcast.ir.workload import Block, Workload
from stepcast.pytorch.load import load_torch
from stepcast.pytorch.run.execute import OpRecord, RunPlan, ScheduleTurn
from stepcast.pytorch.run.launch import medians, run_alone, run_as_rank, run_here
from stepcast.questions.runs import run_facts
from stepcast.questions.settle import settle
from stepcast.simulation.schedule import SlotAction
from stepcast.views.costs import run_view
from stepcast.views.text import visible

# Kinds of op that take less of the rank's time are too short to compare.
LEAST_SHARE = 0.005


def run(args: argparse.Namespace) -> int:
    torch = load_torch("run")
    prediction, asked = _predict(args)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    plan = _plan(prediction, args.steps)
    records = _execute(plan, args.rank, device, torch)
    if records is None:  # another rank prints
        return 0
    step = medians(records, args.steps)
    timeline = _timeline(step, prediction.workload, asked)
    ran = [(row.work, row.duration_s) for row in step]
    priced_s = 0.0
    if args.rank is not None:  # alone, it runs no collectives
        priced_s = sum(prediction.pricer.seconds(work) for work, _ in ran if isinstance(work, Collective))
        ran = [(work, took_s) for work, took_s in ran if not isinstance(work, Collective)]
    rows = by_kind(ran, prediction.pricer.seconds)  # type: ignore[arg-type]
    step_s, parts = step_parts(timeline)
    facts: FactDict = {
        **asked,
        **origin(args),
        "step_s": step_s,
        "breakdown_s": parts,
        "device": device,
        "ranks": sorted({row.rank for row in step}),
        "ops": len(step),
        "kinds": msgspec.to_builtins(rows),
        "mean_abs_error": mean_abs_error(rows, LEAST_SHARE),
        "priced_collectives_s": priced_s,
        "predicted_step_s": prediction.step_s,
        "run": dict(prediction.report.run),
        "warnings": [],
    }
    if args.trace:
        write_trace(timeline, args.trace)
    if args.output:
        write_file(args.output, msgspec.json.encode(facts))
    show_view(args, run_view(facts))
    for name in filter(None, (args.trace, args.output)):
        if not args.json:
            print(f"wrote {visible(name)}")
    return 0


def _predict(args: argparse.Namespace) -> tuple[Prediction, FactDict]:
    """Return the predicted step, whose workload is executed, and what was asked."""
    if (args.file is None) == (args.model is None):
        raise ValueError("no workload given: use a workload file, or --model with --cluster and --gpus")
    if args.model is not None:
        if missing := [f"--{name}" for name in ("cluster", "gpus") if getattr(args, name) is None]:
            raise ValueError(f"--model needs {' and '.join(missing)} too")
        settled = settle(args.question)
        print_notes(settled.notes)
        return settled.prediction, run_facts(settled)
    document = read_document([args.file], args)
    if isinstance(document, Captured):
        return predict_program(document, args.question)
    if not isinstance(document, Workload):
        raise ValueError(f"{args.file}: is not a workload; 'stepcast show' says what it is")
    question = args.question
    if question.cluster is None and question.gpu is None:
        question = question.change({"gpu": "h200"})
    cluster = load_place(question)
    prediction = simulate(document, cluster, Options(gpus=args.gpus), compute_pricer(document, cluster))
    return prediction, {"workload": args.file, "cluster": cluster.name}


def _plan(prediction: Prediction, steps: int) -> RunPlan:
    schedule, workload = prediction.step.schedule, prediction.workload
    if schedule.placement is not PiecePlacement.LOOP:
        raise ValueError(f"schedule {schedule.name} places its chunks both ways, which run cannot do yet")
    names = {SlotAction.FORWARD: "forward", SlotAction.BACKWARD: "backward", SlotAction.INPUT: "input-gradient",
             SlotAction.WEIGHT: "weight-gradient"}  # fmt: skip
    orders = tuple(
        tuple(ScheduleTurn(names[slot.kind], slot.micro_batch, slot.chunk) for slot in order)
        for order in schedule.orders
    )
    stages = []
    for stage in workload.stages:
        bodies = stage.numbered_bodies(workload.micro_batches).items()
        stages.append(replace(stage, varied=tuple((which, (Block(layers),)) for which, layers in bodies)))
    return RunPlan(tuple(stages), workload.layout, orders, workload.boundary_bytes or 4, steps)


def _execute(plan: RunPlan, rank: int | None, device: str, torch: ModuleType) -> list[OpRecord] | None:
    if rank is not None:
        if rank >= plan.layout.gpus:
            raise ValueError(f"--rank {rank} is outside the {plan.layout.gpus} ranks of the workload")
        return run_alone(plan, rank, device)
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        return run_as_rank(plan, device)
    capacity = torch.cuda.device_count() if device == "cuda" else (os.cpu_count() or 1) * 4
    if plan.layout.gpus > capacity:
        raise ValueError(
            f"the workload has {plan.layout.gpus} ranks and this machine can run {capacity}; use --rank R to "
            "run one of them alone, or start it with torchrun"
        )
    return run_here(plan, device)


def _timeline(step: list[OpRecord], workload: Workload, asked: FactDict) -> Timeline:
    builder = TimelineBuilder()
    for row in step:
        kind = SpanKind.COMPUTE if row.lane == "compute" else SpanKind.COMMUNICATION
        lane, batch = builder.lane(row.rank, row.lane), row.micro_batch if row.micro_batch >= 0 else NONE
        about = {"kind": kind, "work": row.work, "micro_batch": batch}
        builder.add(row.name, lane, row.start_s, row.duration_s, **about)  # type: ignore[arg-type]
    return builder.build(measured=True, source="run", layout=workload.layout, facts=asked)
