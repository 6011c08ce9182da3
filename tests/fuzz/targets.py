"""What is fuzzed: each reader with good files of its format, and what it may raise."""

import gzip
import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.reader_chakra import converted_node, workload
from benchmarks.reader_chakra import write as write_chakra
from benchmarks.reader_nccl_tests import HEAD, row
from stepcast.inputs.chakra.protobuf import AttributeKind, attribute, bytes_field, delimit
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import format_named, read, read_sources, recognise
from stepcast.ir.workload import Block
from stepcast.outputs.perfetto import write as write_perfetto
from tests.analyze import test_watch as watched
from tests.fuzz.bombs import EXAMPLES, LLAMA, MEGATRON, OPERATORS, OPTABLE, OPTIMUS, SIMAI
from tests.generation import test_rl as rl
from tests.inputs import test_job_logs as job_logs
from tests.inputs import test_spans as spans
from tests.inputs import test_tuning_configs as tuning
from tests.inputs.huggingface_configs import CONFIGS
from tests.inputs.topologies import SLURM_BLOCKS, SLURM_THREE_TIERS, gpu_matrix, nccl_topo
from tests.shared import ROOT

DATA = ROOT / "src" / "stepcast" / "data"
CAPTURED = EXAMPLES / "captured" / "llama-3.2-1b.json"
STRAGGLERS = "dp_rank,stage,rank,step,optype,start_ts,duration,seq_id,mc,gmc\n" + "".join(
    f"{dp},{stage},{2 * dp + stage},{step},{kind},{step}.{turn},0.0{stage + 1},{turn},0,{turn}\n"
    for dp in (0, 1)
    for stage in (0, 1)
    for step in (5, 6)
    for turn, kind in enumerate(("forward-compute", "backward-compute"))
)
RECORDED = job_logs.dump([job_logs.entry(1), job_logs.entry(2, "started")])
STEPS = {
    "rank": 0, "step_ends_s": [1.0, 2.0, 3.1, 4.0, 5.0], "window": [2, 2], "ahead_s": 0.1, "peak_bytes": 1000,
    "collectives": [{"start_s": 1.0, "end_s": 1.1, "name": "all_reduce", "bytes": 64, "ranks": [0, 1]}],
}  # fmt: skip
SAVED = b"""stepcast = "0.2.0"

[predict]
model = "llama-3.1-8b"
cluster = "dgx-h100"
gpus = 8
set = ["node.nics=4"]
overlap = "none"
clipping = true
"""


@dataclass(frozen=True)
class Target:
    """Something that reads: it gives an answer or raises one of *errors*, of one line."""

    name: str
    seeds: tuple[bytes, ...]
    run: Callable[[bytes], Any]
    errors: tuple[type[Exception], ...] = (FormatError,)


@cache
def targets() -> tuple[Target, ...]:
    return (*_formats(), *_described(), *_configured(), *_others(), *_operated())


def _formats() -> Iterator[Target]:
    """Every format of the table, read and then told as ``show`` tells it."""
    seeds = {
        "simai": (_rows(SIMAI, 38), _rows((EXAMPLES / "simai-llama-405b.txt").read_text(), 58)),
        "optable": (_cut(OPTABLE, 20),),
        "op-times": (OPERATORS.encode(),),
        "megatron": (_cut(MEGATRON, 30),),
        "nccl-tests": (_nccl(),),
        "optimus": (_optimus(), OPTIMUS[:8000].encode()),
        "kineto": (_kineto(), _xla()),
        "perfetto": (write_perfetto(read(EXAMPLES / "megatron-rank7.txt")),),
        "huggingface": tuple(_configs()),
        "chakra": (_chakra(), _converted()),
        "captured": (CAPTURED.read_bytes(),),
        "megatron-log": (job_logs.MEGATRON.encode(),),
        "torchtitan-log": (job_logs.TITAN.encode(),),
        "mlperf-log": (job_logs.MLPERF.encode(),),
        "nemo-log": (watched.NEMO.encode(),),
        "deepspeed-log": (watched.DEEPSPEED.encode(),),
        "trainer-log": (watched.TRAINER.encode(),),
        "verl-log": (rl.VERL_LOG.encode(),),
        "nemo-rl-log": (rl.NEMO_RL_LOG.encode(),),
        "stragglers": (STRAGGLERS.encode(),),
        "flight-recorder": (json.dumps(RECORDED).encode(), *(pickle.dumps(RECORDED, kind) for kind in (2, 5))),
        "nccl-inspector": ("\n".join(job_logs.inspector(turn % 2, turn, 10.0) for turn in range(4)).encode(),),
        "nccl-topo": (nccl_topo(4).encode(),),
        "nvidia-smi-topo": (gpu_matrix(4).encode(),),
        "rocprof": ((EXAMPLES / "spans" / "rocprof-kernel-trace.csv").read_bytes()[:1500],),
        "otlp": ((EXAMPLES / "spans" / "otlp-rl.json").read_bytes(), spans.encode_spans()),
        "astra-network": ((EXAMPLES / "peers" / "astra-network.yml").read_bytes(),),
        "simai-topology": ((EXAMPLES / "peers" / "simai-topology.txt").read_bytes(),),
        "calculon-system": ((EXAMPLES / "peers" / "calculon-system.json").read_bytes(),),
        "slurm-topology": (SLURM_THREE_TIERS.encode(), SLURM_BLOCKS.encode()),
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
    from stepcast.frameworks.catalog import load_profile
    from stepcast.hardware import load_cluster, load_gpu
    from stepcast.hardware.background import read_background
    from stepcast.models.catalog import load_model
    from stepcast.questions.settle import load_calibration

    def files(folder: str, *names: str) -> tuple[bytes, ...]:
        return tuple((DATA / folder / f"{name}.toml").read_bytes() for name in names)

    cluster = (
        b'base = "dgx-h100"\ngpu = "h200"\n[node]\nnics = 4\n[network]\noversubscription = 2.0\n[sources]\nnode = "x"\n'
    )
    network = b'base = "dgx-h100"\nnodes = 16\n[network]\nkind = "dragonfly"\nleaf_nodes = 2\npod_nodes = 8\nrouting = "ecmp"\nqueue_pairs = 4\nspines = 8\nfailed = ["pod 0 switch 0 to pod 1"]\nslow = ["node 3 NIC 2 up: 0.5"]\n'
    model = b"layers = 2\nhidden = 64\nheads = 4\nffn = 128\nvocab = 1000\nmax_seq = 64\nexperts = { count = 4, top_k = 2, ffn = 32 }\n"
    for name, load, seeds in (
        ("cluster", load_cluster, (cluster, network, *files("clusters", "dgx-h100", "gb200-nvl72"))),
        ("gpu", load_gpu, files("gpus", "h200", "a100-sxm-80gb")),
        ("framework", load_profile, ((EXAMPLES / "frameworks" / "my-trainer.toml").read_bytes(), *files("frameworks", "megatron-core", "nemo"))),
        ("calibration", load_calibration, ((EXAMPLES / "calibrations" / "h200.toml").read_bytes()[:4000],)),
        ("model", load_model, (model,)),
        ("background", read_background, ((EXAMPLES / "network" / "neighbours.toml").read_bytes(),)),
    ):  # fmt: skip
        yield Target(name, seeds, _by_path(load), (ValueError,))


def _others() -> Iterator[Target]:
    """Files that stand beside others."""
    from stepcast.inputs.chakra.reader import read_groups
    from stepcast.inputs.kineto.ops import read_operators
    from stepcast.inputs.optimus_log import read_gpustat
    from stepcast.inputs.source import csv_records
    from stepcast.inputs.token_counts import read_sample_lengths
    from stepcast.optimus.calibration import read_calibrated
    from stepcast.pytorch.profile import read_document
    from stepcast.simulation.schedule_file import parse_schedule

    schedule = b"stages 2\nmicro-batches 4\nchunks 1\nplacement loop\n\n0: F0 F1 B0 F2 B1 F3 B2 B3\n1: F0 B0 F1 B1 F2 B2 F3 B3\n"
    groups = json.dumps({"1": [0, 1, 2, 3], "2": [4, 5, 6, 7], "3": [0, 4]}).encode()
    stat = b"node  Wed Dec 24 10:59:14 2025  560.35.03\n[0] NVIDIA A40 | 31'C,   0 % |     4 / 46068 MB |\n[1] NVIDIA A40 | 45'C,  99 % | 20000 / 46068 MB | me(10M)\n"
    yield Target("schedule", (schedule,), lambda data: parse_schedule(Source("s", data).text(_limit())), (ValueError,))
    yield Target("communicators", (groups,), lambda data: read_groups(Source("g", data)))
    yield Target("gpustat", (stat,), lambda data: read_gpustat(Source("g", data)))
    yield Target("kineto operators", (_kineto_operators(), _kineto()), lambda data: read_operators([Source("k", data)]))
    samples = b'{"length": 12}\n{"messages": [{"role": "user", "content": "abc"}]}\n{"input_ids": [1, 2, 3]}\n'
    yield Target("samples", (samples,), _by_path(read_sample_lengths, ".jsonl"))
    yield Target("nsys", (_nsys(),), _by_path(_shown_file, ".sqlite"))
    yield Target("sweep", ((EXAMPLES / "sweeps" / "small.toml").read_bytes(),), _asked)
    yield Target("steps", (json.dumps(STEPS).encode(),), _by_path(_steps, ".json"))
    yield Target("csv", (OPERATORS.encode(),), lambda data: list(csv_records(Source("c", data))[1]))
    optimus = (DATA / "fits" / "optimus.toml").read_bytes()
    yield Target("optimus constants", (optimus,), lambda data: read_calibrated(Source("c", data).text(_limit()), "c"))
    profile = (EXAMPLES / "calibrations" / "h200.toml").read_bytes()[:5000]
    yield Target(
        "profile", (profile,), lambda data: read_document(Source("c", data).text(_limit()), "c"), (ValueError,)
    )


def _configured() -> Iterator[Target]:
    """Configurations of other tools, as ``predict --config`` takes them."""
    for suffix in ("sh", "yaml", "json", "toml"):
        files = sorted((ROOT / "tests" / "inputs" / "configs").rglob(f"*.{suffix}"))
        seeds = tuple(file.read_bytes() for file in files)
        yield Target(f"config {suffix}", seeds, _by_path(_words_of, f".{suffix}"), (ValueError,))
    yield Target("saved run", (SAVED,), _by_path(_words_of), (ValueError,))
    for suffix, tuned in _tuning().items():
        yield Target(f"tuning {suffix}", tuned, _by_path(_words_of, f".{suffix}"), (ValueError,))
    scripts: dict[str, tuple[str, ...]] = {"sh": (rl.VERL, rl.OPENRLHF), "yaml": (rl.NEMO,), "json": (rl.TRL,)}
    for suffix, texts in scripts.items():
        encoded = tuple(text.encode() for text in texts)
        yield Target(f"rl {suffix}", encoded, _by_path(_rl_config, f".{suffix}"), (ValueError,))


def _tuning() -> dict[str, tuple[bytes, ...]]:
    """Return configurations of fine-tuning tools by the ending of their files."""
    found: dict[str, list[bytes]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in tuning.CASES:
            path = tuning.write_case(case, Path(folder))
            found.setdefault(path.suffix[1:], []).append(path.read_bytes())
    return {suffix: tuple(texts) for suffix, texts in found.items()}


def _rl_config(path: str) -> Any:
    from stepcast.inputs.configs.rl import read_rl_config

    return read_rl_config(path)


def _operated() -> Iterator[Target]:
    """Files of the daily loop: watched logs, gates, stores of sweeps, profiles of failures, lengths and loads."""
    from stepcast.cli.compare import GateOptions, gate_files, read_printed
    from stepcast.generation.lengths import parse_lengths
    from stepcast.goodput.plan import load_failures
    from stepcast.inputs.operator_tables import read_operator_table
    from stepcast.inputs.token_counts import read_expert_load

    night = str(EXAMPLES / "gate" / "night-1.log")
    logs = (watched.TIMERS.read_bytes()[:6000], *(log.encode() for log in (watched.NEMO, spans.SCORES, job_logs.TITAN)))
    yield Target("watched log", logs, _by_path(_watch, ".log"), (ValueError,))
    saved = _made("saved", lambda path: gate_files([night], GateOptions(save=path)))
    compared = lambda path: gate_files([night], GateOptions(baseline=path)).facts()  # noqa: E731
    yield Target("gate baseline", (saved, Path(night).read_bytes()), _by_path(compared, ".json"), (ValueError,))
    history = _made("history", lambda path: gate_files([night, night], GateOptions(history=path)))
    judged = lambda path: gate_files([night], GateOptions(history=path)).facts()  # noqa: E731
    yield Target("gate history", (history,), _by_path(judged, ".sqlite"), (ValueError,))
    yield Target("sweep store", (_store(),), _by_path(_stored, ".sqlite"), (ValueError,))
    failures = tuple((DATA / "failures" / f"{name}.toml").read_bytes() for name in ("llama-3",))
    yield Target("failures", failures, _by_path(load_failures), (ValueError,))
    yield Target("lengths", (b"512\n2k\n1_024\n800.5\n",), _by_path(parse_lengths, ".txt"), (ValueError,))
    loads = (
        b"10\n20\n30\n",
        b"[1, 2, 3]",
        b'{"tokens_per_expert": [1, 2, 5]}',
        b'{"expert_imbalance": [{"tokens": {"0": 5, "1": 9}}]}',
    )
    yield Target("expert load", loads, _by_path(read_expert_load, ".json"))
    answer = json.dumps(
        {"step_s": 1.5, "breakdown_s": {"compute": 1.0, "idle": 0.5}, "memory_bytes": {"total": 10}}
    ).encode()
    yield Target("printed answer", (answer,), _by_path(read_printed, ".json"), (ValueError,))
    yield Target(
        "operator table", (_cut(OPERATORS, 40),), _by_path(lambda path: read_operator_table(path).columns, ".csv")
    )


def _watch(path: str) -> Any:
    from stepcast.analyze.watch import StepWatch
    from stepcast.cli.compare import watch_events

    watch = StepWatch(None, None)
    return [*watch_events(path, watch, 0.0)], watch.facts()


def _store() -> bytes:
    from stepcast.sweep.engines import AnsweredChunk, PointChunk
    from stepcast.sweep.store import Store

    with tempfile.TemporaryDirectory() as folder:
        with Store(folder, writes=True) as store:
            keys = [bytes([number]) * 16 for number in range(5)]
            store.ask(["tp"], [(number, key, {"tp": number + 1}) for number, key in enumerate(keys)])
            answers: list[dict[str, Any]] = [
                {"step_s": 1.5, "fits": 1, "found": "tp 2"},
                {"error": "tp 3 does not divide 8"},
                {},
            ]
            store.add(AnsweredChunk(PointChunk("predict", tuple(keys[:3]), ()), answers, 0.1))
            store.base.execute("PRAGMA journal_mode = DELETE")
        return Path(folder, "results.sqlite").read_bytes()


def _stored(path: str) -> Any:
    from stepcast.sweep.store import Store

    folder = f"{path}.d"
    os.mkdir(folder)
    os.replace(path, os.path.join(folder, "results.sqlite"))
    with Store(folder) as store:
        return store.counts(), store.columns(), store.rows("SELECT * FROM points LIMIT 20")


def _made(name: str, write: Callable[[str], Any]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, name)
        write(path)
        return Path(path).read_bytes()


def _words_of(path: str) -> Any:
    from stepcast.questions.runs import read_run_file

    return read_run_file(None, path)


def _shown_file(path: str) -> Any:
    from stepcast.cli.show import facts_of

    return facts_of(read_sources([Source(path)], format_named("nsys")))


def _steps(path: str) -> Any:
    from stepcast.inputs.recorded import read_steps

    return read_steps(os.path.dirname(path))


def _asked(data: bytes) -> Any:
    """The points of a sweep, the first of many."""
    from stepcast.cli.sweep_points import check_words
    from stepcast.sweep.spec import read_spec

    spec = read_spec(Source("s.toml", data).text(_limit()), "s.toml")
    try:
        check_words(spec)
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(str(error)) from None
    return list(islice(spec.points(), 50))


def _limit() -> Any:
    from stepcast.ir.limits import DESCRIPTION

    return DESCRIPTION


def _by_path(load: Callable[[str], Any], suffix: str = ".toml") -> Callable[[bytes], Any]:
    def run(data: bytes) -> Any:
        with _file(data, suffix) as path:
            return load(path)

    return run


@contextmanager
def _file(data: bytes, suffix: str) -> Iterator[str]:
    """In a folder of its own, as some are read with what lies beside them."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"damaged{suffix}")
        Path(path).write_bytes(data)
        yield path


def _cut(text: str, lines: int) -> bytes:
    return "\n".join(text.splitlines()[:lines]).encode() + b"\n"


def _rows(text: str, count: int) -> bytes:
    """A SimAI workload of its first *count* rows."""
    header, _, *rows = text.splitlines()
    return "\n".join([header, str(count), *rows[:count], ""]).encode()


def _optimus() -> bytes:
    lines = OPTIMUS.splitlines(keepends=True)
    epochs = [line for line in lines if "| epoch" in line][:3]
    return "".join([*lines[:40], *lines[317:380], *epochs, *lines[-3:]]).encode()


def _chakra() -> bytes:
    step = workload(2)
    body = tuple(Block(block.layers, 2) for block in step.stages[0].body)
    return write_chakra(replace(step, stages=(replace(step.stages[0], body=body),)))


def _kineto_operators() -> bytes:
    sizes, kernels = {"Input Dims": [[512, 256], [256, 1024]], "Input type": ["c10::Half"] * 2}, range(1, 4)
    calls = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": at, "dur": 5, "pid": 1, "tid": 1,
         "args": sizes | {"Concrete Inputs": ["", ""], "External id": at}}
        for at in kernels
    ]  # fmt: skip
    ran = [
        {"ph": "X", "cat": "kernel", "name": "hgemm", "ts": 100 * at, "dur": 30, "pid": 0, "tid": 7,
         "args": {"External id": at}}
        for at in kernels
    ]  # fmt: skip
    device = {"schemaVersion": 1, "deviceProperties": [{"name": "NVIDIA H200"}]}
    return json.dumps(device | {"traceEvents": calls + ran}).encode()


def _nccl() -> bytes:
    device = "#  Rank {0:2d} Group  0 Pid  10000 on node-0 device {0:2d} [0000:0f:00] NVIDIA H200"
    head = HEAD.format(devices="\n".join(map(device.format, range(4))))
    return (head + "".join(row(2**power) for power in range(3, 15)) + "# Out of bounds values : 0 OK\n").encode()


def _kineto() -> bytes:
    """Some events of each kind out of the example."""
    with gzip.open(EXAMPLES / "kineto-llama-1b.json.gz") as file:
        trace = json.load(file)
    kinds: dict[str, list[Any]] = {}
    for event in trace["traceEvents"]:
        kinds.setdefault(event.get("cat", event["ph"]), []).append(event)
    trace["traceEvents"] = [event for events in kinds.values() for event in events[:6]]
    return json.dumps(trace).encode()


def _xla() -> bytes:
    return json.dumps(spans.XLA).encode()


def _configs() -> Iterator[bytes]:
    more = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128}
    for kind in ("llama", "mixtral", "gemma3_text", "gpt2"):
        yield json.dumps(LLAMA | more | {"model_type": kind}).encode()
    for config in CONFIGS.values():
        yield json.dumps(config).encode()


def _converted() -> bytes:
    head = delimit(bytes_field(2, attribute("schema", AttributeKind.STRING, "1.1.0-chakra.0.0.4")))
    return head + b"".join(map(converted_node, range(1, 12)))


def _nsys() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.sqlite")
        job_logs.nsys(path)
        return path.read_bytes()


def seed_files(folder: Path) -> list[str]:
    """A good file of each format for command lines to name."""
    names = {
        "simai": "w.txt", "optable": "t.tsv", "op-times": "o.csv", "megatron": "benchmark-data-7.txt", "nccl-tests": "n.log",
        "optimus": "log.txt", "kineto": "k.json", "huggingface": "config.json", "chakra": "c.et",
        "cluster": "cluster.toml", "framework": "framework.toml", "calibration": "calibration.toml", "schedule": "s.sched",
        "captured": "captured.json", "megatron-log": "m.log", "stragglers": "g.csv", "flight-recorder": "fr.json",
        "nsys": "report.sqlite", "sweep": "sweep.toml", "lengths": "lengths.txt", "rl sh": "rl.sh", "rl yaml": "rl.yaml",
        "otlp": "spans.json", "rocprof": "r.csv", "gate baseline": "baseline.json", "gate history": "h.sqlite",
        "tuning yaml": "tune.yaml", "tuning py": "tune.py", "expert load": "load.txt", "config sh": "run.sh", "config yaml": "run.yaml",
        "saved run": "saved.toml",
    }  # fmt: skip
    for target in targets():
        if target.name in names:
            (folder / names[target.name]).write_bytes(target.seeds[0])
    return list(names.values())
