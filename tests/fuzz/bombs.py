"""Small inputs that ask for much: files of all kinds that state huge counts, never end, or nest deeply."""

import gzip
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from stepcast.inputs.chakra.protobuf import AttributeKind, attribute, bytes_field, delimit, number_field, varint
from tests.shared import ROOT

EXAMPLES = ROOT / "examples"
HUGE = 10**12
SIMAI = (EXAMPLES / "simai-gpt-13b.txt").read_text()
OPTABLE = (EXAMPLES / "optable-gpt2-large.tsv").read_text()
OPERATORS = (EXAMPLES / "operators-h200.csv").read_text()
MEGATRON = (EXAMPLES / "megatron-rank7.txt").read_text()
OPTIMUS = (EXAMPLES / "optimus-llama-1b.txt").read_text()
PREDICT = ("predict", "--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8")

Make = Callable[[Path], None]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def uses(path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every option that takes a file, given *path*."""
    formats = ("simai", "optable", "op-times", "megatron", "nccl-tests", "optimus", "kineto", "huggingface", "chakra")
    cluster = ("--cluster", "dgx-h100")
    yield "show", ("show", path)
    for name in formats:
        yield f"show --format {name}", ("show", "--format", name, path)
    yield "simulate", ("simulate", path, *cluster)
    yield "analyze", ("analyze", path)
    yield "replay", ("replay", path)
    yield "compare", ("compare", path, path)
    yield "convert", ("convert", path, f"{path}.out.json", "--to", "chakra")
    yield "calibrate", ("calibrate", path, "--model", "llama3-8b", *cluster)
    yield "validate published", ("validate", "--set", "published", "--data", path)
    for name in ("h200", "nccl-tests", "megatron-traces", "optimus", "neusight"):
        yield f"validate {name}", ("validate", "--set", name, "--data", path)
    yield "model", ("predict", "--model", path, *cluster, "--gpus", "8")
    yield "cluster", ("predict", "--model", "llama3-8b", "--cluster", path, "--gpus", "8")
    yield "framework", (*PREDICT, "--framework", path)
    yield "calibration", (*PREDICT, "--calibration", path)
    yield "op calibration", ("op", "matmul", "--m", "64", "--n", "64", "--k", "64", "--calibration", path)
    yield "op gpu", ("op", "matmul", "--m", "64", "--n", "64", "--k", "64", "--gpu", path)
    yield "search model", ("search", "--model", path, *cluster, "--gpus", "8", "--global-batch", "8")
    yield "plan model", ("plan", "--model", path, *cluster, "--gpus", "8", "--steps", "9")
    yield "failures", ("plan", "--gpus", "8", "--step-s", "1", "--steps", "9", "--failures", path)
    yield "captured", ("predict", "--captured", path, *cluster)
    yield "schedule", ("simulate", str(EXAMPLES / "simai-gpt-13b.txt"), *cluster, "--schedule", path)


Files = dict[str, str | bytes | Callable[[], bytes]]
Bomb = tuple[Files, tuple[str, ...]]
"""Files to write in an empty folder, and the command line to run there."""


def _simai(**changes: object) -> str:
    """The example with other numbers in its header."""
    header, rest = SIMAI.split("\n", 1)
    words = header.split()
    for key, value in changes.items():
        words[words.index(f"{key}:") + 1] = str(value)
    return " ".join(words) + "\n" + rest


def _config(**changes: object) -> str:
    return json.dumps(LLAMA | changes)


def _simulate(file: str, *more: str) -> tuple[str, ...]:
    return ("simulate", file, "--cluster", "dgx-h100", *more)


def _predict(**changes: str) -> tuple[str, ...]:
    options = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": "8"} | changes
    return ("predict", *(word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)))


def _chain(key: str, count: int, head: str = "") -> Files:
    """Files that each build on the next; the last on the first."""
    names = [f"f{index}.toml" for index in range(count)]
    return {name: f'{head}{key} = "{names[(at + 1) % count]}"\n' for at, name in enumerate(names)}


def _schedule(text: str) -> Bomb:
    return {"w.txt": SIMAI, "s.txt": text}, _simulate("w.txt", "--schedule", "s.txt")


def schedules() -> Iterator[tuple[str, Bomb]]:
    yield "stages", _schedule(f"stages {10**9}\nmicro-batches 1\n0: F0 B0\n")
    yield "micro-batches", _schedule(f"stages 1\nmicro-batches {10**9}\n0: F0 B0\n")
    yield "chunks", _schedule(f"stages 1\nmicro-batches 1\nchunks {10**9}\n0: F0 B0\n")
    yield "stages of digits", _schedule(f"stages {'9' * 5000}\nmicro-batches 1\n0: F0 B0\n")
    yield "slot", _schedule(f"stages 1\nmicro-batches 1\n0: F{10**15} B0\n")
    yield "slot of digits", _schedule(f"stages 1\nmicro-batches 1\n0: F{'9' * 5000} B0\n")
    yield (
        "many slots",
        _schedule("stages 1\nmicro-batches 100000\n0: " + " ".join(f"F{i} B{i}" for i in range(60000))),
    )
    yield ("many stages", _schedule("stages 40000\nmicro-batches 1\n" + "\n".join(f"{i}: F0 B0" for i in range(40000))))
    yield (
        "many stages of few",
        _schedule(f"stages {10**9}\nmicro-batches 1\n" + "\n".join(f"{i}: F0 B0" for i in range(40000))),
    )
    yield "long word", _schedule("x" * 900_000)


def chains() -> Iterator[tuple[str, Bomb]]:
    for count in (1, 2, 500):
        yield f"cluster bases {count}", (_chain("base", count), _predict(cluster="f0.toml"))
        yield f"framework bases {count}", (_chain("extends", count), _predict(framework="f0.toml"))
        yield (
            f"gpu bases {count}",
            (_chain("base", count), ("op", "matmul", "--m", "8", "--n", "8", "--k", "8", "--gpu", "f0.toml")),
        )
    clusters = _chain("base", 500) | {"f499.toml": 'base = "dgx-h100"\n'}
    yield "cluster bases, no cycle", (clusters, _predict(cluster="f0.toml"))
    profiles = _chain("extends", 500) | {"f499.toml": 'extends = "megatron-core"\n'}
    yield "framework bases, no cycle", (profiles, _predict(framework="f0.toml"))
    for option in ("cluster", "framework", "model", "calibration"):
        for name, text in tomls().items():
            yield f"{option} {name}", ({"x.toml": text}, _predict(**{option: "x.toml"}))
    for name, text in tomls().items():
        yield f"show {name}", ({"x.toml": text + "\n[software]\n"}, ("show", "x.toml"))


@cache
def tomls() -> dict[str, str]:
    return {
        "nested arrays": "a=" + "[" * 400_000,
        "nested tables": "a=" + "{a=" * 200_000,
        "dotted key": "a." * 400_000 + "a=1",
        "dotted header": "[" + "a." * 400_000 + "a]",
        "quoted dotted key": '"a" . ' * 150_000 + "a=1",
        "many keys": "\n".join(f"k{i}=1" for i in range(90_000)),
        "many tables": "\n".join(f"[t{i}]\na=1" for i in range(60_000)),
        "many sources": "[sources]\n" + "\n".join(f"k{i}='x'" for i in range(60_000)),
        "digits": "layers = " + "9" * 900_000,
        "long key": "x" * 900_000 + " = 1",
        "many presets": "[[presets]]\n" * 70_000,
    }


def simais() -> Iterator[tuple[str, Bomb]]:
    for key in ("model_parallel_NPU_group", "ep", "pp", "vpp"):
        for value in (10**5, 10**9, 2**62):
            for gpus in (16, 2**62):
                text = _simai(**{key: value, "all_gpus": gpus})
                yield f"{key} {value} of {gpus}", ({"w.txt": text}, _simulate("w.txt"))
    for key in ("all_gpus", "ga", "pp_comm", "checkpoints"):
        for value in (10**7, 2**62):
            try:
                text = _simai(**{key: value})
            except ValueError:
                continue
            yield f"{key} {value}", ({"w.txt": text}, _simulate("w.txt"))
            yield f"show {key} {value}", ({"w.txt": text}, ("show", "w.txt"))
    header = SIMAI.split("\n", 1)[0]
    yield "layer lines", ({"w.txt": f"{header}\n{2**62}\n"}, _simulate("w.txt"))
    row = SIMAI.split("\n")[10]
    lines = [row.replace(row.split()[0], f"r{i}", 1) for i in range(10_000)]
    yield ("10,000 rows", ({"w.txt": f"{header}\n{len(lines)}\n" + "\n".join(lines) + "\n"}, _simulate("w.txt")))
    lines = [
        f"r{i}\t-1\t{750_000 + i}\tALLGATHER\t{2**20 + i}\t{750_000 + i}\tNONE\t0\t1\tNONE\t0\t100"
        for i in range(8_600)
    ]
    wide = _simai(pp=512, vpp=1, ga=4, all_gpus=4096).split("\n", 1)[0]
    yield (
        "8,600 rows of 512 stages",
        ({"w.txt": f"{wide}\n{len(lines)}\n" + "\n".join(lines) + "\n"}, _simulate("w.txt")),
    )
    lines = [f"r{i % 63}" + row[len(row.split()[0]) :] for i in range(9_000)]
    yield ("9,000 rows of 63", ({"w.txt": f"{header}\n{len(lines)}\n" + "\n".join(lines) + "\n"}, _simulate("w.txt")))
    lines = ["r" + row[len(row.split()[0]) :]] * 9_000
    yield ("9,000 equal rows", ({"w.txt": f"{header}\n{len(lines)}\n" + "\n".join(lines) + "\n"}, _simulate("w.txt")))
    yield "--gpus", ({"w.txt": SIMAI}, _simulate("w.txt", "--gpus", str(10**12)))
    yield "--slow-rank", ({"w.txt": SIMAI}, _simulate("w.txt", "--slow-rank", f"{10**15}=2"))
    yield "--slow-stage", ({"w.txt": SIMAI}, _simulate("w.txt", "--slow-stage", f"{10**15}=2"))
    yield "--slow-stage digits", ({"w.txt": SIMAI}, _simulate("w.txt", "--slow-stage", f"{'9' * 5000}=2"))
    yield ("--engine simai", ({"w.txt": _simai(pp=10**9, all_gpus=2**62)}, ("simulate", "w.txt", "--engine", "simai")))
    yield "to chakra", ({"w.txt": _simai(all_gpus=10**9)}, ("convert", "w.txt", "out.et", "--to", "chakra"))


def tables() -> Iterator[tuple[str, Bomb]]:
    header, first, *rest = OPTABLE.splitlines()
    cells = first.split("\t")
    for at in (1, 3, 4, 10):
        for value in ("9" * 18, "1e308", "9" * 400):
            row = "\t".join([*cells[:at], value, *cells[at + 1 :]])
            yield (
                f"optable cell {at} {value[:5]}",
                ({"t.tsv": "\n".join([header, row, *rest]) + "\n"}, _simulate("t.tsv")),
            )
    yield (
        "optable --repeat-layers",
        ({"t.tsv": OPTABLE}, _simulate("t.tsv", "--repeat-layers", "10000", "--gpus", "8")),
    )
    names = [f"transformer_h_{i}_ln_1" for i in range(9000)]
    many = "\n".join([header, *("\t".join([name, *cells[1:]]) for name in names)]) + "\n"
    yield "optable of 9,000 layers", ({"t.tsv": many}, _simulate("t.tsv", "--gpus", "8"))
    yield "optable of many columns", ({"t.tsv": header + "\tx" * 400_000 + "\n"}, ("show", "t.tsv"))
    yield "op-times of many columns", ({"t.csv": "op,dtype,ms" + ",x" * 400_000 + "\n"}, ("show", "t.csv"))
    yield (
        "op-times of different columns",
        ({"t.csv": "op,dtype,ms," + ",".join(map(str, range(120_000))) + "\n"}, ("show", "t.csv")),
    )
    yield (
        "op-times sizes",
        (
            {"t.csv": "op,dtype,M,N,K,ms\nlinear,bf16,9223372036854775807,9223372036854775807,9223372036854775807,1\n"},
            ("show", "t.csv"),
        ),
    )
    yield (
        "op-times rows",
        (
            {"t.csv": "op,dtype,M,N,K,ms\n" + "".join(f"linear,bf16,{i},8,8,1\n" for i in range(1, 12_000))},
            ("calibrate", "t.csv", "--gpu", "h200"),
        ),
    )
    yield (
        "op-times unknown operators",
        ({"t.csv": "op,dtype,ms\n" + "".join(f"x{i},bf16,1\n" for i in range(60_000))}, ("show", "t.csv")),
    )
    nccl = "# nThread 99999999999 nGpus 99999999999 minBytes 8 maxBytes 9\n#  size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n8 2 float sum -1 1 1 1 0 1 1 1 0\n"
    yield "nccl threads", ({"n.log": nccl}, ("show", "n.log"))
    yield "nccl digits", ({"n.log": nccl.replace("99999999999", "9" * 5000)}, ("show", "n.log"))
    yield "nccl size", ({"n.log": nccl.replace("\n8 2", "\n" + "9" * 5000 + " 2")}, ("show", "n.log"))
    yield "nccl blank", ({"n.log": nccl + " " * 900_000}, ("show", "n.log"))
    yield "nccl hashes", ({"n.log": "#" * 900_000 + "\n" + nccl}, ("show", "--format", "nccl-tests", "n.log"))
    yield ("nccl rank", ({"n.log": "# Rank " * 100_000 + "\n" + nccl}, ("show", "--format", "nccl-tests", "n.log")))


def models() -> Iterator[tuple[str, Bomb]]:
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
        "head_dim",
    ):
        for value in (10_000, 2**31, 2**62, 10**30):
            yield (f"{key} {value:.0e}", ({"config.json": _config(**{key: value})}, _predict(model="config.json")))
    yield (
        "all sizes",
        (
            {"config.json": _config(**dict.fromkeys([k for k in LLAMA if k != "model_type"], 10_000))},
            _predict(model="config.json"),
        ),
    )
    yield (
        "pp of layers",
        ({"config.json": _config(num_hidden_layers=10_000)}, _predict(model="config.json", gpus="10000", pp="10000")),
    )
    yield (
        "vpp of layers",
        (
            {"config.json": _config(num_hidden_layers=10_000)},
            _predict(model="config.json", gpus="8", pp="8", vpp="1250"),
        ),
    )
    yield (
        "layers list",
        (
            {
                "config.json": _config(
                    model_type="gemma3_text", layer_types=["full_attention"] * 60_000, num_hidden_layers=60_000
                )
            },
            _predict(model="config.json"),
        ),
    )
    yield (
        "experts",
        (
            {"config.json": _config(model_type="mixtral", num_local_experts=2**31, num_experts_per_tok=2**30)},
            _predict(model="config.json"),
        ),
    )
    yield "nested", ({"config.json": '{"model_type":' + "[" * 900_000}, _predict(model="config.json"))
    yield (
        "nested objects",
        ({"config.json": '{"model_type":"llama","a":' + '{"a":' * 150_000}, _predict(model="config.json")),
    )
    yield "nested text_config", ({"config.json": '{"text_config":' * 60_000}, _predict(model="config.json"))
    yield (
        "nested with NaN",
        ({"config.json": '{"model_type":NaN,"a":' + "[" * 900_000}, _predict(model="config.json")),
    )
    yield (
        "digits",
        ({"config.json": '{"model_type":"llama","vocab_size":' + "9" * 900_000 + "}"}, _predict(model="config.json")),
    )
    yield (
        "digits with NaN",
        (
            {"config.json": '{"model_type":"llama","x":NaN,"vocab_size":' + "9" * 900_000 + "}"},
            _predict(model="config.json"),
        ),
    )
    yield (
        "many keys",
        ({"config.json": json.dumps({f"k{i}": i for i in range(60_000)} | LLAMA)}, _predict(model="config.json")),
    )
    for sizes in (
        "layers=10000",
        "layers=99999999999",
        "hidden=99999999999",
        "vocab=99999999999999",
        "layers=1e300",
        "heads=2147483648",
    ):
        yield f"model {sizes}", ({}, _predict(model=f"llama3-8b:{sizes}"))
    yield "cut", ({}, _predict(model="llama3-8b-l" + "9" * 5000))
    yield "long name", ({}, _predict(model="x" * 100_000))
    yield "long near name", ({}, _predict(model="llama3" * 10_000))


def options() -> Iterator[tuple[str, Bomb]]:
    for gpus in (10**7, 10**12, "9" * 5000):
        yield f"gpus {str(gpus)[:9]}", ({}, _predict(gpus=str(gpus)))
        yield f"gpus and tp {str(gpus)[:9]}", ({}, _predict(gpus=str(gpus), tp=str(gpus)))
        yield f"gpus and pp {str(gpus)[:9]}", ({}, _predict(gpus=str(gpus), pp=str(gpus)))
        yield f"gpus and cp {str(gpus)[:9]}", ({}, _predict(gpus=str(gpus), cp=str(gpus)))
        yield (
            f"collective {str(gpus)[:9]}",
            ({}, ("collective", "all-reduce", "--cluster", "dgx-h100", "--gpus", str(gpus), "--size", "1GB")),
        )
    for name in ("micro-batch", "global-batch", "seq", "vpp", "shard", "expert-tp", "ep"):
        for value in (10**4, 10**9, 10**18):
            if (name, value) != ("global-batch", 10**9):
                yield f"--{name} {value:.0e}", ({}, _predict(**{name: str(value)}))
    yield "--stage-layers", ({}, _predict(stage_layers=",".join(["1"] * 60_000)))
    yield "--stage-layers huge", ({}, _predict(stage_layers=f"{10**15},1", pp="2"))
    yield "--recompute block", ({}, _predict(recompute=f"block:{10**15}"))
    yield "--set nested", ({}, (*_predict(), "--set", "node.gpus=" + "[" * 100_000))
    yield "--set gpus", ({}, (*_predict(), "--set", f"node.gpus={10**15}"))
    yield "--set nics", ({}, (*_predict(), "--set", f"node.nics={10**15}"))
    yield "--set digits", ({}, (*_predict(), "--set", "node.gpus=" + "9" * 5000))
    yield (
        "op sizes",
        ({}, ("op", "matmul", "--m", str(10**12), "--n", str(10**12), "--k", str(10**12), "--gpu", "h100")),
    )
    yield (
        "op sweep",
        ({}, ("op", "matmul", "--m", "1", "--n", str(10**12), "--k", str(10**12), "--gpu", "h100", "--sweep")),
    )
    yield (
        "collective size",
        ({}, ("collective", "all-reduce", "--cluster", "dgx-h100", "--gpus", "8", "--size", "1e300")),
    )
    many = ",".join(map(str, range(1, 3000)))
    searched = ("search", "--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "1..1000000")
    yield (
        "search of many numbers of GPUs",
        ({}, (*searched, "--global-batch", "1048576", "--any-framework", "--allow", "recompute=none,selective,full")),
    )
    yield "search", ({}, (*searched, "--global-batch", "720720", "--allow", f"micro-batch={many}"))
    yield (
        "search of all",
        (
            {},
            (
                *searched,
                "--global-batch",
                "720720",
                *(w for name in ("tp", "cp", "pp", "vpp") for w in ("--allow", f"{name}={many}")),
            ),
        ),
    )
    yield "unknown word", ({}, ("x" * 100_000,))
    yield "unknown option", ({}, ("predict", "--" + "x" * 100_000))


def traces() -> Iterator[tuple[str, Bomb]]:
    for key in ("duration", "timestamp", "batch_id", "rank", "stage_id"):
        for value in ("9" * 15, "9" * 400, "1e308"):
            text = re.sub(rf"{key}=[0-9.]+", f"{key}={value}", MEGATRON, count=3)
            yield (f"megatron {key} {value[:5]}", ({"benchmark-data-7.txt": text}, ("analyze", "benchmark-data-7.txt")))
    for mark in ("World size", "GAS", "GBS", "MBS", "TP", "DP", "PP"):
        text = re.sub(rf"> {mark}: +[0-9]+", f"> {mark}: 999999999", OPTIMUS)
        yield f"optimus {mark}", ({"log.txt": text}, ("analyze", "log.txt"))
    text = re.sub(
        r"first metadata_range: \[[^\]]*\]", "first metadata_range: [" + "(0, 999999999), " * 5000 + "]", OPTIMUS
    )
    yield "optimus stages", ({"log.txt": text}, ("analyze", "log.txt"))
    yield ("optimus step", ({"log.txt": OPTIMUS.replace("- step 1", "- step 99999999")}, ("analyze", "log.txt")))
    event = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0, "args": {"stream": 7}}
    info = {"backend": "nccl", "rank": 0, "world_size": 2**62, "pg_config": [{"pg_name": "1", "ranks": [0, 2**62]}]}
    for name, trace in {
        "world": {"traceEvents": [event], "distributedInfo": info},
        "times": {"traceEvents": [event | {"ts": 1e300, "dur": 1e300}]},
        "streams": {"traceEvents": [event | {"tid": i, "ts": i} for i in range(8000)]},
        "names": {"traceEvents": [event | {"name": f"k{i}", "ts": i} for i in range(8000)]},
        "steps": {"traceEvents": [event, *(event | {"cat": "user_annotation", "name": f"ProfilerStep#{i}", "ts": i} for i in range(8000))]},
        "group": {"traceEvents": [event | {"name": "ncclDevKernel_AllReduce", "args": {"Collective name": "allreduce", "In msg nelems": 2**62, "Group size": 2**62, "dtype": "Float", "Process Group Ranks": "[0, 1]"}}]},
    }.items():  # fmt: skip
        yield f"kineto {name}", ({"t.json": json.dumps(trace)}, ("analyze", "t.json"))
    for name, text in {
        "nested": '{"traceEvents": ' + "[" * 900_000,
        "nested args": '{"traceEvents": [{"ph":"X","cat":"cpu_op","name":"a","ts":1,"dur":1,"args":{"Input Dims":' + "[" * 800_000,
        "nested before": '{"a":' * 150_000,
        "braces": '{"traceEvents": [' + "{" * 900_000,
        "quotes": '{"traceEvents": [' + '{"name": "' * 90_000,
        "commas": '{"traceEvents": [' + "," * 900_000,
        "empty events": '{"traceEvents": [' + "{}," * 300_000,
        "escapes": '{"traceEvents": [{"name":"' + "\\" * 900_000,
        "numbers": '{"traceEvents": [' + "1," * 400_000,
    }.items():  # fmt: skip
        yield f"kineto {name}", ({"t.json": text}, ("analyze", "--format", "kineto", "t.json"))


def packed() -> Iterator[tuple[str, Bomb]]:
    """A megabyte of gzip that holds a gigabyte of rows."""
    optable_head, optable_row = OPTABLE.splitlines()[:2]
    simai_head, _, *simai_rows = SIMAI.splitlines()
    for name, head, row, verb in (
        ("optable", optable_head, optable_row, "show"),
        ("op-times", *OPERATORS.splitlines()[:2], "show"),
        ("megatron", *MEGATRON.splitlines()[:2], "show"),
        ("simai", f"{simai_head}\n{10**8}", simai_rows[9], "show"),
        ("optimus", *OPTIMUS.splitlines()[:2], "show"),
        (
            "kineto",
            '{"traceEvents": [',
            '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1.0,"dur":2.0,"args":{"stream":7}},',
            "analyze",
        ),
    ):
        data = gzip.compress(f"{head}\n".encode() + f"{row}\n".encode() * (3 * 10**8 // (len(row) + 1)), 9)
        yield name, ({"b.gz": data}, (verb, "--format", name, "b.gz"))
    yield (
        "chakra",
        (
            {"b.gz": gzip.compress(b"\x0a\x08\x01\x12\x01a\x18\x04\x30\x01" * (3 * 10**7), 9)},
            ("show", "--format", "chakra", "b.gz"),
        ),
    )
    yield "empty members", ({"b.gz": gzip.compress(b"") * 45_000}, ("show", "b.gz"))
    yield (
        "empty members as kineto",
        ({"b.gz": gzip.compress(b"") * 45_000}, ("analyze", "--format", "kineto", "b.gz")),
    )
    yield "nested gzip", ({"b.gz": gzip.compress(gzip.compress(b"x" * 10**8))}, ("show", "b.gz"))


def protobufs() -> Iterator[tuple[str, Bomb]]:
    """Chakra traces that announce more than they hold."""
    head = delimit(bytes_field(1, b"0.0.4"))

    def trace(*nodes: bytes) -> bytes:
        return head + b"".join(map(delimit, nodes))

    def node(index: int, *more: bytes) -> bytes:
        return number_field(1, index) + bytes_field(2, b"op") + number_field(3, 4) + b"".join(more)

    huge = number_field(7, 2**63 - 1)
    cases: dict[str, bytes | Callable[[], bytes]] = {
        "length": head + varint(2**40),
        "id": trace(node(2**63 - 1)),
        "duration": trace(node(1, huge), node(2, bytes_field(5, varint(1)), huge)),
        "dependencies": trace(node(1), node(2, bytes_field(5, varint(1) * 400_000))),
        "chain": lambda: trace(node(1), *(node(i, bytes_field(5, varint(i - 1))) for i in range(2, 40_000))),
        "backwards": lambda: trace(*(node(i, bytes_field(5, varint(i + 1))) for i in range(1, 40_000)), node(40_000)),
        "cycle": trace(node(1, bytes_field(5, varint(2))), node(2, bytes_field(5, varint(1)))),
        "attributes": lambda: trace(node(1, *(bytes_field(10, attribute("x", AttributeKind.INT64, 1)) for _ in range(60_000)))),
        "empty nodes": head + b"\0" * 900_000,
        "collective": trace(number_field(1, 1) + bytes_field(2, b"ar") + number_field(3, 7) + bytes_field(10, attribute("comm_type", AttributeKind.INT64, 0)) + bytes_field(10, attribute("comm_size", AttributeKind.INT64, 2**62)) + bytes_field(10, attribute("pg_name", AttributeKind.STRING, "1"))),
    }  # fmt: skip
    for name, data in cases.items():
        yield name, ({"t.et": data}, _simulate("t.et", "--gpus", "8"))
    for ranks in ([2**62], list(range(100_000)), [-1]):
        groups = json.dumps({"1": ranks})
        yield (
            f"groups {str(ranks)[:9]}",
            ({"t.0.et": cases["collective"], "t.comm_group.json": groups}, _simulate("t")),
        )


FAMILIES = {
    family.__name__: family
    for family in (schedules, chains, simais, tables, models, options, traces, packed, protobufs)
}


def all_bombs(*names: str) -> Iterator[tuple[str, Bomb]]:
    for name in names or FAMILIES:
        for what, bomb in FAMILIES[name]():
            yield f"{name}: {what}", bomb


def write(files: Files, folder: Path) -> None:
    for name, text in files.items():
        data = text() if callable(text) else text
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
