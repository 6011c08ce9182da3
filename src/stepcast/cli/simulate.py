"""``stepcast simulate FILE --cluster C``, and ``stepcast network``: link utilisation and contention during a step."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stepcast.cli import output
from stepcast.cli.documents import apply_edits, open_sources
from stepcast.cli.options import check_applicable, cluster_question, has_racks
from stepcast.cli.output import origin, print_notes, show_prediction, show_view
from stepcast.cost.collectives.choose import Algorithm
from stepcast.cost.simai import GROUPS as SIMAI_GROUPS
from stepcast.cost.simai import SimaiSystem, simai_price
from stepcast.forecast.options import Engine, Options
from stepcast.forecast.prediction import Prediction
from stepcast.forecast.simulate import simulate
from stepcast.hardware import Place, load_cluster
from stepcast.inputs.source import Source, prefix_errors
from stepcast.inputs.table import misused, read, read_as_one
from stepcast.ir.layout import Group
from stepcast.ir.limits import SCHEDULE_FILE
from stepcast.ir.step import PARTS
from stepcast.ir.types import FactDict, find_doubts, pick, require
from stepcast.ir.work import Collective, CollectiveKind, Direction, Transfer
from stepcast.ir.workload import Workload
from stepcast.questions.choices import check_multiple, refuse_options
from stepcast.questions.question import SCHEDULES
from stepcast.questions.runs import is_workload, run_facts
from stepcast.questions.settle import add_background, settle
from stepcast.simulation.chunks import Body
from stepcast.simulation.messages import Send
from stepcast.simulation.schedule import Schedule
from stepcast.simulation.schedule_file import parse_schedule
from stepcast.simulation.step import Conditions
from stepcast.units import US, format_bytes, format_percent
from stepcast.views.step import network_view
from stepcast.views.text import table

MOST_TIMES = 1e6  # a slower part than that has stopped
SIMAI_PARTS = ("dp", "dp_ep", "tp", "ep", "pp", "bubble", "compute", "total")
# Options that a workload file leaves open.
WITH_WORKLOAD = {"run", "model", "cluster", "gpu", "set", "place", "gpus", "top", "html", "json", "background"}


def run_simulate(args: argparse.Namespace) -> int:
    entry, workload = read_as_one(open_sources(args.files, args.format), args.format)
    if not isinstance(workload, Workload):
        raise misused(entry, args.files[0], "simulate needs a workload")
    workload = apply_edits(workload, args)
    if args.gpus is not None and args.engine != "simai":
        check_multiple(args.gpus, workload.layout.tp * workload.layout.cp * workload.layout.pp)
    _check(workload, args)
    if args.engine == "simai":
        return _run_simai(workload, args)
    if args.cluster is None:
        raise ValueError("no cluster given: use --cluster NAME (see 'stepcast list clusters') or a TOML file")

    options = _options(args)
    slow_ranks = {_count(name, "--slow-rank"): x for name, x in _factors(args.slow_rank, "--slow-rank")}
    cluster = load_cluster(args.cluster, args.set)
    options = add_background(options, cluster_question(args), cluster, args.gpus or workload.layout.gpus)
    prediction = simulate(workload, cluster, options, slow_ranks=slow_ranks)
    show_prediction(prediction, args, asked_facts(args.files, prediction))
    return 0


def asked_facts(files: Sequence[str], prediction: Prediction) -> FactDict:
    """Return what was asked of a workload in *files*, in the words of the JSON contract."""
    known = pick(prediction.cluster, "cluster=name gpu=gpu.name gpus_per_node=node.gpus")
    return {"workload": ", ".join(files), **known, "strategy": prediction.workload.layout.facts()}


def _check(workload: Workload, args: argparse.Namespace) -> None:
    """Check that each option has an effect on this workload."""
    exchanges: set[Collective | Transfer] = set()
    if args.given & {"slow_group", "overlap", "all_reduce"}:  # a large workload takes a while to search
        layout = workload.layout
        if args.gpus is not None:
            layout = replace(layout, dp=max(1, args.gpus // (layout.tp * layout.cp * layout.pp)))
        messages: set[Collective | Transfer] = {Transfer(Direction.SEND, 0, Group.PP)}
        for stage in workload.stages:
            for layer, _ in stage.counted_layers(workload.micro_batches):
                messages |= {op.work for op in layer.all_ops if isinstance(op.work, Collective | Transfer)}
        exchanges = {work for work in messages if layout.size(work.group) > 1}
    groups = {work.group for work in exchanges}
    reductions = [work for work in exchanges if isinstance(work, Collective) and work.kind is CollectiveKind.ALL_REDUCE]
    named = {entry.partition("=")[0].replace("dp_ep", Group.EXPERT_DP) for entry in args.slow_group + args.overlap}
    check_applicable(
        args,
        groups=groups,
        named_groups=named & set(Group),
        group_list=", ".join(sorted(groups)) or "none",
        all_reduces=bool(reductions),
        stages=workload.layout.pp,
        racks=has_racks(args),
    )


def _options(args: argparse.Namespace) -> Options:
    stages = {_count(name, "--slow-stage"): factor for name, factor in _factors(args.slow_stage, "--slow-stage")}
    slow_groups = _factors(args.slow_group, "--slow-group")
    for name, _ in slow_groups:
        require(name in set(Group), f"--slow-group {name!r}: expected one of {', '.join(Group)}")
    schedule: Schedule | str | None = args.schedule
    if isinstance(schedule, str) and schedule not in SCHEDULES:
        if not Path(schedule).exists():
            raise ValueError(f"--schedule {schedule}: no such schedule or file; known: {', '.join(SCHEDULES)}")
        text = Source(schedule).text(SCHEDULE_FILE)
        with prefix_errors(schedule):
            schedule = parse_schedule(text, Path(schedule).stem)
    return Options(
        **pick(args, "gpus ideal_communication"),
        schedule=schedule,
        body=Body(args.body),
        send=Send(args.messages) if args.messages else None,
        algorithms={CollectiveKind.ALL_REDUCE: Algorithm(args.all_reduce)} if args.all_reduce else {},
        conditions=Conditions(stages, {Group(name): factor for name, factor in slow_groups}),
        place=Place(args.place),
        engine=Engine(args.engine),
    )


def _factors(entries: list[str], option: str) -> list[tuple[str, float]]:
    """Read ``3=1.2`` or ``tp=2x``, a name and a factor."""
    factors = []
    for entry in entries:
        name, equals, factor = entry.partition("=")
        try:
            value = float(factor.removesuffix("x"))
        except ValueError:
            value = -1.0
        require(
            equals == "=" and 0 < value <= MOST_TIMES,
            f"{option} {entry!r}: expected NAME=FACTOR with a factor above zero (and below a million), such as 3=1.2",
        )
        factors.append((name, value))
    return factors


def _count(name: str, option: str) -> int:
    require(name.isascii() and name.isdigit(), f"{option} {name!r}: expected a number, such as 3=1.2")
    return int(name)


def _run_simai(workload: Workload, args: argparse.Namespace) -> int:
    """Print the step by the cost model of SimAI-analytical."""
    ratios: dict[str, float] = {}
    for entry in args.overlap:
        name, _, ratio = entry.partition("=")
        try:
            ratios[name] = float(ratio)
        except ValueError:
            raise ValueError(f"--overlap {entry!r}: expected GROUP=RATIO, such as tp=0.5") from None
        require(name in SIMAI_GROUPS, f"--overlap {entry!r}: expected one of {', '.join(SIMAI_GROUPS)}")
    system = SimaiSystem(args.nvlink_gb_per_s, args.nic_gb_per_s, args.gpus_per_server, args.nics_per_server)
    price = simai_price(workload, args.gpus, system, ratios)
    warnings = [*workload.warnings, *price.warnings]
    parts_s = {part: getattr(price, f"{part}_s") for part in SIMAI_PARTS}
    breakdown_s = {part: getattr(price, f"{part}_s", 0.0) for part in PARTS}
    breakdown_s["dp"] += price.dp_ep_s
    facts = {"engine": "simai", "step_s": price.total_s, "breakdown_s": breakdown_s, "simai_s": parts_s}
    facts["warnings"] = warnings
    warnings += find_doubts(facts)
    if args.json:
        output.print_json(facts)
        return 0
    used = [(part.replace("_", "-"), seconds) for part, seconds in parts_s.items() if seconds]
    rows = [(part, f"{seconds / US:,.0f}", format_percent(seconds / price.total_s)) for part, seconds in used]
    print(table(("SimAI's part", "us", "share"), rows, output.terminal_width()))
    output.print_warnings(warnings)
    return 0


def run_network(args: argparse.Namespace) -> int:
    if args.model is not None and is_workload(args.model):
        prediction, fast_s, asked = _simulate_workload(args)
    else:
        run = settle(args.question.change({"engine": "fluid"}))
        print_notes(run.notes)
        fast_s = replace(run, options=replace(run.options, engine=Engine.FAST)).prediction.simulated_s
        prediction, asked = run.prediction.noting(run.assumptions), run_facts(run)
    shared = prediction.fluid
    assert shared is not None, "the fluid engine was asked for"
    topology = prediction.cluster.topology
    pairs = f"{topology.queue_pairs} queue pair{'' if topology.queue_pairs == 1 else 's'} per connection"
    routing = {"ecmp": f"ECMP by hash, {pairs}", "adaptive": f"adaptive routing, {pairs}"}
    routing["spray"] = "packets sprayed evenly over all paths"
    report, memory, warnings = prediction.report, prediction.memory_bytes, list(prediction.report.warnings)
    if not prediction.fits:
        total, capacity = format_bytes(memory["total"]), format_bytes(memory["capacity"])
        warnings.insert(0, f"the step does not fit: {total} of {capacity}")
    facts: FactDict = {
        **asked,
        **origin(args),
        "gpus": prediction.workload.layout.gpus,
        "engine": "fluid",
        "alone_step_s": prediction.run.makespan_s,
        "fast_step_s": fast_s,
        "routing": routing[topology.routing],
        **shared.observed.facts(args.top),
        "assumptions": list(report.assumptions),
        "warnings": warnings,
    }
    show_view(args, network_view(facts))
    return 0


def _simulate_workload(args: argparse.Namespace) -> tuple[Prediction, float, FactDict]:
    why = "has no effect with a workload file, which states it itself; leave it out"
    refuse_options(sorted(args.given - WITH_WORKLOAD), why)
    if args.cluster is None:
        raise ValueError("no cluster given: use --cluster NAME (see 'stepcast list clusters') or a TOML file")
    cluster = load_cluster(args.cluster, args.set)
    options = Options(gpus=args.gpus, place=Place(args.place))
    workload = read(args.model)
    fast = simulate(workload, cluster, options)
    options = add_background(options, cluster_question(args), cluster, fast.workload.layout.gpus)
    shared = simulate(workload, cluster, replace(options, engine=Engine.FLUID))
    return shared, fast.simulated_s, asked_facts([args.model], fast)
