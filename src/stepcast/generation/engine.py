"""Engine profiles: the decisions and overheads of vLLM, SGLang and TensorRT-LLM, as data with sources."""

import tomllib
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from stepcast.ir.tables import Amount, Count, Positive, Share, TableError, convert_table

FOLDER = Path(__file__).parents[1] / "data" / "engines"


class EngineProfile(Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """The decisions of a generation engine that change time or memory; seconds unless the name has a unit.

    *step_s* passes on the host between two steps and is hidden by nothing (scheduling, sampling, input
    preparation); *sequence_s* is added for each sequence of the batch. *request_s* is the way of a request to
    the first step and of its first token back (HTTP, tokenizer, router). *small_kernels* are the launches of a
    layer that are neither products nor attention, *kernel_s* the shortest time of each kernel of a CUDA graph.
    """

    name: str
    memory_share: Share  # of the GPU that weights and cache may fill
    reserved_gib: Amount  # context, graphs and activations, outside that share or inside it as the engine counts
    prefill_tokens: Count  # tokens of one step at most (chunked prefill cuts longer prompts)
    sequences: Count  # running at once at most
    mixes_prefill: bool  # decode tokens ride along in steps that prefill
    graph_batch: Count  # the largest decode batch that runs as a CUDA graph
    step_s: Amount
    sequence_s: Amount
    request_s: Amount
    waves: Positive  # requests of a client that share the queue of all clients' first ones, or of such as stay in step
    kernel_s: Amount
    small_kernels: Amount
    eager_layer_s: Amount  # host time of a layer outside CUDA graphs, which the GPU waits for if it is faster
    flash: bool  # decode attention is flash decoding, not TensorRT-LLM's kernel
    # Times over those of public tables: linear layers, fused experts, all-reduces, and steps that prefill.
    product_pace: Positive
    expert_pace: Positive
    reduce_pace: Positive
    prefill_pace: Positive
    sources: dict[str, str] = {}


def engine_names() -> tuple[str, ...]:
    """Return the names of the profiles that ship with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


@lru_cache(maxsize=16)
def load_engine(name: str) -> EngineProfile:
    """Return the profile *name*, or that of a TOML file."""
    words = {"tensorrt-llm": "trtllm", "trt-llm": "trtllm", "tensorrt_llm": "trtllm"}
    own = words.get(name.lower(), name.lower())
    path = FOLDER / f"{own}.toml" if own in engine_names() else Path(name)
    if not path.is_file():
        raise ValueError(f"unknown engine {name!r}; choose from {', '.join(engine_names())}, or give a TOML file")
    try:
        return convert_table(tomllib.loads(path.read_text(encoding="utf-8")), EngineProfile)
    except (TableError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
