"""Flows on random networks, timed by SimGrid: the oracle of the fluid engine.

    /usr/bin/python3 tools/simgrid_flows.py tests/data/simgrid-flows.json.gz

Needs the simgrid module (Debian: python3-simgrid) and nothing else. SimGrid is set to plain max-min sharing:
model CM02 without TCP's window, factors of 1, and precisions far below the 1e-8 that the suite compares to.
Each case runs in a process of its own, for SimGrid can be set up once in each. With a case in a file,
``--one FILE`` runs that and prints its answer; the benchmark does so.

A way's latency decides how flows share there, besides when they begin: each gets in proportion to one over
its own (weight-S 0). Cross-traffic puts 5 % of a flow on the links of the way back, as acknowledgements do.
Everything is updated at every event: where latencies of several flows end at once, SimGrid 3.32's lazy update
begins some of them too early. It is faster, so the benchmark uses it, without latencies ("lazy" in a case).
"""

import gzip
import json
import random
import subprocess
import sys
import time
from typing import Any

CASES = 100
SEED = 20
CROSS = 0.05
CONFIG = (
    "network/model:CM02",
    "network/TCP-gamma:0",
    "network/bandwidth-factor:1.0",
    "network/latency-factor:1.0",
    "network/weight-S:0.0",
    "maxmin/precision:1e-10",
    "surf/precision:1e-11",
)

Case = dict[str, Any]


def star(drawn: random.Random, hosts: int) -> tuple[int, Any]:
    """Each host has a link up and one down."""
    return 2 * hosts, lambda a, b: [a, hosts + b]


def leaves(drawn: random.Random, hosts: int) -> tuple[int, Any]:
    """Hosts under leaves, leaves under spines; every pair has its spine."""
    under, spines = drawn.randint(2, 5), drawn.randint(1, 4)
    count = -(-hosts // under)
    up, down = 2 * hosts, 2 * hosts + count * spines
    spine: dict[tuple[int, int], int] = {}

    def way(a: int, b: int) -> list[int]:
        left, right = a // under, b // under
        if left == right:
            return [a, hosts + b]
        chosen = spine.setdefault((a, b), drawn.randrange(spines))
        return [a, up + left * spines + chosen, down + right * spines + chosen, hosts + b]

    return 2 * hosts + 2 * count * spines, way


def ring(drawn: random.Random, hosts: int) -> tuple[int, Any]:
    """Links to the next host one way round, and to the one before it the other way."""

    def way(a: int, b: int) -> list[int]:
        forward, back = (b - a) % hosts, (a - b) % hosts
        if forward <= back:
            return [(a + step) % hosts for step in range(forward)]
        return [hosts + (a - step) % hosts for step in range(back)]

    return 2 * hosts, way


def any_links(drawn: random.Random, hosts: int) -> tuple[int, Any]:
    """Each pair uses a few links of all, whichever."""
    links = drawn.randint(3, 4 * hosts)
    known: dict[tuple[int, int], list[int]] = {}

    def way(a: int, b: int) -> list[int]:
        return known.setdefault((a, b), drawn.sample(range(links), drawn.randint(1, min(links, 6))))

    return links, way


NETWORKS = (star, leaves, ring, any_links)


def made(number: int) -> Case:
    drawn = random.Random(SEED * 1000 + number)
    hosts = drawn.randint(3, 16)
    links, way = NETWORKS[number % len(NETWORKS)](drawn, hosts)
    equal = drawn.random() < 0.3
    rates = [10**9 if equal else drawn.randint(1, 40) * 10**8 for _ in range(links)]
    weighted, crossing = drawn.random() < 0.5, number % 5 == 0
    together, bounded = drawn.random() < 0.5, drawn.random() < 0.5
    latency = [drawn.randint(1, 20) / 1024 if weighted else 0.0 for _ in range(links)]
    flows = []
    for _ in range(drawn.randint(2, 45)):
        a, b = drawn.sample(range(hosts), 2)
        path, back = way(a, b), way(b, a)
        back = [link for link in back if link not in path]
        flows.append(
            {
                "ends": [2 * len(flows), 2 * len(flows) + 1],  # hosts of its own, so that its way is its own
                "path": path,
                "back": back if crossing else [],
                "size": 10**11 if equal else drawn.randint(10**10, 10**11),
                "start": 0.0 if together else round(drawn.uniform(0, 100), 3),
                "most": drawn.randint(1, 20) * 10**8 if bounded and drawn.random() < 0.5 else None,
                "latency": sum(latency[link] for link in path) if weighted else None,
            }
        )
    return {"capacity": rates, "latency": latency if weighted else None, "flows": flows}


def timed(case: Case) -> Case:
    """Each flow's end, and its rate before the first has ended where all begin together."""
    import simgrid

    crossing = any(flow["back"] for flow in case["flows"])
    optim = "Lazy" if case.get("lazy") else "Full"
    settings = [*CONFIG, f"network/crosstraffic:{int(crossing)}", f"network/optim:{optim}"]
    engine = simgrid.Engine(["flows", "--log=root.thres:critical", *(f"--cfg={setting}" for setting in settings)])
    zone = simgrid.NetZone.create_full_zone("all")
    links = []
    for number, rate in enumerate(case["capacity"]):
        link = zone.create_link(f"link {number}", float(rate))
        # Without one SimGrid takes all flows alike.
        link.set_latency(case["latency"][number] if case["latency"] else 0.0)
        links.append(link.seal())
    hosts: dict[int, Any] = {}
    for flow in case["flows"]:
        for end in flow["ends"]:
            if end not in hosts:
                hosts[end] = zone.create_host(f"host {end}", 1e9)
    known = set()
    for number, flow in enumerate(case["flows"]):
        a, b = flow["ends"]
        path = flow["path"]
        if flow["most"]:  # a bound is a link of its own
            links.append(zone.create_link(f"bound {number}", float(flow["most"])).seal())
            path = [*path, len(links) - 1]
        ways = [(a, b, path), (b, a, flow["back"])]
        for source, target, path in ways:
            if path and (source, target) not in known:
                known.add((source, target))
                inside = [simgrid.LinkInRoute(links[link]) for link in path]
                ends = hosts[source].netpoint, hosts[target].netpoint
                zone.add_route(*ends, None, None, inside, False)
    for host in hosts.values():
        host.seal()
    zone.seal()
    found: dict[int, Any] = {}
    rates: dict[int, float] = {}

    def sender() -> None:
        messages = []
        for number in sorted(range(len(case["flows"])), key=lambda each: case["flows"][each]["start"]):
            flow = case["flows"][number]
            if flow["start"] > engine.clock:
                simgrid.this_actor.sleep_until(flow["start"])
            source, target = (hosts[end] for end in flow["ends"])
            message = simgrid.Comm.sendto_init(source, target).set_payload_size(flow["size"])
            messages.append((number, message.start()))
        if all(flow["start"] == 0 for flow in case["flows"]):
            early = min(flow["size"] for flow in case["flows"]) / max(case["capacity"]) / 2
            simgrid.this_actor.sleep_until(early / 2)  # the longest latency has passed
            left = [message.remaining for _, message in messages]
            simgrid.this_actor.sleep_until(early)
            for (number, message), before in zip(messages, left, strict=True):
                rates[number] = (before - message.remaining) / (early / 2)
        for number, message in messages:
            message.wait()
            found[number] = message.finish_time

    simgrid.Actor.create("sender", next(iter(hosts.values())), sender)
    began = time.process_time()
    engine.run()
    count = range(len(case["flows"]))
    return {
        "finish": [found[number] for number in count],
        "rates": [rates[number] for number in count] if rates else None,
        "seconds": time.process_time() - began,
    }


def main() -> None:
    if sys.argv[1] == "--one":
        with open(sys.argv[2]) as file:
            print(json.dumps(timed(json.load(file))))
        return
    cases = []
    for number in range(CASES):
        again = subprocess.run(
            [sys.executable, __file__, "--one", "/dev/stdin"],
            input=json.dumps(made(number)),
            capture_output=True,
            text=True,
        )
        if again.returncode:
            raise SystemExit(f"case {number}: {again.stderr[:2000]}")
        answer = json.loads(again.stdout.splitlines()[-1])
        del answer["seconds"]
        cases.append({**made(number), **answer})
    with gzip.GzipFile(sys.argv[1], "wb", mtime=0) as file:
        file.write(json.dumps({"cases": cases}, separators=(",", ":")).encode())
    print(f"{sys.argv[1]}: {len(cases)} cases, {sum(len(case['flows']) for case in cases)} flows")


if __name__ == "__main__":
    main()
