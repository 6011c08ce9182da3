"""The fluid engine: flows against SimGrid, many flows, and whole steps against the number of GPUs.

Bars: 10,240 flows at least 10 times as fast as SimGrid; 100,000 flows to the end of the last within 30 s; a
step of GPT-3 175B on 1,024 GPUs of a fabric 4:1 oversubscribed within 30 s on two cores.

Flows are between hosts under leaves of 16 with 8 spines, drawn; sizes from 1 to 100 MB. *burst*: all begin at
once and share everything with everything, the hardest there is; *plain* without leaves, over NICs alone;
*sprayed* over leaves of 32 whose ways up, evenly used, carry a quarter. *drizzle*: they come evenly over so
long that NICs are busy a third of the time, and links of leaves two thirds. *exchange*: all hosts send to all
others as much, as an all-to-all does. *near*: the error of not following changes of rates below 0.1 %, which
bursts of more flows than a run has patience for get.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.flows import FlowSet, Links
from stepcast.simulation.fluid.engine import FluidTimes, Precision, transfers

PYTHON = os.environ.get("SIMGRID_PYTHON", "/usr/bin/python3")
ORACLE = Path(__file__).parents[1] / "tools" / "simgrid_flows.py"
RATE = 50e9
UNDER, SPINES = 16, 8
PARTS = ("simgrid", "many", "near", "steps")
GPUS = (1024, 2048, 4096, 8192)


def network(hosts: int) -> Links:
    leaves = -(-hosts // UNDER)
    tier = np.repeat([0, 1], [2 * hosts, 2 * leaves * SPINES])
    return Links(("NIC", "leaf"), tier, np.full(len(tier), RATE))


def flows_between(
    hosts: int, source: IntArray, target: IntArray, size: FloatArray, seed: int
) -> tuple[FlowSet, IntArray]:
    """Each over a spine of its own; its links, padded by -1 within a leaf."""
    spine = np.random.default_rng(seed).integers(0, SPINES, hosts * hosts)[source * hosts + target]
    leaves, left, right = -(-hosts // UNDER), source // UNDER, target // UNDER
    up, down = 2 * hosts + left * SPINES + spine, 2 * hosts + (leaves + right) * SPINES + spine
    path = np.stack([source, np.where(left == right, -1, up), np.where(left == right, -1, down), hosts + target], 1)
    used = path >= 0
    first = np.concatenate([[0], np.cumsum(used.sum(axis=1))])
    return FlowSet.of(first, path[used], np.repeat(size, used.sum(axis=1))), path


def drawn(count: int, hosts: int, seed: int = 1) -> tuple[FlowSet, IntArray, IntArray, IntArray, FloatArray]:
    draw = np.random.default_rng(seed)
    source = draw.integers(0, hosts, count)
    target = (source + draw.integers(1, hosts, count)) % hosts
    size = draw.integers(10**6, 10**8, count).astype(np.float64)
    flows, path = flows_between(hosts, source, target, size, seed)
    return flows, path, source, target, size


def timed(links: Links, flows: FlowSet, start_s: FloatArray | None = None) -> tuple[float, FluidTimes]:
    began = time.process_time()
    found = transfers(links, flows, start_s, compiled=True)
    return time.process_time() - began, found


def against_simgrid(count: int, hosts: int) -> None:
    links = network(hosts)
    flows, path, source, target, size = drawn(count, hosts)
    own_s, found = timed(links, flows)
    print(f"burst of {count:,} flows, {hosts:,} hosts: {own_s:.2f} s", flush=True)
    if subprocess.run([PYTHON, "-c", "import simgrid"], capture_output=True).returncode:
        print("  SimGrid is not installed")
        return
    listed = zip(source.tolist(), target.tolist(), path.tolist(), size.tolist(), strict=True)
    case = {
        "capacity": links.capacity_bytes_per_s.tolist(),
        "latency": None,
        "lazy": True,
        "flows": [
            {
                "ends": [a, b],
                "path": [link for link in way if link >= 0],
                "back": [],
                "size": int(bytes_),
                "start": 0.0,
                "most": None,
                "latency": None,
            }
            for a, b, way, bytes_ in listed
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.json"
        file.write_text(json.dumps(case))
        told = subprocess.run([PYTHON, str(ORACLE), "--one", str(file)], capture_output=True, text=True, check=True)
    answer = json.loads(told.stdout.splitlines()[-1])
    error = np.abs(found.end_s / np.array(answer["finish"]) - 1).max()
    longer = answer["seconds"] / own_s
    print(f"  SimGrid: {answer['seconds']:.2f} s, {longer:.0f} times as long; ends differ by {error:.0e}")


def many(count: int) -> None:
    hosts = 4096
    flows, _, _, _, size = drawn(count, hosts)
    come_s = np.sort(np.random.default_rng(2).uniform(0, size.sum() / (hosts * RATE / 3), count))
    tell("drizzle", hosts, flows, come_s)
    hosts = round(count**0.5) + 1
    source, step = np.divmod(np.arange(hosts * (hosts - 1)), hosts - 1)
    flows, _ = flows_between(hosts, source, (source + 1 + step) % hosts, np.full(len(source), 1e6), 3)
    tell("exchange", hosts, flows)
    hosts = 16_384
    tell("burst", hosts, drawn(count, hosts)[0])
    for what, over in (("plain", 0), ("sprayed", 4)):
        links, flows = sprayed(count, hosts, over)
        tell(f"{what} burst", hosts, flows, links=links)


def sprayed(count: int, hosts: int, over: int) -> tuple[Links, FlowSet]:
    """The flows of a burst over NICs and, where leaves are *over* subscribed, over all ways up at once."""
    _, _, source, target, size = drawn(count, hosts)
    leaf, leaves = UNDER * 2, -(-hosts // (UNDER * 2))
    rates = np.repeat([RATE, RATE * leaf / max(over, 1)], [2 * hosts, 2 * leaves])
    links = Links(("NIC", "leaf"), np.repeat([0, 1], [2 * hosts, 2 * leaves]), rates)
    inside = (source // leaf == target // leaf) | (over == 0)
    up, down = 2 * hosts + source // leaf, 2 * hosts + leaves + target // leaf
    path = np.stack([source, hosts + target, np.where(inside, -1, up), np.where(inside, -1, down)], 1)
    used = path >= 0
    first = np.concatenate([[0], np.cumsum(used.sum(axis=1))])
    return links, FlowSet.of(first, path[used], np.repeat(size, used.sum(axis=1)))


def near(count: int, hosts: int) -> None:
    for what, (links, flows) in {
        "hashed": (network(hosts), drawn(count, hosts)[0]),
        "sprayed": sprayed(count, hosts, 4),
    }.items():
        exact = transfers(links, flows, compiled=True, precision=Precision(patience=10**12))
        found = transfers(links, flows, compiled=True, precision=Precision(patience=0))
        error = np.abs(found.end_s / exact.end_s - 1)
        print(
            f"near, {what}, {count:,} flows: ends differ by {error.max():.2%} at most, {error.mean():.4%} on "
            f"average; rates of {found.visited:,} flows found for {exact.visited:,}",
            flush=True,
        )


def tell(what: str, hosts: int, flows: FlowSet, come_s: FloatArray | None = None, links: Links | None = None) -> None:
    own_s, found = timed(network(hosts) if links is None else links, flows, come_s)
    told = "exact" if found.exact else f"near from {found.near_from_s / found.end_s.max():.0%} of the time on"
    print(
        f"{what} of {len(flows):,} flows, {hosts:,} hosts: {own_s:.2f} s, {told}; rates found "
        f"{found.solved:,} times, for {found.visited / max(found.solved, 1):.1f} flows each",
        flush=True,
    )


def steps() -> None:
    import stepcast

    for routing in ("spray", "ecmp"):
        for gpus in GPUS:
            began = time.process_time()
            prediction = stepcast.predict(
                model="gpt-3-175b",
                cluster="dgx-h100",
                set=[
                    "network.kind=fat-tree",
                    "network.leaf_nodes=4",
                    "network.oversubscription=4",
                    f"network.routing={routing}",
                ],
                gpus=gpus,
                tp=8,
                pp=8,
                vpp=2,
                seq=2048,
                global_batch=gpus * 3 // 2,
                engine="fluid",
            )
            step_s = prediction.step_s
            own_s = time.process_time() - began
            assert prediction.fluid is not None
            run = prediction.fluid.run
            print(
                f"GPT-3 175B, {gpus:,} GPUs, 4:1, {routing}: {own_s:.2f} s for a step of {step_s:.3f} s; "
                f"{len(run.shared.traffic.flows):,} flows as {len(run.system.flows.amount):,}, "
                f"{run.shared.program.tasks:,} tasks, {run.fluid_times.solved:,} times rates",
                flush=True,
            )


def run() -> None:
    transfers(network(2), drawn(2, 2)[0], compiled=True)  # compile
    asked = [each for each in sys.argv[1:] if each in PARTS] or PARTS
    if "simgrid" in asked:
        against_simgrid(1024, 128)
        against_simgrid(10_240, 1024)
    if "many" in asked:
        many(100_000)
    if "near" in asked:
        near(5_000, 1024)
    if "steps" in asked:
        steps()


if __name__ == "__main__":
    run()
