"""``stepcast capture CONFIG|module:function -o FILE``: a PyTorch training step, without a GPU; predictions of captured
programs, for the verbs that make them; and ``stepcast run WORKLOAD``: execute a workload for real over
torch.distributed.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from types import ModuleType

import msgspec

from stepcast.analyze.logs import by_kind, mean_abs_error, step_parts
from stepcast.cli import output
from stepcast.cli.documents import read_document
from stepcast.cli.output import origin, print_notes, print_warnings, show_view, terminal_width, write_file, write_trace
from stepcast.forecast.captured import CapturedSharding, Spread, add_gaps, predict_captured
from stepcast.forecast.options import Engine, Options
from stepcast.forecast.predict import compute_pricer
from stepcast.forecast.prediction import Prediction, roofline
from stepcast.forecast.simulate import simulate
from stepcast.forecast.splitting import CutError, SplitError
from stepcast.generate.aicb import record_times
from stepcast.hardware import Cluster, Place, load_cluster
from stepcast.inputs.table import read_as_one
from stepcast.ir.captured import Captured
from stepcast.ir.schedules import PiecePlacement
from stepcast.ir.timeline import NONE, SpanKind, Timeline, TimelineBuilder
from stepcast.ir.types import FactDict, pick, replace, require
from stepcast.ir.work import Collective
from stepcast.ir.workload import Block, Workload
from stepcast.outputs.plain import write_captured
from stepcast.pytorch.load import load_torch
from stepcast.pytorch.run.execute import OpRecord, RunPlan, ScheduleTurn, medians, run_alone, run_as_rank, run_here
from stepcast.questions.choices import option_of, refuse_options
from stepcast.questions.question import PredictQuestion
from stepcast.questions.runs import run_facts
from stepcast.questions.settle import add_background, check_gpu, count_stated_gpus, load_calibration, settle
from stepcast.simulation.schedule import SlotAction
from stepcast.units import MIB
from stepcast.views.costs import run_view
from stepcast.views.documents import captured_search_view, captured_view
from stepcast.views.step import step_view
from stepcast.views.terminal import render_text
from stepcast.views.text import visible

SETTINGS = "batch seq dtype autocast checkpoint attention experts optimizer no_fused_optimizer compiled tf32"
PROGRAM_OPTIONS = frozenset(SETTINGS.split())
PREDICTING = ("gpu", "cluster", "gpus", "tp", "pp", "global_batch", "sharding", "zero_gradients", "calibration")
# Options of predict that apply to a captured program; the file has its computation and its software.
ACTING = frozenset((
    *("captured", "cluster", "gpu", "set", "place", "gpus", "nodes", "dp", "tp", "cp", "ep", "pp"),
    *("global_batch", "schedule", "sharding", "bucket_mb", "zero_gradients", "calibration", "engine"),
    *("background", "explain_memory", "require_fit", "jitter", "runs", "seed", "trace", "html", "gantt"),
    *("critical_path", "json"),
))  # fmt: skip
SPREADING = frozenset(("cluster", "gpu", "set", "gpus", "nodes", "global_batch", "calibration"))
SEARCHED = SPREADING | {"captured", "top", "html", "json"}
# Schedules with one model chunk per stage.
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2")
SPLITS = {
    "cp": "context parallelism needs attention that was written for it",
    "ep": "expert parallelism needs experts that were written for it",
}
# Kinds of op that take less of the rank's time are too short to compare.
LEAST_SHARE = 0.005


def run_capture(args: argparse.Namespace) -> int:
    if not args.predict:
        idle = (name for name in (*PREDICTING, "html") if name in args.given)
        refuse_options(idle, "has no effect without --predict")
    load_torch("capture")
    from stepcast.pytorch.capture.program import CaptureOptions, capture, capture_command, is_command

    is_script = is_command(args.program, args.words)
    shapes = args.batch if isinstance(args.batch, str) else ""
    if shapes and not is_script:
        raise ValueError(f"--batch {visible(shapes)}: shapes are those of a script's batches; give a number")
    stated = {name: getattr(args, name) for name in (*PROGRAM_OPTIONS, "given") if name != "no_fused_optimizer"}
    options = CaptureOptions(**{**stated, "batch": 1 if shapes else args.batch}, fused=not args.no_fused_optimizer)
    question = PredictQuestion(**{name: getattr(args, name) for name in PREDICTING if name in args.given})
    if args.tf32 and not args.autocast and args.dtype != "fp32":
        raise ValueError("--tf32 has no effect: only fp32 matmuls run as TF32; use --dtype fp32")
    if is_script:
        decided = sorted((args.given & PROGRAM_OPTIONS) - ({"batch"} if shapes else set()))
        remedy = "leave it out"
        if decided[:1] == ["batch"]:
            remedy += ", or describe what its loaders yield, such as --batch 64x1024:int64"
        refuse_options(decided, f"has no effect on a script: the script decides it; {remedy}")
        shown = load_place(question).gpu if question.gpu or question.cluster else None  # on which it is predicted
        captured = capture_command([args.program, *args.words], args.gpus or 1, shown, shapes)
    else:
        if args.words:
            raise ValueError(f"{visible(args.program)} {visible(args.words[0])}: one program at a time; a command"
                             " begins with python, torchrun, accelerate, deepspeed or a .py file")  # fmt: skip
        captured = capture(args.program, options)
    answer = captured_facts(captured)
    if args.output:
        output.write_file(args.output, write_captured(captured))
        answer["output"] = args.output
    if args.predict:
        prediction, asked = predict_program(captured, question)
        answer["prediction"] = {**asked, **prediction.report.facts()}
        if args.html:
            facts = {**answer["prediction"], **origin(args)}
            output.write_view(args, step_view(facts, prediction.shown_timeline, roofline(prediction)))
    if args.json:
        output.print_json(answer)
        return 0
    print(render_text(captured_view(answer), terminal_width()))
    if args.predict:
        print("\n" + render_text(step_view(answer["prediction"]), terminal_width()))
        print_warnings(answer["prediction"]["warnings"])
    if args.output:
        print(f"\nwrote {visible(args.output)}: 'stepcast predict --captured' predicts it on any GPU")
    if not args.predict:
        print_warnings(captured.warnings)
    return 0


class BatchError(ValueError):
    """A global batch that the replicas of a layout cannot share."""


def read_captured(path: str) -> Captured:
    _, document = read_as_one([output.open_source(path)])
    if not isinstance(document, Captured):
        raise ValueError(f"{path}: is not a captured program; 'stepcast capture ... -o FILE' writes one")
    return document


def load_place(question: PredictQuestion) -> Cluster:
    """Load the cluster of --cluster, or one of the GPUs of --gpu."""
    if (question.cluster is None) == (question.gpu is None):
        raise ValueError("no cluster given: use either --gpu NAME or --cluster NAME")
    return load_cluster(str(question.cluster or f"generic:gpu={question.gpu}"), question.set)


def predict_program(
    captured: Captured, question: PredictQuestion, cluster: Cluster | None = None
) -> tuple[Prediction, FactDict]:
    """Return the prediction that *question* asks for, and what was asked; *cluster* saves loading it again."""
    for name, why in SPLITS.items():
        require(getattr(question, name) <= 1, f"--{name}: {why}; --gpus, --tp, --pp and --sharding fsdp are possible")
    cluster = cluster or load_place(question)
    spread = _read_spread(captured, question, cluster)
    calibration = None
    if question.calibration is not None:
        calibration = load_calibration(str(question.calibration))
        check_gpu(calibration, str(question.calibration), cluster.gpu.name)
    if "place" in question.given and cluster.topology.scale_up_nodes == 1:
        raise ValueError("--place has no effect: no rack of this cluster is one NVLink domain of several nodes")
    options = Options(place=Place(question.place), engine=Engine(question.engine))
    options = add_background(options, question, cluster, spread.layout.gpus)
    prediction = predict_captured(captured, cluster, spread, calibration, options)
    asked = {**pick(captured, "model=name parameters"), "cluster": cluster.name, "framework": "captured"}
    asked |= pick(cluster, "gpu=gpu.name gpus_per_node=node.gpus")
    return prediction, {**asked, "strategy": {**spread.layout.facts(), "sharding": str(spread.sharding)}}


def run_captured_search(args: argparse.Namespace) -> int:
    """Predict a captured program for every way to use the GPUs, and show the fastest that fit; return the status."""
    why = "tensor and pipeline parallelism and sharding are searched, the captured program fixes the rest; leave it out"
    refuse_options(sorted(args.given - SEARCHED), f"has no effect with --captured: {why}")
    captured, asked = read_captured(args.captured), args.question
    chosen = pick(asked, " ".join(args.given & SPREADING))
    for name, value in chosen.items():
        if name != "set" and isinstance(value, tuple):
            require(len(value) <= 1, f"{option_of(name)}: one value at a time with --captured")
            chosen[name] = value[0]
    rows = list(search_layouts(captured, chosen))
    best = sorted(rows, key=lambda row: (not row["fits"], row["step_s"]))
    facts = {"kind": "captured search", "model": captured.name, "gpus": best[0]["gpus"], "candidates": len(rows)}
    facts |= {"fitting": sum(bool(row["fits"]) for row in rows), "rows": best[: asked.top], **origin(args)}
    output.show_view(args, captured_search_view(facts))
    return 0 if best[0]["fits"] else 1


def search_layouts(captured: Captured, chosen: FactDict) -> Iterator[FactDict]:
    """Yield step time and memory of the program for each tp, pp and sharding that its GPUs, layers and batch allow."""
    probe = PredictQuestion(**{**chosen, "global_batch": None, "tp": 1, "pp": 1})
    cluster = load_place(probe)
    spread = _read_spread(captured, probe, cluster)
    gpus, batch = spread.layout.gpus, captured.batch * spread.micro_batches * spread.dp
    chosen = {"global_batch": batch, **chosen}  # layouts are compared at one batch: that of data parallelism alone
    degrees = [degree for degree in range(1, gpus + 1) if gpus % degree == 0]
    answered = False
    refusal: ValueError | None = None
    for tp, pp, sharding in product(degrees, degrees, CapturedSharding):
        if tp < spread.layout.tp or gpus % (tp * pp) or (sharding is CapturedSharding.FSDP and tp * pp == gpus):
            continue  # tensor parallelism of the script itself stays
        words = {"tp": tp, "pp": pp, "sharding": str(sharding)}
        try:
            prediction, _ = predict_program(captured, PredictQuestion(**{**chosen, **words}), cluster)
        except (BatchError, CutError, SplitError) as error:
            refusal = refusal or error
            continue
        memory = prediction.report.memory_bytes or {}
        yield {
            "gpus": gpus, "tp": tp, "pp": pp, "dp": gpus // (tp * pp), "sharding": str(sharding),
            "step_s": prediction.step_s, "memory_bytes": memory["total"], "fits": memory["fits"],
        }  # fmt: skip
        answered = True
    if not answered and refusal:
        raise refusal


def _read_spread(captured: Captured, question: PredictQuestion, cluster: Cluster) -> Spread:
    """Return the distribution of the program over the GPUs of *cluster*."""
    own = dict(captured.facts)  # a training script distributes itself, unless options say otherwise
    tp, pp = question.tp if question.tp > 1 else int(own.get("tp", 1)), question.pp
    own_gpus = 0 if question.nodes or question.dp else int(own.get("gpus", 0))
    gpus = count_stated_gpus(question, cluster, tp * pp, "tp x pp", own_gpus) or 1
    require(gpus % (pp * tp) == 0, f"{gpus} GPUs are not a multiple of tp x pp = {tp * pp}")
    dp, batch = gpus // (pp * tp), question.global_batch
    accumulated = captured.batch * dp * int(own.get("accumulation", 1))
    batches, rest = divmod(batch or accumulated, captured.batch * dp)
    if rest or not batches:
        raise BatchError(
            f"--global-batch {batch}: the program was captured with a batch of {captured.batch} and runs on "
            f"{dp} replicas; use a multiple of {captured.batch * dp}"
        )
    sharding = question.sharding or (own.get("sharding") if dp > 1 else None) or "none"
    bucket_mb, schedule, bucket_bytes = question.bucket_mb, question.schedule, None
    if isinstance(bucket_mb, str):
        raise ValueError("--bucket-mb auto depends on the hidden size of a model; give a number of MB")
    if bucket_mb is not None:
        bucket_bytes = round(bucket_mb * 1e6)
    elif "bucket_mb" in own and dp > 1 and sharding == CapturedSharding.NONE:
        bucket_bytes = int(float(own["bucket_mb"]) * MIB)  # as DDP reads it
    require(sharding in list(CapturedSharding), f"--sharding {sharding}: choose none or fsdp for a captured program")
    if bucket_mb is not None and (dp == 1 or sharding == CapturedSharding.FSDP):
        raise ValueError(
            "--bucket-mb has no effect: only DDP reduces gradients in buckets; use more GPUs and no --sharding"
        )
    require(
        schedule is None or schedule in SCHEDULES,
        f"--schedule {schedule}: a captured program has one model chunk per stage; choose from {', '.join(SCHEDULES)}",
    )
    idle, every = question.zero_gradients, "gradients summed" in own and pp == 1
    return Spread(dp, pp, batches, CapturedSharding(sharding), schedule, tp, idle, bucket_bytes, every)


def captured_facts(captured: Captured) -> FactDict:
    """Return the facts of a captured program in the words of the JSON contract."""
    body = captured.stage.body
    return {
        "kind": "captured",
        **pick(captured, "name parameters"),
        "flops": captured.flops(),
        "matmul_flops": captured.flops(attention=False),
        "peak_memory_bytes": captured.memory.peak,
        "memory_bytes": {**asdict(captured.memory), "peak": captured.memory.peak},
        **pick(captured, "ops tokens batch"),
        "precision": str(captured.precision),
        "compiled": captured.compiled,
        "facts": dict(captured.facts),
        "body": [{"repeat": block.repeat, "layers": [layer.name for layer in block.layers]} for block in body],
    }


def build_workload(captured: Captured, args: argparse.Namespace) -> Workload:
    """Return a workload with the times of the kernels on the GPU of *args*, for formats that have times."""
    require(args.gpu, f"{args.to} has times, and a captured program has none: use --gpu NAME as well")
    price = add_gaps(compute_pricer(captured.workload, load_cluster(f"generic:gpu={args.gpu}")))
    return record_times(captured.workload, lambda work: price(work).seconds)  # type: ignore[arg-type]


def run_run(args: argparse.Namespace) -> int:
    torch = load_torch("run")
    prediction, asked = _predict_workload(args)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    records = _execute(_plan_run(prediction, args.steps), args.rank, device, torch)
    if records is None:  # another rank prints
        return 0
    step = medians(records, args.steps)
    timeline = _measured_timeline(step, prediction.workload, asked)
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


def _predict_workload(args: argparse.Namespace) -> tuple[Prediction, FactDict]:
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
    require(isinstance(document, Workload), f"{args.file}: is not a workload; 'stepcast show' says what it is")
    question = args.question
    if question.cluster is None and question.gpu is None:
        question = question.change({"gpu": "h200"})
    cluster = load_place(question)
    prediction = simulate(document, cluster, Options(gpus=args.gpus), compute_pricer(document, cluster))
    return prediction, {"workload": args.file, "cluster": cluster.name}


def _plan_run(prediction: Prediction, steps: int) -> RunPlan:
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
        require(rank < plan.layout.gpus, f"--rank {rank} is outside the {plan.layout.gpus} ranks of the workload")
        return run_alone(plan, rank, device)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA GPU here; use --device cpu")
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        return run_as_rank(plan, device)
    capacity = torch.cuda.device_count() if device == "cuda" else (os.cpu_count() or 1) * 4
    if plan.layout.gpus > capacity:
        raise ValueError(
            f"the workload has {plan.layout.gpus} ranks and this machine can run {capacity}; use --rank R to "
            "run one of them alone, or start it with torchrun"
        )
    return run_here(plan, device)


def _measured_timeline(step: list[OpRecord], workload: Workload, asked: FactDict) -> Timeline:
    builder = TimelineBuilder()
    for row in step:
        kind = SpanKind.COMPUTE if row.lane == "compute" else SpanKind.COMMUNICATION
        lane, batch = builder.lane(row.rank, row.lane), row.micro_batch if row.micro_batch >= 0 else NONE
        about = {"kind": kind, "work": row.work, "micro_batch": batch}
        builder.add(row.name, lane, row.start_s, row.duration_s, **about)  # type: ignore[arg-type]
    return builder.build(measured=True, source="run", layout=workload.layout, facts=asked)
