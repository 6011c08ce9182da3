"""The best use of a number of GPUs for RL post-training: mode, split, both layouts and staleness.

Training steps are predicted once for each pool and layout and generation once for each pool and layout; a step of any
mode is composed of one of each, so that thousands of combinations take as long as their parts.
"""

from itertools import product

from stepcast.generation.placement import GenerationLayout
from stepcast.ir.facts import FactDict
from stepcast.ir.progress import report_progress
from stepcast.questions.generation import formats_of
from stepcast.rl.question import RlQuestion, read_nouns, read_task
from stepcast.rl.step import RlMode, RlPlacement, RlStep, TrainingForecast, forecast_step, forecast_training

DEGREES = (1, 2, 4, 8)
PIPELINES = (1, 2, 4, 8)
SPLITS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
SHOWN = 20
ENOUGH = 4  # training layouts of a pool that fit, those with the fewest model-parallel ranks first
USED = f"of each training pool, the fastest of the {ENOUGH} layouts that fit with the least model parallelism is used"


def _training_layouts(question: RlQuestion, gpus: int) -> list[tuple[tuple[str, object], ...]]:
    """Return layouts of a training pool; degrees that the question states are kept."""
    model, cluster, _, _ = read_nouns(question)
    experts = model.experts.count if model.experts else 1
    layouts = []
    tps = (question.tp,) if question.tp else DEGREES
    pps = (question.pp,) if question.pp else PIPELINES
    eps = (question.ep,) if question.ep else (1,) if experts == 1 else (8, 16, 32)
    for tp, pp, ep in product(tps, pps, eps):
        whole = gpus % (tp * pp) == 0 and (gpus // pp) % ep == 0 and experts % ep == 0
        if whole and tp <= cluster.node.gpus and model.heads % tp == 0 and model.layers >= pp:
            given: dict[str, object] = {"tp": tp, "pp": pp, "ep": ep, "recompute": question.recompute or "full"}
            given |= {"cp": question.cp} if question.cp else {}
            given |= {"precision": question.precision} if question.precision else {}
            layouts.append(tuple(given.items()))
    return sorted(layouts, key=lambda layout: int(str(dict(layout)["tp"])) * int(str(dict(layout)["pp"])))


def _rollout_layouts(question: RlQuestion, gpus: int) -> list[GenerationLayout]:
    """Return layouts of engines that fill a rollout pool."""
    model = read_nouns(question)[0]
    widths = (question.gen_tp,) if question.gen_tp else (*DEGREES, 16, 32)
    fits = (tp for tp in widths if gpus % tp == 0 and model.heads % tp == 0)
    return [GenerationLayout(tp=tp, replicas=gpus // tp) for tp in fits]


def search_rl(question: RlQuestion) -> FactDict:
    """Return the best uses of ``question.gpus`` as facts, the fastest step first."""
    if not question.gpus:
        raise ValueError("no GPUs given: use --gpus N, all GPUs of the search")
    model, cluster, profile, engine = read_nouns(question)
    task, total, node = read_task(question), question.gpus, cluster.node.gpus
    formats = formats_of(question.gen_weights, question.kv_cache)
    modes = [RlMode(question.mode)] if question.mode else [RlMode.COLOCATED, RlMode.ASYNC]
    pools = {(RlMode.COLOCATED, total, total)} if RlMode.COLOCATED in modes else set()
    apart: list[RlMode] = [mode for mode in modes if mode != RlMode.COLOCATED]
    for mode, part in product(apart, SPLITS):
        rollout = round(total * part / node) * node if total > node else round(total * part)
        if 0 < rollout < total:
            pools.add((mode, total - rollout, rollout))
    trained: dict[tuple[int, tuple[tuple[str, object], ...]], TrainingForecast | None] = {}
    steps: list[RlStep] = []
    considered = too_large = 0
    sizes = sorted({train for _, train, _ in pools})
    jobs = [(train, layout) for train in sizes for layout in _training_layouts(question, train)]
    fitting = dict.fromkeys(sizes, 0)
    for train, layout in report_progress(jobs):
        if fitting[train] >= ENOUGH:
            continue
        place = RlPlacement(RlMode.COLOCATED, train, GenerationLayout(), layout, pack_tokens=question.pack_tokens or 0)
        try:
            forecast = forecast_training(model, cluster, profile, task, place)
            trained[train, layout] = forecast if forecast.memory["fits"] else None
            fitting[train] += bool(forecast.memory["fits"])
        except ValueError:
            trained[train, layout] = None
    for mode, train, rollout in sorted(pools):
        forecasts = [(layout, known) for (size, layout), known in trained.items() if size == train and known]
        too_large += sum(size == train and known is None for (size, _), known in trained.items())
        best = min(forecasts, key=lambda pair: pair[1].prediction.step_s, default=None)
        if best is None:
            continue
        for engine_layout in _rollout_layouts(question, rollout):
            ages = (1,) if mode is not RlMode.ASYNC or question.staleness is not None else (1, 2, 4)
            for age in ages:
                considered += len(forecasts)
                stale = (question.staleness or age) if mode is RlMode.ASYNC else 0
                place = RlPlacement(
                    mode, train, engine_layout, best[0], formats, question.memory_share, stale,
                    question.partial_rollout and mode is RlMode.ASYNC, question.pack_tokens or 0,
                )  # fmt: skip
                try:
                    steps.append(forecast_step(model, cluster, profile, engine, task, place, best[1]))
                except ValueError:
                    too_large += len(forecasts)
    if not steps:
        raise ValueError(f"no layout of {model.name} on {total} GPUs of {cluster.name} fits")
    steps.sort(key=lambda step: step.step_s)
    first = {step.placement.mode: step for step in reversed(steps)}  # the best of each mode is always shown
    shown = [step for index, step in enumerate(steps) if index < SHOWN or first[step.placement.mode] is step]
    return {
        "model": model.name,
        "cluster": cluster.name,
        "gpu": cluster.gpu.name,
        "gpus": total,
        "considered": considered,
        "too_large": too_large,
        "currency": question.currency,
        "rows": [_row(step, question) for step in shown],
        "assumptions": [*steps[0].assumptions, USED],
        "warnings": profile.warnings,
    }


def _row(step: RlStep, question: RlQuestion) -> FactDict:
    place, rollout = step.placement, step.placement.rollout
    words = {name: value for name, value in place.training if value not in (1, None)}
    options = [f"--mode {place.mode}", f"--gpus {place.train_gpus}"]
    if place.mode is not RlMode.COLOCATED:
        options.append(f"--rollout-gpus {rollout.gpus} --staleness {place.staleness}")
    options += [f"--{name} {value}" for name, value in words.items()]
    options += [f"--gen-tp {rollout.tp}"] if rollout.tp != step.profile.gen_tp else []
    tokens = step.task.responses * step.task.mean_length
    cost = None
    if question.price is not None:
        cost = step.step_s / 3600.0 * place.gpus * question.price / tokens * 1e6
    idle = step.idle_shares()
    held = [place.gpus] if len(idle) == 1 else [rollout.gpus, place.train_gpus]
    return {
        "mode": str(place.mode),
        "train_gpus": place.train_gpus,
        "rollout_gpus": rollout.gpus,
        "step_s": step.step_s,
        "training": ", ".join(f"{name} {value}" for name, value in words.items()) or "dp",
        "rollout": str(rollout),
        "staleness": place.staleness,
        "bottleneck": step.bottleneck,
        "idle_share": sum(share * gpus for share, gpus in zip(idle.values(), held, strict=True)) / place.gpus,
        "phases_s": step.phases_s,
        "cost_per_million_tokens": cost,
        "options": " ".join(options),
    }
