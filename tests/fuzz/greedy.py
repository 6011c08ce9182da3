"""Random commands that are right and ask for much: models, layouts, batches and runs as large as can be stated.

What does not fit together is refused at once and shows nothing, so that sizes are drawn to fit each other. Searches
are not among them: they take the time that they take, and end at any moment with the best so far.
"""

import json
from random import Random

from tests.fuzz.bombs import LLAMA, OPTABLE, SIMAI, Bomb, Files

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe")
CLUSTERS = ("dgx-h100", "dgx-a100", "gb200-nvl72")


def greedy(seed: int, number: int) -> Bomb:
    """Case *number* of *seed*: files, and a command line that reads them."""
    random = Random(f"{seed}/greedy/{number}")
    make = random.choice((_predict, _predict, _predict, _plan, _simulate, _simulate, _others))
    return make(random)


def _large(random: Random, most: float) -> int:
    """Small and large numbers alike, powers of two more often than others."""
    value = max(1, int(most ** random.random()))
    return 1 << (value.bit_length() - 1) if random.random() < 0.9 else value


def _flags(random: Random, **values: object) -> list[str]:
    """Some of these options."""
    words = []
    for name, value in values.items():
        if random.random() < 0.15:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def _model(random: Random) -> tuple[Files, dict[str, int]]:
    """A config.json, and its layers and experts."""
    pp, vpp, tp = (_large(random, most) for most in (10_000, 100, 64))
    layers = min(10_000, pp * vpp * _large(random, 20))
    experts = _large(random, 100_000) if random.random() < 0.4 else 0
    heads = tp * _large(random, 8)
    config: dict[str, object] = {
        **LLAMA,
        "hidden_size": heads * 64,
        "intermediate_size": tp * 64 * _large(random, 256),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": layers,
        "vocab_size": tp * _large(random, 10**6),
    }
    if experts:
        taken = min(experts, _large(random, 64))
        config |= {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": taken}
    return {"config.json": json.dumps(config)}, {"pp": pp, "vpp": vpp, "tp": tp, "layers": layers, "experts": experts}


def _layout(random: Random, sizes: dict[str, int]) -> tuple[list[str], int]:
    """Options of a layout that fits the model, and its replicas."""
    use = {name: random.random() < 0.7 for name in ("pp", "vpp", "tp", "cp", "dp")}
    pp = sizes["pp"] if use["pp"] else 1
    vpp = sizes["vpp"] if use["vpp"] and pp > 1 else 1
    tp = sizes["tp"] if use["tp"] else 1
    cp = _large(random, random.choice((64, 4096))) if use["cp"] and tp * pp < 100 else 1
    dp = _large(random, max(1, 10**6 // (tp * cp * pp))) if use["dp"] else 1
    ep = min(sizes["experts"], _large(random, max(1, dp * cp * tp))) if sizes["experts"] else 1
    layout = {"tp": tp, "cp": cp, "pp": pp, "vpp": vpp, "ep": ep}
    words = [word for name, size in layout.items() if size > 1 for word in (f"--{name}", str(size))]
    return [*words, "--gpus", str(tp * cp * pp * dp)], dp


def _strategy(random: Random, dp: int) -> list[str]:
    micro_batch = _large(random, 64)
    batch = dp * micro_batch * _large(random, random.choice((100, 10**4, 10**6)))
    return [
        "--micro-batch", str(micro_batch), "--global-batch", str(batch), "--seq", str(1024 * _large(random, 1000)),
        *_flags(
            random,
            schedule=random.choice(SCHEDULES),
            sharding=random.choice(("none", "zero-1", "zero-2", "zero-3", "fsdp")),
            recompute=random.choice(("none", "selective", "full", "block:1")),
            bucket_mb=random.choice(("0", "0.001", "1e-6", "40")),
            overlap=random.choice(("gradients", "gradients,parameters,transfers", "none")),
            kernels=random.choice(("fused", "plain", "compiled")),
            execution=random.choice(("graphs", "partial-graphs", "eager", "blocking")),
            framework=random.choice(("megatron-core", "torchtitan", "pytorch")),
            optimizer=random.choice(("adamw", "muon", "adafactor")),
            offload="activations,optimizer",
            deferred_gradients=_large(random, 10**6),
            lora_rank=_large(random, 1000),
        ),
    ]  # fmt: skip


def _shown(random: Random) -> list[str]:
    return _flags(
        random, jitter="0.05", runs=_large(random, 10**6), gantt=True, critical_path=True, trace="out.json", json=True
    )


def _predict(random: Random) -> Bomb:
    files, sizes = _model(random)
    layout, dp = _layout(random, sizes)
    more = _flags(random, explain_memory=True, to_workload=random.choice(("out.txt", "out.et")), tokens="15T")
    model = "config.json" if random.random() < 0.8 else random.choice(("llama3-8b", "deepseek-v3"))
    words = ["predict", "--model", model, "--cluster", random.choice(CLUSTERS), *layout]
    return files, (*words, *_strategy(random, dp), *_shown(random), *more)


def _plan(random: Random) -> Bomb:
    files, sizes = _model(random)
    layout, dp = _layout(random, sizes)
    if random.random() < 0.7:  # a step that was measured: the rest is about the run alone
        words = ["--gpus", str(_large(random, 10**6)), "--step-s", f"{10 ** random.uniform(-6, 6):.3g}"]
        words += ["--steps", str(_large(random, 10**12)), "--checkpoint-size", "1TB"]
    else:
        words = ["--model", "config.json", "--cluster", "dgx-h100", *layout, *_strategy(random, dp)]
        words += ["--tokens", str(_large(random, 10**15))]
    for _ in range(_large(random, 50) if random.random() < 0.2 else 0):
        words += ["--stage", f"steps={_large(random, 10**9)}"]
    times = [f"{10 ** random.uniform(0, 9):.3g}s" for _ in range(8)]
    return files, (
        "plan",
        *words,
        *_flags(
            random,
            runs=_large(random, 10**6),
            mtbf=f"gpu={times[0]},node={times[1]}",
            checkpoint_every=times[2],
            restart=f"detect={times[3]},reschedule={times[4]}",
            spares=_large(random, 10**6),
            shrink=True,
            repair=f"share={random.random():.3f},takes={times[5]}",
            stragglers=f"per-node-day={10 ** random.uniform(-6, 6):.3g},for={times[6]},slower=2",
            evaluate=f"every={_large(random, 10**9)},for={times[7]}",
            output="goodput.csv",
            until="9999-12-31",
            json=True,
        ),
    )


def _simulate(random: Random) -> Bomb:
    """Workload files: SimAI text of many rows, micro-batches and stages; operator tables of many repeats."""
    if random.random() < 0.3:
        header, *rows = OPTABLE.splitlines()
        table = "\n".join([header, *rows * _large(random, 100)]) + "\n"
        words = ["simulate", "t.tsv", "--cluster", "dgx-h100", "--gpus", str(_large(random, 10**6))]
        words += ["--repeat-layers", str(_large(random, 10_000))]
        return {"t.tsv": table}, (*words, *_shown(random))
    header, _, *rows = SIMAI.strip().splitlines()
    words = header.split()
    pp, tp, dp = (_large(random, most) for most in (10_000, 64, 1000))
    sizes = {
        "model_parallel_NPU_group": tp,
        "ep": _large(random, dp),
        "pp": pp,
        "vpp": _large(random, 100),
        "ga": _large(random, 10**6),
        "all_gpus": tp * pp * dp,
    }
    for key, value in sizes.items():
        words[words.index(f"{key}:") + 1] = str(value)
    grown = rows * _large(random, 30)
    text = " ".join(words) + f"\n{len(grown)}\n" + "\n".join(grown) + "\n"
    more = _flags(
        random,
        schedule=random.choice(SCHEDULES),
        body=random.choice(("stage", "model")),
        messages=random.choice(("eager", "rendezvous", "blocking")),
        slow_stage="0=2",
        slow_rank="0=2",
        engine="simai",
    )
    return {"w.txt": text}, ("simulate", "w.txt", "--cluster", "dgx-h100", *more, *_shown(random))


def _others(random: Random) -> Bomb:
    size = str(_large(random, 10**12))
    ranks = str(_large(random, 10**6))
    rows = "".join(
        f"{random.choice(('linear', 'gelu', 'sdpa_fwd'))},bf16,{_large(random, 10**9)},{_large(random, 10**9)},"
        f"{_large(random, 10**9)},{_large(random, 10**9)},8,8,64,{_large(random, 10**9)},8,{10 ** random.uniform(-6, 6):.3g}\n"
        for _ in range(_large(random, 8_000))
    )
    files: Files = {"o.csv": "op,dtype,B,M,N,K,S,heads,kv,D,cols,ms\n".replace("B,M", "M,B") + rows}
    return files, random.choice(
        (
            ("collective", random.choice(("all-reduce", "all-to-all", "send-receive", "all-gather")), "--ranks", ranks,
             "--cluster", random.choice(CLUSTERS), "--size", size, *_flags(random, sweep=True)),
            ("op", "matmul", "--m", size, "--n", size, "--k", size, "--gpu", "h100", *_flags(random, sweep=True)),
            ("op", "attention", "--seq", size, "--heads", ranks, "--head-dim", "64", "--gpu", "h200"),
            ("calibrate", "o.csv", "--gpu", "h200", *_flags(random, output="c.toml")),
        )
    )  # fmt: skip
