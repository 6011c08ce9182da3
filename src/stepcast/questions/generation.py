"""The question of ``stepcast generate``: a model, an engine, its GPUs and the requests."""

from dataclasses import replace
from typing import Annotated

from msgspec import structs

from stepcast.generation.engine import GenerationFormats, GenerationLayout, Speculation, load_engine
from stepcast.generation.forecast import GenerationForecast, GenerationTask, forecast_generation
from stepcast.generation.lengths import Lengths, parse_lengths
from stepcast.hardware import Cluster, load_cluster
from stepcast.hardware.catalog import check_gpu_count
from stepcast.inputs.source import prefix_errors
from stepcast.ir.architecture import EXPERT_FORMATS, WEIGHT_FORMATS
from stepcast.ir.model import Model
from stepcast.ir.types import DType
from stepcast.models.catalog import load_model
from stepcast.questions.choices import Choice, Question, choices_of, count, gpu_count, read_word, share, state_defaults
from stepcast.questions.question import check_rules

CLIENTS = 16
read_engine = read_word({"trtllm": "tensorrt-llm trt-llm tensorrt", "vllm": "v-llm"})
LENGTH_HELP = (
    "in tokens: 2048, uniform:500-1500, lognormal:mean=3000,cv=0.8,max=8192 (or normal, exponential), or a file with "
    "one length a line"
)


class GenerateQuestion(Question, frozen=True, kw_only=True):
    """A question about generation."""

    # fmt: off
    model: str | None = None
    cluster: str | None = None
    set: tuple[str, ...] = ()
    engine: Annotated[str, Choice(read=read_engine)] = "vllm"
    gpus: Annotated[int | None, Choice(read=gpu_count)] = None
    tp: Annotated[int, Choice(read=gpu_count)] = 1
    pp: Annotated[int, Choice(read=gpu_count)] = 1
    ep: Annotated[int, Choice(read=gpu_count)] = 1
    dp: Annotated[int, Choice(read=gpu_count)] = 1
    weights: Annotated[str | None, Choice(values=WEIGHT_FORMATS)] = None
    kv_cache: Annotated[str | None, Choice(values=("bf16", "fp8"))] = None
    memory_share: Annotated[float | None, Choice(read=share)] = None
    speculative_tokens: Annotated[int, Choice(read=count(0, 16))] = 0
    acceptance: Annotated[float | None, Choice(read=share)] = None
    prompt_length: Annotated[str, Choice(help=f"prompt length {LENGTH_HELP} (default: 1024)")] = "1024"
    response_length: str = "1024"
    concurrency: Annotated[int | None, Choice(read=count(1, 10**7))] = None
    requests: Annotated[int | None, Choice(read=count(1, 10**6))] = None
    group: Annotated[int, Choice(read=count(1, 10**5))] = 1
    # fmt: on


def load_nouns(
    model: Model | str | None, cluster: Cluster | str | None, changes: tuple[str, ...]
) -> tuple[Model, Cluster]:
    """Return the model and the cluster of a question, which both are needed."""
    if model is None:
        raise ValueError("no model given: use --model NAME")
    if cluster is None:
        raise ValueError("no cluster given: use --cluster NAME")
    return load_model(model), load_cluster(cluster, changes) if isinstance(cluster, str) else cluster


def formats_of(weights: str, cache: str | None) -> GenerationFormats:
    """Return the number formats that the words of options mean."""
    experts = {"int4": DType.BF16, "int4-experts": DType.BF16, "mxfp4": DType.FP4}.get(weights) or DType(weights)
    dense = DType.BF16 if weights in EXPERT_FORMATS else experts
    return GenerationFormats(dense, experts, DType(cache or "bf16"), weights == "int4", weights == "int4-experts")


def answer_generation(question: GenerateQuestion) -> GenerationForecast:
    """Return the forecast that *question* asks for."""
    if question.requests is not None and question.concurrency is not None:
        raise ValueError("--concurrency and --requests exclude each other: steady clients, or a batch to completion")
    check_rules("generate", question.given, structs.asdict(question))
    model, cluster = load_nouns(question.model, question.cluster, question.set)
    ways = GenerationLayout(tp=question.tp, pp=question.pp, dp=question.dp, ep=question.ep)
    gpus = question.gpus or ways.engine_gpus
    if gpus % ways.engine_gpus:
        raise ValueError(f"--gpus {gpus} is not a multiple of the {ways.engine_gpus} GPUs of one engine")
    check_gpu_count(cluster, gpus)
    layout = GenerationLayout(ways.tp, ways.pp, ways.dp, ways.ep, gpus // ways.engine_gpus)
    prompt = read_lengths("prompt-length", question.prompt_length)
    response = read_lengths("response-length", question.response_length)
    clients = CLIENTS if question.requests is None and question.concurrency is None else question.concurrency
    task = GenerationTask(prompt, response, clients, question.requests, question.group)
    if question.weights in EXPERT_FORMATS and model.experts is None:
        raise ValueError(f"--weights {question.weights} is a format of experts, and {model.name} has none")
    formats = formats_of(question.weights or model.published_weights, question.kv_cache)
    engine = load_engine(question.engine)
    speculation = Speculation(question.speculative_tokens, 0.85 if question.acceptance is None else question.acceptance)
    forecast = forecast_generation(model, cluster, layout, formats, engine, task, question.memory_share, speculation)
    given = question.given | ({"concurrency"} if question.requests is not None else set())
    defaults = state_defaults(question, choices_of(GenerateQuestion).keys() - given)
    if question.weights is None:
        defaults.append(f"{formats.word} weights, as {model.name} is published (--weights)")
    return replace(forecast, assumptions=(*defaults, *forecast.assumptions))


def read_lengths(option: str, text: str) -> Lengths:
    """Return the lengths that the text of an option states."""
    with prefix_errors(f"--{option}"):
        return parse_lengths(text)
