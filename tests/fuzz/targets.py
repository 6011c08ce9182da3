"""What is fuzzed: each reader with good files of its format, and what it may raise."""

import gzip
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.reader_chakra import converted_node, workload
from benchmarks.reader_chakra import write as write_chakra
from benchmarks.reader_nccl_tests import HEAD, row
from stepcast.inputs.chakra.protobuf import Kind, attribute, bytes_field, delimited
from stepcast.inputs.errors import FormatError
from stepcast.inputs.source import Source
from stepcast.inputs.table import format_named, read_sources, recognise
from tests.fuzz.bombs import EXAMPLES, LLAMA, MEGATRON, OPERATORS, OPTABLE, OPTIMUS, SIMAI
from tests.inputs.topologies import SLURM_BLOCKS, SLURM_THREE_TIERS, gpu_matrix, nccl_topo
from tests.shared import ROOT

DATA = ROOT / "src" / "stepcast" / "data"


@dataclass(frozen=True)
class Target:
    """Something that reads: it gives an answer or raises one of *errors*, of one line."""

    name: str
    seeds: tuple[bytes, ...]
    run: Callable[[bytes], Any]
    errors: tuple[type[Exception], ...] = (FormatError,)


@cache
def targets() -> tuple[Target, ...]:
    return (*_formats(), *_described(), *_others())


def _formats() -> Iterator[Target]:
    """Every format of the table, read and then told as ``show`` tells it."""
    seeds = {
        "simai": (_cut(SIMAI, 40), _cut((EXAMPLES / "simai-llama-405b.txt").read_text(), 60)),
        "optable": (_cut(OPTABLE, 20),),
        "op-times": (OPERATORS.encode(),),
        "megatron": (_cut(MEGATRON, 30),),
        "nccl-tests": (_nccl(),),
        "optimus": (OPTIMUS[:2500].encode() + OPTIMUS[20_000:24_000].encode(), OPTIMUS[:8000].encode()),
        "kineto": (_kineto(),),
        "huggingface": tuple(_configs()),
        "nccl-topo": (nccl_topo(4).encode(),),
        "nvidia-smi-topo": (gpu_matrix(4).encode(),),
        "slurm-topology": (SLURM_THREE_TIERS.encode(), SLURM_BLOCKS.encode()),
        "chakra": (write_chakra(workload(1))[:6000], _converted()),
    }
    for name, files in seeds.items():
        yield Target(name, (*files, gzip.compress(files[0], mtime=0)), _reads(name), (FormatError,))


def _reads(name: str) -> Callable[[bytes], Any]:
    entry = format_named(name)

    def run(data: bytes) -> Any:
        from stepcast.cli.show import facts_of

        source = Source("damaged", data)
        with suppress(FormatError):
            recognise(source)
        return facts_of(read_sources([source], entry))

    return run


def _described() -> Iterator[Target]:
    """TOML descriptions, and what else is found by its path."""
    from stepcast.cli.calibrations import load_calibration
    from stepcast.frameworks.catalog import load_profile
    from stepcast.hardware import load_cluster, load_gpu
    from stepcast.models.catalog import load_model

    def files(folder: str, *names: str) -> tuple[bytes, ...]:
        return tuple((DATA / folder / f"{name}.toml").read_bytes() for name in names)

    cluster = b'base = "dgx-h100"\ngpu = "h200"\n[node]\nnics = 4\n[network]\noversubscription = 2.0\n[sources]\nnode = "x"\n'
    network = b'base = "dgx-h100"\nnodes = 16\n[network]\nkind = "dragonfly"\nleaf_nodes = 2\npod_nodes = 8\nrouting = "ecmp"\nqueue_pairs = 4\nspines = 8\nfailed = ["pod 0 switch 0 to pod 1"]\nslow = ["node 3 NIC 2 up: 0.5"]\n'
    model = b"layers = 2\nhidden = 64\nheads = 4\nffn = 128\nvocab = 1000\nmax_seq = 64\nexperts = { count = 4, top_k = 2, ffn = 32 }\n"
    for name, load, seeds in (
        ("cluster", load_cluster, (cluster, network, *files("clusters", "dgx-h100", "gb200-nvl72"))),
        ("gpu", load_gpu, files("gpus", "h200", "a100-sxm-80gb")),
        ("framework", load_profile, ((EXAMPLES / "frameworks" / "my-trainer.toml").read_bytes(), *files("frameworks", "megatron-core", "nemo"))),
        ("calibration", load_calibration, ((EXAMPLES / "calibrations" / "h200.toml").read_bytes()[:4000],)),
        ("model", load_model, (model,)),
    ):  # fmt: skip
        yield Target(name, seeds, _by_path(load), (ValueError,))


def _others() -> Iterator[Target]:
    """Files that stand beside others."""
    from stepcast.inputs.chakra.rank_files import read_groups
    from stepcast.inputs.gpustat import read_gpustat
    from stepcast.inputs.kineto.ops import read_operators
    from stepcast.inputs.rows import csv_records
    from stepcast.optimus.calibration import calibrated_of
    from stepcast.pytorch.profile.document import read_document
    from stepcast.simulation.schedule_file import parse_schedule

    schedule = b"stages 2\nmicro-batches 4\nchunks 1\nplacement loop\n\n0: F0 F1 B0 F2 B1 F3 B2 B3\n1: F0 B0 F1 B1 F2+B2 F3 B3\n"
    groups = json.dumps({"1": [0, 1, 2, 3], "2": [4, 5, 6, 7], "3": [0, 4]}).encode()
    stat = b"node  Wed Dec 24 10:59:14 2025  560.35.03\n[0] NVIDIA A40 | 31'C,   0 % |     4 / 46068 MB |\n[1] NVIDIA A40 | 45'C,  99 % | 20000 / 46068 MB | me(10M)\n"
    yield Target(
        "schedule", (schedule,), lambda data: parse_schedule(Source("s", data).text(_limit())), (ValueError,)
    )
    yield Target("communicators", (groups,), lambda data: read_groups(Source("g", data)))
    yield Target("gpustat", (stat,), lambda data: read_gpustat(Source("g", data)))
    yield Target("kineto operators", (_kineto(),), lambda data: read_operators([Source("k", data)]))
    yield Target("csv", (OPERATORS.encode(),), lambda data: list(csv_records(Source("c", data))[1]))
    optimus = (DATA / "fits" / "optimus.toml").read_bytes()
    yield Target(
        "optimus constants", (optimus,), lambda data: calibrated_of(Source("c", data).text(_limit()), "c")
    )
    profile = (EXAMPLES / "calibrations" / "h200.toml").read_bytes()[:5000]
    yield Target(
        "profile",
        (profile,),
        lambda data: read_document(Source("c", data).text(_limit()), "c"),
        (ValueError,),
    )


def _limit() -> Any:
    from stepcast.ir.limits import DESCRIPTION

    return DESCRIPTION


def _by_path(load: Callable[[str], Any]) -> Callable[[bytes], Any]:
    def run(data: bytes) -> Any:
        with _file(data) as path:
            return load(path)

    return run


@contextmanager
def _file(data: bytes) -> Iterator[str]:
    handle, path = tempfile.mkstemp(suffix=".toml")
    try:
        os.write(handle, data)
        os.close(handle)
        yield path
    finally:
        os.unlink(path)


def _cut(text: str, lines: int) -> bytes:
    return "\n".join(text.splitlines()[:lines]).encode() + b"\n"


def _nccl() -> bytes:
    device = "#  Rank {0:2d} Group  0 Pid  10000 on node-0 device {0:2d} [0000:0f:00] NVIDIA H200"
    head = HEAD.format(devices="\n".join(map(device.format, range(4))))
    return (
        head + "".join(row(2**power) for power in range(3, 15)) + "# Out of bounds values : 0 OK\n"
    ).encode()


def _kineto() -> bytes:
    """Some events of each kind out of the example."""
    with gzip.open(EXAMPLES / "kineto-llama-1b.json.gz") as file:
        trace = json.load(file)
    kinds: dict[str, list[Any]] = {}
    for event in trace["traceEvents"]:
        kinds.setdefault(event.get("cat", event["ph"]), []).append(event)
    trace["traceEvents"] = [event for events in kinds.values() for event in events[:6]]
    return json.dumps(trace).encode()


def _configs() -> Iterator[bytes]:
    yield json.dumps(LLAMA).encode()
    more = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128}
    for kind in ("mixtral", "gemma3_text", "deepseek_v3", "gpt2", "nemotron_h", "llama4_text", "qwen3_moe"):
        yield json.dumps(LLAMA | more | {"model_type": kind}).encode()


def _converted() -> bytes:
    head = delimited(bytes_field(2, attribute("schema", Kind.STRING, "1.1.0-chakra.0.0.4")))
    return head + b"".join(map(converted_node, range(1, 12)))


def seed_files(folder: Path) -> list[str]:
    """A good file of each format for command lines to name."""
    names = {
        "simai": "w.txt", "optable": "t.tsv", "op-times": "o.csv", "megatron": "benchmark-data-7.txt", "nccl-tests": "n.log",
        "optimus": "log.txt", "kineto": "k.json", "huggingface": "config.json", "chakra": "c.et",
        "cluster": "cluster.toml", "framework": "framework.toml", "calibration": "calibration.toml", "schedule": "s.sched",
    }  # fmt: skip
    for target in targets():
        if target.name in names:
            (folder / names[target.name]).write_bytes(target.seeds[0])
    return list(names.values())
