"""``stepcast op`` and ``stepcast collective``: how long one operator takes on a GPU, and one collective on a cluster.

``op --table`` says how long each row of a measured table takes by our estimates.
"""

import argparse
from collections.abc import Iterator

from stepcast.cli import validate
from stepcast.cli.options import MATRIX_KINDS, check_applicable, has_racks, option_of
from stepcast.cli.output import show_view
from stepcast.cost.collectives.choose import Algorithm, CollectivePrice, price, send_receive_price
from stepcast.cost.collectives.route import Route, route_of, uneven_warning
from stepcast.cost.compute import compute_price
from stepcast.cost.fits import default_fit
from stepcast.cost.power import ALONE, SUSTAINED
from stepcast.cost.price import Price
from stepcast.hardware import Cluster, Gpu, Place, load_cluster, load_gpu
from stepcast.hardware.catalog import check_gpu_count
from stepcast.hardware.path import job_path
from stepcast.ir import work as ops
from stepcast.ir.layout import Group, Layout
from stepcast.ir.types import DType, FactDict, find_doubts, pick, require
from stepcast.ir.work import Attention, Collective, CollectiveKind, Elementwise, GroupedMatmul, Matmul
from stepcast.questions.settle import check_gpu, load_calibration
from stepcast.units import GIB, TFLOPS
from stepcast.views.costs import collective_view, operator_view

Operator = Matmul | GroupedMatmul | Attention | Elementwise
# Sizes of an operator; those with a question mark have a default.
SIZES = {
    "matmul": "m n k batch?",
    "bmm": "batch m n k",
    "grouped": "groups m n k",
    "attention": "seq keys? batch? heads kv_heads? head_dim",
}
ELEMENTWISE_SIZES = "rows columns"
SWEPT = {"matmul": "m", "bmm": "m", "grouped": "m", "attention": "seq"}
LARGEST_OF_SWEEP = 65_536
SIZES_OF = {
    Matmul: "m n k batch",
    GroupedMatmul: "m n k groups",
    Attention: "seq=query_len keys=key_len batch heads kv_heads head_dim",
    Elementwise: "rows columns",
}
SEND_RECEIVE = "send-receive"
SMALLEST_BYTES, LARGEST_BYTES = 8, 16 * GIB


def run_op(args: argparse.Namespace) -> int:
    if args.table is not None:
        effective = ("table", "output", "html", "json", "plain")
        without_effect = [option_of(name) for name in args.given if name not in effective]
        if args.kind or without_effect:
            unused = ", ".join([*filter(None, [args.kind]), *without_effect])
            raise ValueError(
                f"{unused}: has no effect with --table, whose rows name operators, sizes, formats and GPUs"
            )
        choices = {"set": ["operators"], "data": args.table, "cluster": None, "calibration": None, "verb": "validate"}
        return validate.run(argparse.Namespace(**{**vars(args), **choices, "given": ["data"]}))
    if args.kind is None or args.output:
        raise ValueError(
            "-o needs --table PLACE" if args.kind else "no operator given: name a KIND, or use --table PLACE"
        )
    calibration = load_calibration(args.calibration) if args.calibration else None
    corrects = calibration is not None and bool(calibration.corrections)
    sizes = SIZES.get(args.kind, ELEMENTWISE_SIZES).replace("?", "").split()
    check_applicable(args, sizes=sizes, size_list=", ".join(map(option_of, sizes)), corrects=corrects)
    require(args.gpu is not None or calibration is not None, "no GPU given: use --gpu NAME, such as --gpu h200")
    gpu = load_gpu(args.gpu if calibration is None else args.gpu or calibration.gpu)
    if calibration is not None:
        check_gpu(calibration, args.calibration, gpu.name)
    priced = compute_price if calibration is None else calibration.price
    works = list(_works(args))
    prices = [priced(work, gpu, default_fit(), SUSTAINED if args.busy else ALONE) for work in works]
    dtype, warnings = DType(args.dtype), []
    if args.kind in MATRIX_KINDS and (used := gpu.runs_as(dtype)) != dtype:
        warnings = [
            f"{gpu.name} has no {dtype} matrix units: estimated as multiplied in {used}, with {dtype} operands in "
            f"memory; it has {', '.join(gpu.matrix_flops)}"
        ]
    about = {"operator": args.kind, "gpu": gpu.name, "dtype": args.dtype, "backward": args.backward}
    records = [_operator_record(work, price) for work, price in zip(works, prices, strict=True)]
    warnings += find_doubts({"rows": records}) + _speed_warnings(works, prices, gpu)
    answer = {"rows": records} if args.sweep else records[0]
    show_view(args, operator_view({**about, **answer, "warnings": warnings}))
    return 0


def _speed_warnings(works: list[Operator], costs: list[Price], gpu: Gpu) -> list[str]:
    """Return a warning if a calibration makes an operator faster than the peak of the GPU."""
    for work, cost in zip(works, costs, strict=True):
        if not isinstance(work, Elementwise):
            peak = gpu.matrix_peak_flops(str(work.dtype))
            if work.flops > peak * cost.seconds:
                return [
                    f"{work.flops / cost.seconds / TFLOPS:.4g} TFLOP/s is more than the peak of {gpu.name}, "
                    f"{peak / TFLOPS:.4g} TFLOP/s: look for a nonsense value in the calibration"
                ]
    return []


def _works(args: argparse.Namespace) -> Iterator[Operator]:
    """Yield the operator, or those of a sweep."""
    if not args.sweep:
        yield _work(args)
        return
    name = SWEPT.get(args.kind, "rows")
    size = getattr(args, name) or max(128, args.groups or 0)
    require(size <= LARGEST_OF_SWEEP, f"a sweep ends at {LARGEST_OF_SWEEP:,}; --{name} must be at most that")
    while size <= LARGEST_OF_SWEEP:
        yield _work(argparse.Namespace(**{**vars(args), name: size}))
        size *= 2


def _work(args: argparse.Namespace) -> Operator:
    needed = [name for name in SIZES.get(args.kind, ELEMENTWISE_SIZES).split() if not name.endswith("?")]
    missing = [option_of(name) for name in needed if getattr(args, name) is None]
    require(not missing, f"{args.kind} needs {' and '.join(missing)}")
    dtype = DType(args.dtype)
    if args.kind == "attention":
        if args.kv_heads is not None and args.heads % args.kv_heads:
            raise ValueError(
                f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}: each serves as many queries"
            )
        return Attention(
            **pick(args, "query_len=seq heads head_dim value_dim=head_dim backward"),
            batch=1 if args.batch is None else args.batch,
            key_len=args.seq if args.keys is None else args.keys,
            kv_heads=args.heads if args.kv_heads is None else args.kv_heads,
            causal=not args.no_causal,
            dtype=dtype,
        )
    if args.kind not in MATRIX_KINDS:
        kind = ops.ElementwiseKind(args.kind)
        if kind is ops.ElementwiseKind.CAST:
            return ops.cast(args.rows, args.columns, dtype, DType(args.to or "fp32"), args.backward)
        return ops.usual_kernel(kind, args.rows, args.columns, dtype, args.backward)
    if args.kind == "grouped":
        return GroupedMatmul(args.m, args.n, args.k, args.groups, dtype)
    return Matmul(args.m, args.n, args.k, args.batch or 1, dtype)


def _operator_record(work: Operator, price: Price) -> FactDict:
    moved = work.moved_bytes
    flops = 0.0 if isinstance(work, Elementwise) else work.flops
    return {
        "size": pick(work, SIZES_OF[type(work)]),
        "time_s": price.seconds,
        "bound": str(price.bound),
        "efficiency": price.efficiency,
        "source": str(price.source),
        "uncertainty": pick(price, "low_s high_s"),
        "flops": flops,
        "bytes": moved,
        "flops_per_s": flops / price.seconds,
        "bytes_per_s": moved / price.seconds,
    }


def run_collective(args: argparse.Namespace) -> int:
    if args.size is None and not args.sweep and args.kind != CollectiveKind.BARRIER:
        raise ValueError("say how large the buffer is with --size, or ask for a --sweep")
    check_applicable(args, racks=has_racks(args))
    cluster = load_cluster(args.cluster, args.set)
    check_gpu_count(cluster, args.ranks)
    held, place = args.ranks_per_node, Place(args.place)
    if held is not None and not 1 <= held <= cluster.domain_gpus:
        raise ValueError(f"--ranks-per-node must lie between 1 and {cluster.domain_gpus}, not {held}")
    route = route_of(job_path(cluster, args.ranks, held, place), cluster, args.ranks_per_thread)
    if args.kind == CollectiveKind.BARRIER:
        args.size, args.sweep = 0, False
    sizes = [args.size or 0]
    if args.sweep:
        largest = LARGEST_BYTES if args.size is None else args.size
        require(largest >= SMALLEST_BYTES, f"a sweep starts at {SMALLEST_BYTES} bytes; --size must be at least that")
        sizes = [2**power for power in range(3, largest.bit_length())]
    if args.engine == "fluid":
        return _run_fluid(args, sizes, cluster)
    about = {"collective": args.kind, "cluster": cluster.name, "ranks": route.ranks, "nodes": route.nodes}
    rows = [_collective_record(_price(args, size, route)) for size in sizes]
    uneven = uneven_warning("a group of", route, cluster, place)
    warnings = [*uneven, *cluster.list_doubts(), *find_doubts({"rows": rows})]
    answer = {"rows": rows} if args.sweep else rows[0]
    show_view(args, collective_view({**about, **answer, "warnings": warnings}))
    return 0


def _run_fluid(args: argparse.Namespace, sizes: list[int], cluster: Cluster) -> int:
    """Simulate the collective as flows of one group of all ranks on the links of the cluster."""
    from stepcast.forecast.fluid import shared_collective

    for option in ("sweep", "ranks_per_node"):
        require(not getattr(args, option), f"{option_of(option)}: --engine fluid does not know it; leave it out")
    if args.kind == SEND_RECEIVE or args.imbalance != 1 or args.ranks_per_thread != 1:
        raise ValueError("--engine fluid runs even collectives, a process for each GPU; leave the engine out")
    work = Collective(CollectiveKind(args.kind), sizes[0], Group.DP)
    algorithm = None if args.algorithm is None else Algorithm(args.algorithm)
    shared = shared_collective(cluster, Layout(dp=args.ranks), work, algorithm, place=Place(args.place))
    about = {"collective": args.kind, "cluster": cluster.name, "ranks": args.ranks, "engine": "fluid"}
    spec = "time_s=seconds busbw_bytes_per_s alone_s=alone.seconds slowdown"
    row = _collective_record(shared.alone) | pick(shared, spec)
    row |= {"algbw_bytes_per_s": shared.alone.algbw_bytes_per_s / shared.slowdown, "rates_within": shared.near}
    links = [{"link": name, "busy": share} for name, share in shared.busiest()]
    warnings = [*cluster.list_doubts(fluid=True), *find_doubts({"rows": [row]})]
    show_view(args, collective_view({**about, **row, "links": links, "warnings": warnings}))
    return 0


def _price(args: argparse.Namespace, size: int, route: Route) -> CollectivePrice:
    if args.kind == SEND_RECEIVE:
        require(route.ranks == 2, f"a message goes from one rank to another; --ranks must be 2, not {route.ranks}")
        return send_receive_price(size, route)
    algorithm = None if args.algorithm is None else Algorithm(args.algorithm)
    return price(CollectiveKind(args.kind), size, route, algorithm, args.imbalance)


def _collective_record(price: CollectivePrice) -> FactDict:
    return pick(price, "size_bytes time_s=seconds algbw_bytes_per_s busbw_bytes_per_s algorithm protocol")
