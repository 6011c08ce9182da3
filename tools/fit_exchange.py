# mypy: ignore-errors
"""Fit the constants of token exchanges to public tables of DeepEP; writes data/fits/exchange.toml.

The tables (deepep.csv.gz and deepep_low_latency.csv.gz of aiconfigurator) have 1 node of six GPUs and 2, 4 and 8
nodes of H100. Their normal kernels reach 48 GB/s of each NIC on 4 nodes but 16 on 8, with any number of SMs, where the
low-latency kernels of the same tables reach 44 and DeepEP's own tables 44 to 51 (README.md, docs/README_Hybrid-EP.md).
Such a fall is a congested network, seen on other machines from 2 to 4 nodes (DeepEP's issue 493), so that the rows of 8
nodes are left out. Prints the errors of each number of nodes, fitted with and without it. Needs scipy.

    python tools/fit_exchange.py ../shared/data/operators
"""

import csv
import gzip
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

import stepcast.cost.exchange as exchange
from stepcast.cost.collectives.route import route_of
from stepcast.hardware import load_cluster, resolve
from stepcast.hardware.catalog import convert_units
from stepcast.ir.model_parts import Routing

TARGET = Path(__file__).parents[1] / "src" / "stepcast" / "data" / "fits" / "exchange.toml"
SYSTEMS = {
    "h100_sxm": ("hopper", "dgx-h100"),
    "h200_sxm": ("hopper", "dgx-h100"),
    "b200_sxm": ("blackwell", "dgx-b200"),
    "b300_sxm": ("blackwell", "dgx-b200"),
    "gb200": ("blackwell", "gb200-nvl72"),
    "gb300": ("blackwell", "gb200-nvl72"),
}
MOST_GROUPS = 4  # of nodes that a token of DeepEP's own benchmark is limited to
ELEMENT_BYTES = {"dispatch": 1 + 4 / 128, "combine": 2.0}
NORMAL = {  # field: start, least, most
    "start_us": (25, 1, 100),
    "node_start_us": (10, 0.01, 100),
    "crossing_start_us": (20, 0.01, 100),
    "rank_start_us": (1, 0.01, 10),
    "expert_start_ns": (10, 0.01, 1000),
    "element_ns": (1, 1e-4, 100),
    "sm_gb_per_s": (20, 5, 300),
    "copy_ns": (100, 0.1, 1000),
    "token_ns": (100, 0.01, 2000),
    "once_gb_per_s": (60, 2, 1e6),
    "forward_factor": (1.5, 0.5, 4),
    "nvlink_share": (0.8, 0.3, 1.2),
    "network_share": (0.95, 0.5, 1.0),
    "chunk_tokens": (10, 0.1, 100),
}
LOW_ONLY = ("crossing_start_us", "rank_start_us", "expert_start_ns")
LOW = (*LOW_ONLY, "start_us", "element_ns", "nvlink_share", "network_share")


def read(path: Path, low: bool) -> list[dict]:
    with gzip.open(path, "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        architecture, cluster = SYSTEMS[row["system"]]
        nodes = int(row["node_num"])
        ranks = nodes * (4 if row["system"].startswith("gb") else 8)
        top_k, experts = int(row["num_topk"]), int(row["num_experts"])
        limited = min(nodes, MOST_GROUPS)
        count = experts if experts % ranks == 0 or ranks % experts == 0 else -(-experts // ranks) * ranks
        routing = Routing(top_k, count, nodes, limited) if nodes > limited else Routing(top_k, count)
        site = load_cluster(cluster)
        route = route_of(resolve(site, range(ranks), active_per_node=ranks // nodes), site)
        # The table of H200 repeats that of H100 for several nodes.
        if nodes > 1 and row["system"] == "h200_sxm":
            continue
        copies = exchange.TokenCopies.of(routing, route)
        if low:
            copies = exchange.TokenCopies(float(top_k), top_k * (nodes - 1) / nodes, float(experts))
        yield {
            "key": (architecture, cluster, nodes),
            "nodes": nodes,
            "architecture": architecture,
            "tokens": float(row["num_token"]),
            "width": float(row["hidden_size"]),
            "copies": copies,
            "route": route,
            "sms": float(row.get("dispatch_sms", 1)),
            **{
                phase: 1e-6
                * (
                    float(row[f"{phase}_avg_t_us"])
                    if low
                    else float(row[f"{phase}_transmit_us"]) + float(row[f"{phase}_notify_us"])
                )
                for phase in exchange.PHASES
            },
        }


def predict(values: dict, rows: list[dict], phase: str) -> np.ndarray:
    fit = exchange.ExchangeFit(**convert_units(values))
    exchange.exchange_fit = lambda *_: fit
    seconds = np.empty(len(rows))
    for key in {row["key"] for row in rows}:
        mine = [index for index, row in enumerate(rows) if row["key"] == key]
        own = [rows[index] for index in mine]
        tokens, width, sms = (np.array([row[name] for row in own]) for name in ("tokens", "width", "sms"))
        copied = [(row["copies"].to_ranks, row["copies"].to_nodes, row["copies"].experts) for row in own]
        copies = exchange.TokenCopies(*np.array(copied).T)
        seconds[mine] = exchange.exchange_s(
            "", phase, tokens, width, ELEMENT_BYTES[phase], copies, own[0]["route"], sms
        )
    return seconds


def fit(rows: list[dict], phase: str, names: tuple, fixed: dict) -> dict:
    measured = np.array([row[phase] for row in rows])
    weight = np.array([3.0 if row["nodes"] > 1 else 1.0 for row in rows])
    names = [name for name in names if name not in fixed]
    start, least, most = np.log([NORMAL[name] for name in names]).T

    def errors(logs: np.ndarray) -> np.ndarray:
        return weight * np.log(predict(dict(zip(names, np.exp(logs), strict=True)) | fixed, rows, phase) / measured)

    found = least_squares(errors, start, bounds=(least, most), loss="soft_l1", f_scale=0.05)
    return dict(zip(names, np.exp(found.x), strict=True)) | fixed


def score(values: dict, rows: list[dict], phase: str) -> str:
    if not rows:
        return "no rows"
    error = predict(values, rows, phase) / np.array([row[phase] for row in rows]) - 1
    return f"{len(rows)} rows, mean {100 * np.abs(error).mean():.1f} %, signed {100 * error.mean():+.1f} %"


def main() -> None:
    folder = Path(sys.argv[1])
    lines = []
    for library, file, names, sms in (
        ("deepep", "deepep.csv.gz", tuple(name for name in NORMAL if name not in LOW_ONLY), 20),
        ("deepep-low-latency", "deepep_low_latency.csv.gz", LOW, 0),
    ):
        rows = list(read(folder / file, library != "deepep"))
        hopper: dict = {}
        lines += [f"[{library}]", f"multiprocessors = {sms}", ""]
        for architecture in ("hopper", "blackwell"):
            mine = [row for row in rows if row["architecture"] == architecture]
            for phase in exchange.PHASES:
                held = (2, 4, 8) if library != "deepep" else (2, 4)
                used = [row for row in mine if row["nodes"] in (1, *held)]
                # Few rows of Blackwell are limited by NVLink: 48 SMs reach 0.63 of it (README_Hybrid-EP.md).
                # All nodes of Hopper have 8 ranks, which leaves no way to tell their share of the start.
                known = {"rank_start_us": 0.0} if architecture == "hopper" else {"network_share": 0.95}
                later = architecture != "hopper"
                if later and library == "deepep":
                    known |= {"nvlink_share": 0.82} | {
                        key: hopper[phase][key] for key in ("node_start_us", "forward_factor")
                    }
                elif later:
                    known |= {"crossing_start_us": hopper[phase]["crossing_start_us"]}
                values = fit(used, phase, names, known)
                hopper = hopper if later else hopper | {phase: values}
                for nodes in (1, 2, 4, 8):
                    some = [row for row in mine if row["nodes"] == nodes]
                    text = score(values, some, phase)
                    if some and nodes in held:
                        left = fit([row for row in used if row["nodes"] != nodes], phase, names, known)
                        text += f"; left out: {score(left, some, phase)}"
                    if some:
                        print(library, architecture, phase, f"{nodes} nodes:", text, flush=True)
                lines += [f"[{library}.{architecture}.{phase}]"]
                lines += [f"{key} = {value:.4g}" for key, value in values.items() if value] + [""]
    TARGET.write_text(SOURCE + "\n".join(lines) + HYBRID, encoding="utf-8")


SOURCE = (
    'source = "tools/fit_exchange.py on DeepEP tables of aiconfigurator (ai-dynamo/aiconfigurator 095f58a): normal and '
    "low-latency kernels in sglang 0.5.12, one node of H100 to GB300, 2 and 4 nodes of H100; SMs: Megatron-Core's "
    'moe_deepep_num_sms and moe_hybridep_num_sms"\n\n'
)
HYBRID = """
# DeepEP's docs/README_Hybrid-EP.md, 4,096 tokens of 7,168 elements, 8 experts each, 16 SMs, 8 B200: kernels receive
# 599 GB/s in fp8 and 735 in bf16 (dispatch), 674 in bf16 (combine), which is 12.3 and 19.5 ns for a copy of 7,392 and
# 14,336 bytes: 75 ns of an SM for each and 60 GB/s; 50 GB/s of the network on 64 H100. Calls take 30 to 60 us more
# beyond the copy of what arrived, which is an operation of its own here.
[hybridep]
multiprocessors = 16

[hybridep.hopper.dispatch]
start_us = 60
sm_gb_per_s = 60.6
copy_ns = 75
nvlink_share = 0.94
network_share = 0.92

[hybridep.hopper.combine]
start_us = 30
sm_gb_per_s = 54
copy_ns = 75
nvlink_share = 0.94
network_share = 0.92
"""

if __name__ == "__main__":
    main()
