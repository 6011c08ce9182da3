"""Settle a question: the one place where defaults are filled in and rules about choices are applied."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property
from math import ceil, gcd, prod

import msgspec

from stepcast.cost.calibration import Calibration, calibration
from stepcast.forecast.options import Engine, Options
from stepcast.forecast.predict import predict
from stepcast.forecast.prediction import Prediction
from stepcast.frameworks.catalog import DEFAULT, Profile, Settled, fit_precision, load_profile, missing_features
from stepcast.frameworks.catalog import settle as settle_profile
from stepcast.hardware import Cluster, Place, load_cluster
from stepcast.hardware.catalog import check_gpu_count, data_names, load_gpu
from stepcast.inputs.source import DATA, FormatError, prefix_errors, read_toml
from stepcast.ir.flows import OtherJob, Pattern
from stepcast.ir.framework import Execution, Framework, Modules, OptimizerKind, parse_optimizer
from stepcast.ir.layers.kinds import count_adapted
from stepcast.ir.layout import Layout
from stepcast.ir.legality import find_recomputable
from stepcast.ir.limits import MICRO_BATCHES
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Mixer
from stepcast.ir.schedules import default_schedule
from stepcast.ir.strategy import Objective, Strategy, TrainingKind, recompute_word
from stepcast.ir.types import DType, FactDict, Facts, dataclass, pick, require
from stepcast.models.catalog import load_model
from stepcast.questions import choices as readers
from stepcast.questions.choices import AnyQuestion, build_question, option_of
from stepcast.questions.question import CHOICES, DEFAULTS, PREDICTED_AS, PredictQuestion, check_rules, rules_of
from stepcast.units import DEFAULT_CURRENCY

TUNING_FRAMEWORK = "peft"  # of LoRA on GPUs that each hold a whole model
FULL_TUNING_FRAMEWORK = "trainer"  # of all weights, where samples are counted
PEFT_RANK = 8  # huggingface/peft 0.21, tuners/lora/config.py, LoraConfig.r
# Micro-batches per stage when no global batch is given: enough to keep the bubble near a tenth.
MICRO_BATCHES_PER_STAGE = 8
MOST_TOKENS = 1e9  # in a step; runs that are known have less than 0.1e9
# Choices that are lists of words, each with an effect.
LISTS = ("overlap", "recompute")


@cache
def load_prices() -> Mapping[str, Facts]:
    """Return the price range of a GPU-hour, its date and its source, by GPU."""
    return read_toml(str(DATA / "prices.toml"))


def list_prices() -> list[FactDict]:
    """Return the catalogue as rows; the price that ``auto`` means is the middle of the range."""
    return [
        {"gpu": gpu, "price": (entry["low"] + entry["high"]) / 2, "currency": DEFAULT_CURRENCY, **entry}
        for gpu, entry in load_prices().items()
    ]


def settle_price(question: AnyQuestion, cluster: Cluster, assumptions: list[str]) -> AnyQuestion:
    """Return *question* with a number for the price ``auto``, which is added to *assumptions* with its source."""
    if getattr(question, "price", None) != "auto":
        return question
    if getattr(question, "currency", DEFAULT_CURRENCY) != DEFAULT_CURRENCY:
        raise ValueError(f"--price auto is in {DEFAULT_CURRENCY}: leave --currency out, or give the price as a number")
    entry = load_prices().get(cluster.gpu.name)
    if entry is None:
        known = ", ".join(load_prices())
        raise ValueError(f"no price of {cluster.gpu.name} is known ({known} are): use --price with a number")
    low, high = entry["low"], entry["high"]
    assumptions.append(
        f"${(low + high) / 2:g} per GPU-hour of {cluster.gpu.name}: the middle of ${low:g} to ${high:g} in "
        f"{entry['date']} ({entry['source']}) (--price)"
    )
    return question.change({"price": (low + high) / 2})


@dataclass(frozen=True)
class SettledRun:
    """The run that a question means; *assumptions* are the defaults that were used."""

    question: PredictQuestion  # with its GPUs and its cluster settled, without choices of a file that have no effect
    model: Model
    cluster: Cluster
    strategy: Strategy
    framework: Framework
    calibration: Calibration | None
    options: Options
    assumptions: tuple[str, ...]
    missing: tuple[str, ...] = ()  # features that the run uses and its software lacks, a sentence each
    notes: tuple[str, ...] = ()  # choices that have no effect and do no harm, a sentence each

    @cached_property
    def prediction(self) -> Prediction:
        prediction = predict(self.model, self.cluster, self.strategy, self.framework, self.options, self.calibration)
        return prediction.noting(warnings=self.missing) if self.missing else prediction

    @property
    def batch(self) -> Facts:
        """The global batch and the sequence length as a question states them: pairs for DPO, samples not yet padded."""
        strategy = self.strategy
        seq = self.question.seq or strategy.longest or strategy.seq
        return {"global_batch": strategy.global_batch // strategy.objective.sequences, "seq": seq}


def settle(question: PredictQuestion) -> SettledRun:
    """Return the run that *question* means; the framework and the model fill what it leaves open."""
    assumptions: list[str] = []
    readers.refuse_several(question)
    question = _expand_lora(question, assumptions)
    place = name_cluster(question)
    question = msgspec.structs.replace(question, cluster=place)
    assert question.model is not None
    model = load_model(question.model)
    assumptions.extend(model.unread)
    cluster = load_cluster(place, question.set) if isinstance(place, str) else place
    question = settle_price(question, cluster, assumptions)
    question = msgspec.structs.replace(question, gpus=_count_gpus(question, cluster, assumptions))
    corrections = question.calibration
    if isinstance(corrections, str):
        corrections = load_calibration(corrections)
    split = max(question.tp, question.pp, question.cp, question.ep)
    usual_framework = default_framework(question.lora_rank, split, question.samples is not None)
    profile = _load_software(question.framework or usual_framework, assumptions)
    if question.precision is None:
        profile = fit_precision(profile, cluster.gpu, assumptions)
    gpu = cluster.gpu.name
    layout = lay_out(question, profile, model, gpu)
    question = _settle_accumulation(question, layout)
    usual = describe_settled(settle_profile(profile, model, gpu, layout, {}))
    settled = settle_framework(question, profile, model, gpu, layout)
    if profile.framework.flash_attention and question.flash_attention is None and not settled.framework.flash_attention:
        assumptions.append(f"attention stores its scores, since {profile.name} has no fused kernel for it on {gpu}")
    # A choice that states what the framework does anyway need not have an effect of its own.
    stated = (name for name in question.given if getattr(question, name) == usual.get(name, object()))
    question = question.leave_unchecked(frozenset(stated))
    modules = find_recomputable(model)
    facts: Facts = {
        **msgspec.structs.asdict(question),
        **describe_settled(settled),
        "vpp": layout.vpp,
        "experts": model.experts is not None,
        "modules": modules,
        "module_list": ", ".join(sorted(modules)) or "none",
        "has_mtp": model.next_token_layers > 0,
        "mamba": any(block.mixer is Mixer.MAMBA for block in model.block_kinds),
        "corrects": corrections is not None and bool(corrections.corrections or corrections.pace != 1.0),
        "generation": cluster.gpu.generation,
        "racks": cluster.topology.scale_up_nodes > 1,
        "model": model.name,
        "framework": profile.name,
    }
    notes = check_rules("predict", question.given, facts)
    if question.file and (left := _drop_idle(question, facts)):
        question = msgspec.structs.replace(question, **left)
        settled = settle_framework(question, profile, model, gpu, layout)
    if corrections is not None:
        check_gpu(corrections, str(question.calibration), gpu)
    if question.task == "reward" and not model.tied:
        model = replace(model, tied=True)  # one number for each sequence: no output projection of its own
    strategy, samples = _build_strategy(question, model, layout, settled, profile.defaults.seq, assumptions)
    if question.expert_load is not None:
        strategy = _load_experts(question, model, strategy, assumptions)
    question = _count_tokens(question, strategy, samples)
    if question.framework is None:
        assumptions.append(_describe_software(settled.framework))
        if usual_framework == FULL_TUNING_FRAMEWORK:  # which its tokens alone would not say
            question = msgspec.structs.replace(question, framework=usual_framework)
    for name, others in PREDICTED_AS.items():
        if (word := getattr(question, name)) in others:
            assumptions.append(f"{option_of(name)} {word} is predicted as {others[word]}")
    options = Options(place=Place(question.place), engine=Engine(question.engine))
    options = add_background(options, question, cluster, strategy.layout.gpus)
    missing = tuple(missing_features(profile, strategy, settled.framework))
    values = model, cluster, strategy, settled.framework, corrections, options
    return SettledRun(question, *values, tuple(assumptions), missing, notes)


# ---- models, clusters and measurements by name ---------------------------------------------------------


def name_cluster(question: PredictQuestion) -> Cluster | str:
    """Return the cluster of a question, which must name a model too; a GPU is one node of it."""
    if question.model is None:
        require(not question.file, f"{question.file} names no known model; use --model as well")
        raise ValueError("no model given: use --model with a name from 'stepcast list models', or a config.json")
    if question.gpu is not None and question.cluster not in (None, question.gpu):
        raise ValueError("--gpu and --cluster both say where to run; leave one of them out")
    cluster = question.gpu if question.gpu is not None else question.cluster
    if isinstance(question.gpu, str):
        try:
            load_cluster(question.gpu)
        except ValueError:
            load_gpu(question.gpu)  # an unknown one is an error that lists the GPUs
    if cluster is None:
        load_model(question.model)  # an unknown one comes first
        raise ValueError(
            "no cluster given: use --cluster NAME or --gpu NAME (see 'stepcast list clusters' and 'stepcast list gpus')"
        )
    return cluster


def load_calibration(path: str) -> Calibration:
    """Read a user's measurements of a GPU, as ``profile`` and ``calibrate`` write them."""
    return calibration(read_toml(path), path)


def check_gpu(corrections: Calibration, path: str, gpu: str) -> None:
    """Raise a ValueError if the corrections were measured on another GPU."""
    if corrections.gpu != gpu:
        raise ValueError(
            f"{path} was measured on {corrections.gpu}, not on {gpu}: leave --calibration out, or measure "
            "that GPU with 'stepcast profile'"
        )


def _load_software(software: Framework | str, assumptions: list[str]) -> Profile:
    if isinstance(software, Framework) and software.name not in data_names("frameworks"):
        assumptions.append(f"framework {software.name!r} is not in the catalogue: general defaults are used")
    return load_profile(software)


def default_framework(adapters: int | str | None, split: int = 1, tunes: bool = False) -> str:
    """Return the name of the default framework: adapters of a model that is not split are trained with peft, all of its
    weights under Trainer if somebody *tunes* them on a number of samples.
    """
    if split > 1 or not (adapters or tunes):
        return DEFAULT
    return TUNING_FRAMEWORK if adapters else FULL_TUNING_FRAMEWORK


def _describe_software(framework: Framework) -> str:
    """Describe the default framework, which matters as much as the layout does."""
    if framework.name == TUNING_FRAMEWORK:
        return f"framework {framework.name}, transformers with LoRA adapters, eager launches (--framework)"
    if framework.name == FULL_TUNING_FRAMEWORK:
        return f"framework {framework.name}, since samples are counted: transformers in eager PyTorch (--framework)"
    issued = "CUDA graphs" if framework.execution is Execution.GRAPHS else "eager launches"
    return (
        f"framework {framework.name}, with {framework.kernels} kernels and {issued} (--framework; plain eager PyTorch "
        "is pytorch or transformers, and slower)"
    )


# ---- the layout ----------------------------------------------------------------------------------------


def lay_out(question: PredictQuestion, profile: Profile, model: Model, gpu: str) -> Layout:
    """Return how the GPUs are split; interleaved schedules take the framework's chunks if none are given."""
    assert question.gpus is not None
    ways, gpus, options = pick(question, "tp cp pp"), question.gpus or 1, []
    model_gpus = prod(ways.values())
    most = {"tp": model.heads, "cp": gpus, "pp": model.layers}
    for name, wanted in ways.items():
        rest = model_gpus // wanted
        if wanted == 1 or gpus % rest:
            continue
        ranks = gcd(gpus // rest, most[name]) if name == "tp" else gpus // rest
        legal = [number for number in range(1, min(ranks, most[name]) + 1) if ranks % number == 0]
        below = [number for number in legal if number < wanted]
        above = [number for number in legal if number > wanted]
        if near := [*below[-1:], *above[:1]]:
            options.append(f"--{name} {' or '.join(map(str, near))}")
    readers.check_multiple(question.gpus, model_gpus, options, model.heads % question.tp == 0)
    copies, shard = question.replicate, question.shard  # ranks that share one copy of the states; 0: not given
    if copies and not shard:
        shard, rest = divmod(state_ranks := question.gpus // (question.tp * question.pp), copies)
        if rest:
            fitting = max(ways for ways in range(1, min(copies, state_ranks) + 1) if state_ranks % ways == 0)
            raise ValueError(f"--replicate {copies} does not divide dp x cp = {state_ranks:,}: use {fitting}")
    degrees = pick(question, "tp cp ep pp expert_tp")
    layout = Layout(**degrees, dp=question.gpus // model_gpus, vpp=question.vpp or 1, shard=shard)
    if question.vpp is None and question.schedule == "interleaved" and question.pp > 1:
        layout = replace(layout, vpp=profile.chunks(model, gpu, layout)[0] or 1)
    return layout


def count_stated_gpus(
    question: PredictQuestion, cluster: Cluster, model_gpus: int, words: str = "tp x cp x pp", usual: int = 0
) -> int:
    """Return the number of GPUs, given as such, as nodes or as replicas of *model_gpus*; 0 where none is stated."""
    meant = {
        "--gpus": question.gpus or usual,
        "--nodes": (question.nodes or 0) * cluster.node.gpus,
        "--dp": (question.dp or 0) * model_gpus,
    }
    counts = {option: number for option, number in meant.items() if number}
    if len(set(counts.values())) > 1:
        means = " and ".join(f"{option} means {number:,}" for option, number in counts.items())
        raise ValueError(f"{means} GPUs, with {words} = {model_gpus:,}: leave one of them out")
    return next(iter(counts.values()), 0)


def _count_gpus(question: PredictQuestion, cluster: Cluster, assumptions: list[str]) -> int:
    """Return the number of GPUs of a question."""
    model_gpus = question.tp * question.cp * question.pp
    gpus = count_stated_gpus(question, cluster, model_gpus)
    if not gpus and question.gpu is not None:
        gpus = model_gpus
    elif not gpus and cluster.gpus is not None:
        gpus = cluster.gpus // model_gpus * model_gpus or model_gpus
        assumptions.append(f"all {gpus:,} GPUs of {cluster.name} (--gpus)")
    elif not gpus:
        raise ValueError(
            f"number of GPUs of {cluster.name} missing: use --gpus 64, --nodes 8, or --dp with --tp, --cp and --pp"
        )
    check_gpu_count(cluster, gpus)
    return gpus


# ---- the framework and the strategy --------------------------------------------------------------------


def settle_framework(question: PredictQuestion, profile: Profile, model: Model, gpu: str, layout: Layout) -> Settled:
    """Return the framework and the choices of the strategy that the profile and the question make."""
    given = {
        choice.sets: choice.means(getattr(question, name))
        for name, choice in CHOICES.items()
        if choice.sets and getattr(question, name) != DEFAULTS[name]
    }
    if question.precision is not None:
        given["precision"] = DType(question.precision.removeprefix("autocast-"))
        given["autocast"] = question.precision.startswith("autocast-")
    # Formats of moments follow that of training, so the optimizer that is changed is the one of these.
    formats = {name: value for name, value in given.items() if name in ("precision", "autocast")}
    trained = settle_profile(profile, model, gpu, layout, formats).framework
    master, clips, usual = question.master_weights, question.clipping, trained.optimizer
    if question.optimizer is not None or master is not None or clips is not None:  # all else keeps its default
        chosen = usual
        if question.optimizer is not None:
            chosen = replace(parse_optimizer(question.optimizer, usual.master_weights, usual.clips), fused=usual.fused)
        master = chosen.master_weights if master is None else master
        given["optimizer"] = replace(chosen, master_weights=master, clips=chosen.clips if clips is None else clips)
    if question.bucket_mb == readers.AUTO:  # transformers, integrations/deepspeed.py, trainer_config_finalize
        given["bucket_bytes"] = round(model.hidden**2 * trained.gradient_dtype.bytes)
    return settle_profile(profile, model, gpu, layout, given)


def _load_experts(question: PredictQuestion, model: Model, strategy: Strategy, assumptions: list[str]) -> Strategy:
    """Return *strategy* with the imbalance that the stated load of experts causes among ranks and inside one."""
    from stepcast.cost.experts import busiest_share, power_law_draws, skew_of
    from stepcast.inputs.token_counts import read_expert_load

    word, experts, ranks = str(question.expert_load), model.experts, strategy.layout.ep
    assert experts is not None
    if word == "balanced":
        return strategy
    law, _, alpha = word.partition(":")
    tokens, replicas = float(strategy.micro_batch * strategy.seq * ranks), question.expert_replicas
    if law == "power-law":
        try:
            steepness = float(alpha or "1.2")
        except ValueError:
            steepness = 0.0
        require(0.1 <= steepness <= 5, f"--expert-load {word}: expected power-law:ALPHA with ALPHA from 0.1 to 5")
        draws = power_law_draws(experts.count, experts.top_k, steepness, tokens)
    else:
        draws = [read_expert_load(word)]
        if len(draws[0]) not in (experts.count, ranks):
            raise ValueError(
                f"--expert-load {word}: {len(draws[0])} loads, but {model.name} has {experts.count} experts "
                f"on {ranks} ranks"
            )
    share = sum(busiest_share(loads, ranks, replicas) for loads in draws) / len(draws)
    copies = f", {replicas} of the hottest experts copied" if replicas else ""
    if ranks > 1:
        assumptions.append(f"expert load {word}: the busiest of {ranks} ranks gets {share:.2f} times the mean{copies}")
    if len(draws[0]) != experts.count:
        assumptions.append("skew among the experts of one rank is not known from loads of ranks, and not counted")
        return replace(strategy, expert_imbalance=share)
    skews = [skew_of(loads, experts.top_k, ranks, tokens, replicas) for loads in draws]
    largest, blocks = (sum(values) / len(draws) for values in zip(*skews, strict=True))
    assumptions.append(
        f"expert load {word}: the largest expert gets {largest:.1f} times the mean, and experts of a rank fill "
        f"{blocks:.2f} times as many blocks of rows as equal ones"
    )
    return replace(strategy, expert_imbalance=share, largest_expert=largest, expert_blocks=blocks)


def describe_settled(settled: Settled) -> FactDict:
    """Return the facts that rules need, in the words of the choices."""
    choices, framework = settled.choices, settled.framework
    autocast = "autocast-" if choices.get("autocast") else ""
    same = "dispatcher kernels execution fused_experts writes_out dropout selective gradients=gradient_dtype"
    return {
        **pick(framework, same),
        "precision": f"{autocast}{choices['precision']}",
        "sharding": choices["sharding"],
        "cp_comm": choices["context"],
        "recompute": recompute_word(choices["recompute"]),
        "fused_update": framework.optimizer.kind is OptimizerKind.ADAMW and framework.optimizer.fused,
        "mtp_layers": choices["mtp_layers"],
    }


def _drop_idle(question: PredictQuestion, facts: Facts) -> FactDict:
    """Return the choices of a file that have no effect, each with its replacement: the words of a list that have
    one, else the default. A file may ask for what has no effect.
    """
    left: FactDict = {}
    for name in sorted({name for rule in rules_of("predict") for name in rule.options} - question.given):
        rules = [rule for rule in rules_of("predict") if name in rule.options and not rule.harmless]
        value, default = getattr(question, name), DEFAULTS[name]
        if value == default or all(rule.holds(name, facts) for rule in rules):
            continue
        kind, colon, words = str(value).rpartition(":")
        applying = []
        for word in words.split(","):
            changed = {**facts, name: f"{kind}{colon}{word}"}
            applying += [word] if all(rule.holds(name, changed) for rule in rules) else []
        words = f"{kind}{colon}{','.join(applying)}" if applying else "none"
        left[name] = words if name in LISTS else default
    return left


def _build_strategy(
    question: PredictQuestion, model: Model, layout: Layout, settled: Settled, usual_seq: int, assumptions: list[str]
) -> tuple[Strategy, float]:
    """Return the Strategy of a question, and the samples that one of its sequences holds."""
    seq, global_batch = _settle_batch(question, model, layout, usual_seq, assumptions)
    micro_batch, samples = question.micro_batch, 1.0
    choices = {"schedule": default_schedule(layout.vpp), **settled.choices}
    choices |= adapter_fields(question.lora_rank, settled.framework)
    # Groups of targets name the projections of all kinds of attention.
    if adapted := tuple(name for name in choices.get("lora_targets", ()) if count_adapted(model, (name,))):
        choices["lora_targets"] = adapted
    sequences = Objective(question.task or "sft").sequences
    if sequences > 1:
        micro_batch, global_batch = micro_batch * sequences, global_batch * sequences
        pairs = "pair of a micro-batch is" if question.micro_batch == 1 else "pairs of a micro-batch are"
        assumptions.append(f"{question.task}: {question.micro_batch} {pairs} {micro_batch} sequences")
    targets = set((question.lora_targets or "up").split(","))
    if question.lora_rank and model.experts is not None and targets & {"gate", "up", "down"}:
        count = model.experts.count
        assumptions.append(f"adapters on all {count} experts of a layer (--lora-targets attention leaves them out)")
    if question.lengths is not None:
        rounds = max(1, global_batch // (layout.dp * micro_batch))
        from stepcast.questions.lengths import read_lengths, shape_batches

        lengths, batching = read_lengths(question.lengths), question.batching or "padded"
        shape = shape_batches(lengths, batching, seq, micro_batch, rounds, layout.dp, 8 * layout.cp * layout.tp)
        seq, samples = shape.seq, shape.samples_per_sequence
        choices |= {"document": shape.document, "longest": shape.longest, "filled": shape.filled}
        assumptions.append(f"{shape.description}; throughput and MFU count the tokens of samples")
    strategy = replace(settled, choices=choices).strategy(layout, micro_batch, global_batch, seq)
    if strategy.micro_batches > MICRO_BATCHES.most:
        raise ValueError(
            f"{strategy.micro_batches:,} micro-batches in a step are more than {MICRO_BATCHES.most:,}: "
            "lower --global-batch, or raise --micro-batch or --gpus"
        )
    split = layout.dp * layout.cp > 1 and strategy.sharding.splits_parameters
    if split and layout.pp > 1 and strategy.reshard is None:
        assumptions.append("stages keep gathered weights and unsharded gradients in a step (--reshard frees them)")
    return strategy, samples


def adapter_fields(rank: int, framework: Framework) -> FactDict:
    """Return the fields of a Strategy that follow from the rank of adapters."""
    separate = bool(rank) and framework.modules is Modules.TRANSFORMERS
    return {"training": TrainingKind.LORA if rank else TrainingKind.FULL, "lora_separate": separate}


def _expand_lora(question: PredictQuestion, assumptions: list[str]) -> PredictQuestion:
    """Return the question with ``--lora`` split into its choices; quantised weights without one get peft's default."""
    if question.lora is None:
        if question.base_weights is None or question.lora_rank:
            return question
        assumptions.append(f"adapters of rank {PEFT_RANK} on {question.base_weights} weights, peft's default (--lora)")
        return msgspec.structs.replace(question, lora_rank=PEFT_RANK)
    choices = readers.split_lora(question.lora)
    for name, value in choices.items():
        if value and getattr(question, name) not in (DEFAULTS[name], value):
            raise ValueError(f"--lora {question.lora} and {option_of(name)} differ; leave one of them out")
    return msgspec.structs.replace(question, lora=None, **{name: value for name, value in choices.items() if value})


def _count_tokens(question: PredictQuestion, strategy: Strategy, samples_per_sequence: float) -> PredictQuestion:
    """Return the question with the tokens that its samples and epochs, or its steps, are trained on."""
    if question.tokens is not None or (question.samples is None and question.steps is None):
        return question
    steps = question.steps
    if question.samples is not None:
        per_step = strategy.global_batch / strategy.objective.sequences * samples_per_sequence
        steps = ceil(question.samples * (question.epochs or 1.0) / per_step)
    tokens = float(strategy.tokens) * (steps or 0)
    return msgspec.structs.replace(question, tokens=tokens, samples=None, epochs=None, steps=None)


def _settle_accumulation(question: PredictQuestion, layout: Layout) -> PredictQuestion:
    """Return the question without the accumulation of a file that states its global batch too; a file that leaves out
    the micro-batch means what is left for it, and one whose batches contradict each other is refused.
    """
    batch, rounds, micro = question.global_batch, question.accumulation, question.micro_batch
    if batch is None or rounds is None or not question.unchecked >= {"global_batch", "accumulation"}:
        return question
    if "micro_batch" not in question.unchecked:
        micro = max(1, batch // (layout.dp * rounds))
    if (meant := layout.dp * micro * rounds) != batch:
        gpus = layout.gpus // layout.dp * (batch // (micro * rounds))
        ways = [f"--gpus {gpus}"] if batch % (micro * rounds) == 0 else []
        ways += [f"--accumulation {batch // (micro * layout.dp)}"] if batch % (micro * layout.dp) == 0 else []
        raise ValueError(
            f"{question.file}: a global batch of {batch:,} is not micro-batch {micro:,} x accumulation {rounds:,} x "
            f"dp {layout.dp:,} = {meant:,}, so the job would not start: use "
            + " or ".join([*ways, f"--global-batch {meant}"])
        )
    return msgspec.structs.replace(question, micro_batch=micro, accumulation=None)


def _settle_batch(
    question: PredictQuestion, model: Model, layout: Layout, usual_seq: int, assumptions: list[str]
) -> tuple[int, int]:
    """Return the tokens of a sequence and the sequences of a step."""
    seq, global_batch = question.seq, question.global_batch
    if seq is None:
        seq = min(model.max_seq, usual_seq)
        assumptions.append(f"sequences of {seq} tokens (--seq)")
    if question.accumulation is not None:
        accumulated = layout.dp * question.micro_batch * question.accumulation
        if global_batch not in (None, accumulated):
            raise ValueError(
                f"--accumulation {question.accumulation} means a global batch of {accumulated:,} "
                f"(micro-batch x accumulation x dp), and --global-batch is {global_batch:,}: leave one of "
                "them out"
            )
        global_batch = accumulated
    if global_batch is None:
        global_batch = layout.dp * question.micro_batch * MICRO_BATCHES_PER_STAGE * layout.pp
        assumptions.append(f"a global batch of {global_batch} sequences (--global-batch)")
    note_batch(global_batch, seq, assumptions)
    return seq, global_batch


def note_batch(sequences: int, seq: int, assumptions: list[str]) -> None:
    """State that batches count sequences where a step would have more tokens than any known run."""
    if (tokens := sequences * seq) > MOST_TOKENS:
        near = f"--global-batch {max(1, round(sequences / seq)):,} is about {sequences:,} tokens"
        assumptions.append(f"{tokens:,} tokens in a step, since batches count sequences ({near})")


# ---- other jobs on the network -------------------------------------------------------------------------


def add_background(options: Options, question: PredictQuestion, cluster: Cluster, gpus: int) -> Options:
    """Return *options* with the other jobs and flows that the question's file describes, next to a run of *gpus*.

    Jobs run on the same *cluster*.
    """
    path = question.background
    if path is None:
        return options
    from stepcast.forecast.background import Neighbour, background_traffic
    from stepcast.hardware.background import read_background

    others: list[Neighbour | Pattern] = []
    try:
        for other in read_background(path):
            if not isinstance(other, OtherJob):
                others.append(other)
                continue
            usual = {"cluster": question.cluster, "set": question.set, "gpus": len(other.nodes) * cluster.node.gpus}
            with prefix_errors(other.name, path, (TypeError, ValueError)):
                prediction = settle(build_question(PredictQuestion, {**usual, **other.words})).prediction
            if prediction.cluster.node != cluster.node or prediction.cluster.topology != cluster.topology:
                raise FormatError(f"{other.name}: runs on another cluster; leave its cluster out", path)
            others.append(Neighbour(other.name, other.nodes, prediction, other.start_s))
        traffic, nodes = background_traffic(cluster, gpus, others)
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(str(error), path) from None
    return replace(options, others=traffic, network_nodes=nodes)
