"""``stepcast predict --model M --cluster C --gpus N ...``"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepcast.cli.applicable import check_applicable
from stepcast.cli.calibrations import check_gpu, load_calibration
from stepcast.cli.output import new_file, terminal_width, write_file
from stepcast.cli.place import add_place_argument, has_racks
from stepcast.cli.results import add_result_arguments, show_prediction
from stepcast.cli.strategy import (
    add_strategy_arguments,
    given_by,
    layout_of,
    optimizer_of,
    settled_facts,
    strategy_of,
)

if TYPE_CHECKING:
    from stepcast.cost.calibration import Calibration
    from stepcast.hardware import Cluster
    from stepcast.ir.framework import Framework
    from stepcast.ir.model import Model
    from stepcast.ir.strategy import Strategy
    from stepcast.ir.work import Work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="M", help="name in the catalogue, or a config.json")
    parser.add_argument("--cluster", required=True, metavar="C", help="name in the catalogue, or a TOML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the cluster, as node.nics=4"
    )
    add_place_argument(parser)
    add_strategy_arguments(parser)
    parser.add_argument("--calibration", metavar="FILE", help="your GPU as 'stepcast profile' measured it")
    parser.add_argument(
        "--to-workload",
        type=new_file,
        metavar="FILE",
        help="also write the workload: SimAI text, or Chakra, a file per rank, if it ends in .et (.gz "
        "compresses)",
    )
    parser.add_argument("--explain-memory", action="store_true", help="what fills the GPUs of each stage")
    add_result_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from stepcast.forecast.predict import predict
    from stepcast.forecast.simulate import Options
    from stepcast.frameworks.catalog import load_profile
    from stepcast.frameworks.profile import settle
    from stepcast.hardware import Place, load_cluster
    from stepcast.ir.framework import Execution
    from stepcast.ir.legality import recomputable
    from stepcast.models.catalog import load_model

    model, cluster = load_model(args.model), load_cluster(args.cluster, args.set)
    calibration = load_calibration(args.calibration) if args.calibration else None
    corrects = calibration is not None and bool(calibration.corrections)
    profile = load_profile(args.framework)
    layout = layout_of(args, profile, model, cluster.gpu.name)
    usual = settle(profile, model, cluster.gpu.name, layout, {})
    said = given_by(args)
    # Formats of moments follow that of training, so the optimizer that is changed is the one of these.
    formats = {name: value for name, value in said.items() if name in ("precision", "autocast")}
    trained = settle(profile, model, cluster.gpu.name, layout, formats).framework
    given = {**said, **optimizer_of(args, trained.optimizer)}
    settled = settle(profile, model, cluster.gpu.name, layout, given)
    _forget_usual(args, settled_facts(usual))
    modules = recomputable(model)
    check_applicable(
        args,
        **{**settled_facts(settled), "vpp": layout.vpp},
        experts=model.experts is not None,
        modules=modules,
        module_list=", ".join(sorted(modules)) or "none",
        predicts_further=model.next_token_layers > 0,
        corrects=corrects,
        racks=has_racks(args),
    )
    if calibration is not None:
        check_gpu(calibration, args.calibration, cluster.gpu.name)
    assumptions: list[str] = []
    strategy = strategy_of(args, model, layout, settled, profile.defaults.seq, assumptions)
    framework, options = settled.framework, Options(place=Place(args.place))
    prediction = predict(model, cluster, strategy, framework, options, calibration)
    warnings = []
    if args.to_workload:
        _write_workload(Path(args.to_workload), model, strategy, framework, cluster, calibration)
        if framework.execution is not Execution.GRAPHS:
            warnings = [f"{args.to_workload} holds no host: read back, it runs as captured graphs do"]
    prediction = prediction.noting(assumptions, warnings)
    report = prediction.report
    show_prediction(prediction, args)
    if args.explain_memory and not args.json and report.memory_bytes is not None:
        from stepcast.report.step import memory_text

        print("\n" + memory_text(report.memory_bytes, terminal_width()))
    return 0


def _forget_usual(args: argparse.Namespace, usual: dict[str, Any]) -> None:
    """An option that says what the framework does anyway is not given in vain."""
    args.given = frozenset(name for name in args.given if getattr(args, name) != usual.get(name, object()))


def _write_workload(
    path: Path,
    model: "Model",
    strategy: "Strategy",
    framework: "Framework",
    cluster: "Cluster",
    calibration: "Calibration | None",
) -> None:
    """The generated workload with its priced times, for other simulators."""
    from stepcast.forecast.predict import compute_pricer, manner_of
    from stepcast.generate.aicb import aicb_workload
    from stepcast.generate.workload import generate
    from stepcast.generate.written import aicb_times, recorded
    from stepcast.ir.strategy import StrategyError
    from stepcast.outputs import chakra, simai

    workload = generate(model, strategy, framework)
    price = compute_pricer(workload, cluster, calibration, framework.attention)

    def seconds(work: "Work") -> float:
        return price(work).seconds  # type: ignore[arg-type]

    packed = path.suffix == ".gz"
    if (path.with_suffix("") if packed else path).suffix == ".et":
        timed = replace(recorded(workload, seconds), manner=manner_of(model, strategy, framework))
        for name, data in chakra.files(timed, str(path)):
            write_file(name, data)
        return
    if strategy.further_tokens:
        raise ValueError(
            f"{path}: AICB writes no further tokens; a name that ends in .et writes Chakra, with them"
        )
    times = aicb_times(workload, seconds, model.layers // (strategy.layout.pp * strategy.layout.vpp))
    try:
        data = simai.write(aicb_workload(model, strategy, times))
    except StrategyError as error:
        raise ValueError(f"{path}: {error}; a name that ends in .et writes Chakra, which may") from None
    write_file(str(path), data)
