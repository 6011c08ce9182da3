"""Generation: memory, batches and serving, against values that can be computed by hand."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepcast
from stepcast.generation.engine import GenerationFormats, GenerationLayout, generation_memory, load_engine, step_times
from stepcast.generation.forecast import generate_batch, queue_s, split_serving, steady_serving
from stepcast.generation.lengths import Lengths, parse_lengths
from stepcast.hardware import load_cluster, load_gpu
from stepcast.hardware.catalog import data_names
from stepcast.ir.types import DType
from stepcast.models.catalog import load_model
from tests.cli.test_main import run, run_json

LLAMA = ("generate", "llama-3.1-8b", "--cluster", "dgx-h100")


@pytest.mark.parametrize(
    ("model", "tp", "cache", "size"),
    [
        ("llama-3.1-8b", 1, "bf16", 32 * 2 * 8 * 128 * 2),
        ("llama-3.1-8b", 8, "fp8", 32 * 2 * 1 * 128),
        ("llama-3.1-70b", 16, "bf16", 80 * 2 * 1 * 128 * 2),  # a KV head is repeated where ranks outnumber heads
        ("deepseek-v3", 8, "bf16", 61 * 576 * 2),  # the compressed vector, on every rank
        ("deepseek-v3.2", 1, "fp8", 61 * (576 + 132)),
        ("qwen3-next-80b-a3b", 1, "bf16", 12 * 2 * 2 * 256 * 2),  # a quarter of the layers
    ],
)
def test_the_cache_of_a_token_is_exact(model: str, tp: int, cache: str, size: int) -> None:
    cluster = stepcast.load_cluster("hgx-h200")
    memory = generation_memory(
        stepcast.load_model(model),
        GenerationLayout(tp=tp),
        GenerationFormats(cache=DType(cache)),
        cluster.gpu,
        load_engine("vllm"),
    )
    assert memory.token_bytes == size


def test_fewer_bytes_of_weights_take_as_much_less_time_as_reading_them() -> None:
    """One sequence on an H100: 3.35 TB/s (NVIDIA's data sheet) bound the weights of a token, and what fp8 and 4 bits save
    of the 6.98e9 weights of layers is within a third of what their bytes save; inputs of fp8 products are quantised.
    """
    steps = {
        word: stepcast.predict_generation("llama-3.1-8b", "h100", weights=word, concurrency=1).to_dict()[
            "decode_step_s"
        ]
        for word in ("bf16", "fp8", "int4")
    }
    weights = 6.98e9
    assert steps["bf16"] > 2 * (weights + 128_256 * 4096) / 3.35e12
    for word, size in (("fp8", 1.0), ("int4", 0.5)):
        assert steps["bf16"] - steps[word] == pytest.approx((2 - size) * weights / 3.35e12, rel=0.33)


def test_windows_bound_the_cache() -> None:
    model = stepcast.load_model("gpt-oss-120b")
    gpu = stepcast.load_cluster("dgx-h100").gpu
    formats = GenerationFormats(DType.BF16, DType.NVFP4)
    memory = generation_memory(model, GenerationLayout(tp=2), formats, gpu, load_engine("vllm"))
    row = 2 * 4 * 64 * 2 * 18
    assert memory.held_bytes(4096) == 4096 * row + 128 * row


@pytest.mark.parametrize(
    ("model", "engine", "gpu", "tp", "formats", "share", "gib"),
    [
        ("llama-3.1-70b", "vllm", "h100-sxm", 1, (DType.FP8, DType.FP8), 0.98, 6.74),  # vLLM pull request 12569
        ("gpt-oss-20b", "vllm", "a100-sxm-80gb", 1, (DType.BF16, DType.FP4), 0.65, 36.56),  # vLLM 0.19
        ("qwen3-235b-a22b", "sglang", "h100-sxm", 4, (DType.FP8, DType.FP8), 0.93, 16.46),  # vLLM issue 21348
    ],
)
def test_the_cache_is_that_of_startup_logs(
    model: str, engine: str, gpu: str, tp: int, formats: tuple[DType, DType], share: float, gib: float
) -> None:
    layout = GenerationLayout(tp=tp)
    memory = generation_memory(
        stepcast.load_model(model), layout, GenerationFormats(*formats), load_gpu(gpu), load_engine(engine), share
    )
    assert memory.cache_bytes / 2**30 == pytest.approx(gib, rel=0.05)


def test_the_output_layer_is_on_the_last_stage_alone() -> None:
    """Llama 3.1 8B has 8.03 B parameters, 0.53 B of them in its embedding and as many in its output layer: the first of
    two stages holds one of these, the last the other. A tied output layer is a copy of the embedding there.
    """
    gpu, engine = load_gpu("h100-sxm"), load_engine("vllm")

    def weight_bytes(model: str, pp: int) -> float:
        return generation_memory(
            load_model(model), GenerationLayout(pp=pp), GenerationFormats(), gpu, engine
        ).weight_bytes

    end, tied_end = 128_256 * 4096 * 2, 151_936 * 1024 * 2
    assert weight_bytes("llama-3.1-8b", 2) == pytest.approx(weight_bytes("llama-3.1-8b", 1) / 2, rel=1e-5)
    blocks = weight_bytes("llama-3.1-8b", 1) - 2 * end
    assert weight_bytes("llama-3.1-8b", 4) == pytest.approx(blocks / 4 + end, rel=1e-5)
    assert weight_bytes("qwen3-0.6b", 2) == pytest.approx(
        (weight_bytes("qwen3-0.6b", 1) - tied_end) / 2 + tied_end, rel=1e-5
    )


def test_int4_weights_have_a_scale_of_16_bits_for_each_64() -> None:
    assert GenerationFormats(int4=True).weight_bytes(experts=False) == (4 + 16 / 64) / 8


@pytest.mark.parametrize(("dtype", "bits"), [("nvfp4", 4 + 8 / 16), ("fp4", 4 + 8 / 32), ("mxfp8", 8 + 8 / 32)])
def test_blocks_of_weights_have_a_scale_of_8_bits(dtype: str, bits: float) -> None:
    """NVFP4 has a scale for each 16 values, the MX formats (OCP 2023) for each 32."""
    assert GenerationFormats(DType(dtype)).weight_bytes(experts=False) == bits / 8


@pytest.mark.parametrize(("model", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_weights_are_in_the_format_of_the_published_checkpoint(model: str, gib: float) -> None:
    """The checkpoints of OpenAI's model card (2025, table 1) have experts in mxfp4 and all else in bf16."""
    served, named = (stepcast.predict_generation(model, "b200", weights=word) for word in (None, "fp8"))
    assert served.memory.weight_bytes / 2**30 == pytest.approx(gib, rel=0.01)
    assert f"mxfp4 weights, as {model} is published (--weights)" in served.assumptions
    assert named.facts()["weights"] == "fp8"
    assert not any("is published" in text for text in named.assumptions)


def test_experts_alone_of_kimi_k2_5_are_in_int4() -> None:
    """The checkpoint has 384 experts in 60 layers with 4 bits and a bf16 scale for each 32 weights; all else is bf16."""
    model = load_model("moonshotai/Kimi-K2.5")
    served = stepcast.predict_generation("kimi-k2.5", "dgx-b200", tp=8)
    experts = 60 * 384 * 3 * 7168 * 2048
    shard = model.shard_of(range(61), tp=8, ep=1, expert_tp=8, embedding=True, head=True)
    assert shard.experts == experts / 8
    assert served.memory.weight_bytes == experts / 8 * 4.5 / 8 + shard.dense * 2
    assert "int4-experts weights, as kimi-k2.5 is published (--weights)" in served.assumptions
    assert load_model("kimi-k2").published_weights == "fp8"
    assert model.parameters == load_model("kimi-k2").parameters
    # Attention is read in bf16, so a step takes longer than with all weights in int4.
    all_int4 = stepcast.predict_generation("kimi-k2.5", "dgx-b200", tp=8, weights="int4")
    assert all_int4.facts()["tpot_s"] < served.facts()["tpot_s"]


def test_an_unknown_format_of_published_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    sizes = "layers = 2\nhidden = 64\nheads = 2\nffn = 128\nvocab = 100\nmax_seq = 64"
    path.write_text(f'{sizes}\npublished_weights = "fp3"\n')
    with pytest.raises(
        ValueError, match="published_weights must be one of bf16, fp8, nvfp4, mxfp4, int4, int4-experts"
    ):
        load_model(str(path))


def test_as_many_sequences_run_as_fit_at_their_mean_length() -> None:
    """A response of 2,000 tokens holds 1,000 on average while it grows: 2,000 with its prompt."""
    facts = stepcast.predict_generation(
        "llama-3.1-8b", "dgx-h100", concurrency=8, prompt_length="1000", response_length="2000"
    ).facts()
    memory = facts["memory_bytes"]
    assert facts["concurrency_that_fits"] == memory["cache"] // (2000 * memory["cache_per_token"])


def moe_steps(**layout: int) -> Any:
    return step_times(
        load_model("qwen3-30b-a3b"),
        load_cluster("dgx-h100"),
        GenerationLayout(**layout),
        GenerationFormats(),
        load_engine("vllm"),
    )


def test_a_batch_reads_the_experts_that_it_chose_and_tensor_ranks_share_them() -> None:
    """16 tokens choose 1 - (1 - 8/128)^16 = 64 % of the experts, 64 tokens 98 %; their weights are most of the step."""
    seconds = moe_steps().decode_s(np.array([16.0, 64.0]), np.full(2, 100.0))
    assert seconds[0] < 0.75 * seconds[1]
    chosen, alone = np.array([64.0]), moe_steps(replicas=1)
    split_s = moe_steps(tp=4)._experts_s(chosen)
    assert split_s[0] == pytest.approx(moe_steps(tp=4, ep=4)._experts_s(chosen)[0], rel=0.3)
    assert split_s[0] < 0.4 * alone._experts_s(chosen)[0]


def test_tiles_of_experts_grow_with_more_tokens_than_a_rank_has_experts() -> None:
    """vLLM, fused_moe.py, get_default_config: tiles of 16 rows up to as many tokens as the rank has experts, then of 64.

    Of 128 experts 16 are on each of 8 ranks; no list of tuned tiles has them on an A100.
    """
    parts = load_model("qwen3-30b-a3b"), load_cluster("dgx-a100"), GenerationLayout(tp=8, ep=8), GenerationFormats()
    seconds = step_times(*parts, load_engine("vllm"))._experts_s(np.array([15.0, 16.0, 17.0, 127.0, 128.0, 129.0]))
    more_s = np.diff(seconds)
    assert more_s[1] > 3 * more_s[0]
    assert more_s[4] == pytest.approx(more_s[3], rel=0.5)


def test_a_step_that_only_prefills_reads_no_cache() -> None:
    steps, one = moe_steps(), np.array([1.0])
    none, chunk = np.array([0.0]), np.array([512.0])
    seconds = [steps.mixed_s(none, context * one, chunk, none)[0] for context in (1.0, 1e6)]
    assert seconds[0] == seconds[1]
    assert steps.mixed_s(one, 1e6 * one, chunk, none)[0] > seconds[0]


def test_a_response_meets_half_of_itself_on_average() -> None:
    """The context of a request of 1,000 and 4,000 tokens grows from 1,000 to 5,000."""
    steps = step_times(
        load_model("llama-3.1-8b"),
        load_cluster("dgx-h100"),
        GenerationLayout(),
        GenerationFormats(),
        load_engine("vllm"),
    )
    rollout = generate_batch(steps, np.array([1000.0]), np.array([4000.0]), 1)
    step_s = float(steps.decode_s(np.array([1.0]), np.array([3000.0]))[0])
    assert rollout.seconds - rollout.prefill_s == pytest.approx(4000 * step_s)


def test_all_engines_generate_the_tokens_of_a_batch() -> None:
    answer = stepcast.predict_generation("qwen3-8b", "dgx-h100", requests=60, gpus=4, response_length="500")
    assert answer.seconds is not None
    assert answer.tokens_per_s * answer.seconds == pytest.approx(60 * 500)


def test_a_queue_of_equal_services_is_half_as_long_as_one_of_random_ones() -> None:
    """Pollaczek and Khinchine: with a utilisation of 1/2, requests wait half a service (a whole one if exponential).

    A single client waits for nobody.
    """
    one = np.array([1.0])
    assert queue_s(1000 * one, 1998.5 * one, one, 1.0)[0] == pytest.approx(1.5, rel=0.01)
    assert queue_s(one, 5 * one, one, 1.0)[0] == 1.0
    # 1,000 clients that never pause keep four servers busy.
    assert queue_s(1000 * one, 0 * one, one, 4.0)[0] == pytest.approx(250, rel=0.01)


def test_sparse_attention_reads_the_keys_that_its_indexer_chose() -> None:
    """DeepSeek-V3.2 reads 2,048 latents of a context; the indexer's keys are a ninth of all latents' bytes."""
    cluster, long = stepcast.load_cluster("hgx-h200"), np.array([131_072.0])
    dense_s, sparse_s = (
        step_times(
            load_model(name), cluster, GenerationLayout(tp=8), GenerationFormats(), load_engine("vllm")
        ).attention_s(np.array([32.0]), long)[0]
        for name in ("deepseek-v3", "deepseek-v3.2")
    )
    assert sparse_s < 0.3 * dense_s


def test_an_indexer_has_kernels_of_its_own() -> None:
    """One sequence of a short context reads as many latents with an indexer, whose kernels each take a launch."""
    cluster, engine, one = stepcast.load_cluster("hgx-h200"), load_engine("sglang"), np.array([1.0])
    dense_s, sparse_s = (
        step_times(load_model(name), cluster, GenerationLayout(tp=8), GenerationFormats(), engine).attention_s(one, one)
        for name in ("deepseek-v3", "deepseek-v3.2")
    )
    assert sparse_s - dense_s == pytest.approx(61 * 12 * engine.kernel_s, rel=0.01)


def test_all_reduces_of_long_prompts_are_those_of_nccl() -> None:
    """8,192 tokens of Llama 3.1 70B: 134 MB, which nccl-tests reduce at 480 GB/s of bus bandwidth on 8 H100; a token is
    reduced by kernels of the engine, in less time than NCCL starts.
    """
    cluster = stepcast.load_cluster("dgx-h100")
    steps = step_times(
        load_model("llama-3.1-70b"), cluster, GenerationLayout(tp=8), GenerationFormats(), load_engine("sglang")
    )
    short_s, long_s = steps._exchange_s(np.array([1.0, 8192.0]), 0) / 160
    assert long_s == pytest.approx(2 * 7 / 8 * 8192 * 8192 * 2 / 480e9, rel=0.25)
    assert short_s < 12e-6


@pytest.mark.parametrize(
    ("model", "layers", "state", "channels"),
    [
        ("qwen3-next-80b-a3b", 36, 32 * 128 * 128, 2 * 2048 + 4096),
        ("nemotron-h-8b", 24, 8192 * 128, 8192 + 2 * 8 * 128),
        ("jamba-v0.1", 28, 8192 * 16, 8192),
    ],
)
def test_a_sequence_of_a_recurrent_layer_is_its_state_and_three_inputs(
    model: str, layers: int, state: int, channels: int
) -> None:
    """States are in fp32, and the last three inputs of a convolution of four taps in bf16."""
    memory = generation_memory(
        load_model(model), GenerationLayout(), GenerationFormats(), load_gpu("b200"), load_engine("vllm")
    )
    assert memory.sequence_bytes == layers * (state * 4 + channels * 3 * 2)


@pytest.mark.parametrize("shape", ["lognormal", "exponential"])
def test_drawn_lengths_vary_as_much_as_stated(shape: str) -> None:
    lengths = Lengths(1000.0, shape, 1.0).draw(20_000)
    assert lengths.mean() == pytest.approx(1000, rel=1e-3)
    assert lengths.std() / lengths.mean() == pytest.approx(1.0, rel=0.01)


def test_experts_of_their_own_ranks_get_tokens_by_low_latency_kernels() -> None:
    cluster, model = stepcast.load_cluster("dgx-h100"), stepcast.load_model("deepseek-v3")
    formats, batch, context = GenerationFormats(DType.FP8, DType.FP8), np.array([8.0]), np.array([2048.0])
    apart, shared = (
        step_times(model, cluster, GenerationLayout(dp=32, ep=ep), formats, load_engine("sglang")) for ep in (32, 16)
    )
    assert apart.decode_s(batch, context) < 0.8 * shared.decode_s(batch, context)


@pytest.mark.parametrize("name", data_names("engines"))
def test_larger_batches_and_contexts_take_longer_and_engines_are_complete(name: str) -> None:
    cluster, engine = stepcast.load_cluster("dgx-h100"), load_engine(name)
    steps = step_times(
        stepcast.load_model("qwen3-30b-a3b"), cluster, GenerationLayout(tp=2, ep=2), GenerationFormats(), engine
    )
    batch = np.array([1.0, 4.0, 16.0, 64.0, 256.0])
    assert (np.diff(steps.decode_s(batch, np.full(5, 1024.0))) > 0).all()
    assert (np.diff(steps.decode_s(np.full(5, 64.0), batch * 100)) > 0).all()
    assert engine.sources


def test_a_batch_obeys_its_limit_and_counts_its_tokens() -> None:
    cluster = stepcast.load_cluster("dgx-h100")
    steps = step_times(
        stepcast.load_model("qwen3-8b"), cluster, GenerationLayout(), GenerationFormats(), load_engine("vllm")
    )
    responses = parse_lengths("lognormal:mean=600,cv=1,max=4096").draw(200)
    prompts = np.full(200, 100.0)
    rollout = generate_batch(steps, prompts, responses, 32, 4)
    assert rollout.largest_batch == 32
    assert rollout.tokens == responses.sum()
    assert rollout.finish_s.max() == pytest.approx(rollout.seconds)
    # More room is never slower, and one sequence after another is the sum of each alone.
    assert generate_batch(steps, prompts, responses, 64, 4).seconds < rollout.seconds
    alone = [generate_batch(steps, prompts[i : i + 1], responses[i : i + 1], 1) for i in range(3)]
    queued = generate_batch(steps, prompts[:3], responses[:3], 1)
    assert queued.seconds == pytest.approx(sum(each.seconds for each in alone), rel=0.01)
    # The first token of each comes after its own prompt, and after the responses before it where there is no room.
    assert [each.ttft_s for each in alone] == [each.prefill_s for each in alone]
    waits_s = 2 * alone[0].seconds + alone[1].seconds
    assert queued.ttft_s == pytest.approx((waits_s + queued.prefill_s) / 3, rel=0.01)


def test_thousands_of_long_responses_are_few_events() -> None:
    facts = stepcast.predict_generation(
        "qwen3-8b", "dgx-h100", requests=2048, group=16, response_length="lognormal:mean=9000,cv=1,max=32k"
    ).facts()
    assert facts["batch_s"] > facts["tail_s"] > 0
    assert facts["curve"][-1]["time_s"] == pytest.approx(facts["batch_s"])


@pytest.mark.parametrize("shape", ["lognormal", "exponential", "uniform", "normal"])
def test_lengths_keep_their_mean_after_the_cut(shape: str) -> None:
    lengths = parse_lengths(f"{shape}:mean=900,max=1024,min=10").draw(4000)
    assert lengths.mean() == pytest.approx(900, rel=0.01)
    assert lengths.min() >= 10
    assert lengths.max() <= 1024


def test_lengths_of_a_file_and_ranges(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("100\n300\n\n500\n")
    assert parse_lengths(str(file)).mean == 300
    assert parse_lengths("uniform:500-1500").draw(1000).std() == pytest.approx(1000 / math.sqrt(12), rel=0.01)
    assert parse_lengths("2k") == Lengths(2048.0)
    file.write_text("100\nmany\n")
    with pytest.raises(ValueError, match="line 2"):
        parse_lengths(str(file))


@pytest.mark.parametrize(
    "text", ["0", "-5", "nan", "inf", "many", "lognormal:cv=1", "lognormal:mean=9,max=5", "uniform:9-5", "normal:x=1"]
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_lengths(text)


def test_the_command_and_its_twin_agree(capsys: pytest.CaptureFixture[str]) -> None:
    facts = run_json(capsys, *LLAMA, "--concurrency", "32", "--tp", "2", "--gpus", "4")
    twin = stepcast.predict_generation("llama-3.1-8b", "dgx-h100", concurrency=32, tp=2, gpus=4).facts()
    assert {key: facts[key] for key in twin} == twin
    assert facts["layout"]["replicas"] == 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--tp", "3"), "does not divide the 32 attention heads"),
        (("--ep", "2", "--tp", "2"), "0 experts"),
        (("--dp", "2"), "use replicas"),
        (("--requests", "5", "--concurrency", "5"), "exclude each other"),
        (("--group", "4"), "use --requests as well"),
        (("--gpus", "3", "--tp", "2"), "not a multiple"),
        (("--engine", "mine"), "unknown engine"),
        (("--prompt-length", "1e9"), "prompt-length"),
        (("--memory-share", "0.1"), "the engine reserves 3.0 GiB, 0.00 GiB are left of what it may use of"),
        (("--weights", "int4-experts"), "a format of experts, and llama-3.1-8b has none"),
        (("--weights", "mxfp4"), "a format of experts, and llama-3.1-8b has none"),
    ],
)
def test_questions_without_an_answer_are_refused(
    words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, *LLAMA, *words)
    assert status != 0
    assert problem in " ".join(err.split())


def test_decode_steps_of_a_loop_with_graphs_on_an_h200() -> None:
    """The steps were measured with PyTorch 2.11: a static cache, fused attention, one CUDA graph a step."""
    cluster, engine, errors = stepcast.load_cluster("hgx-h200"), load_engine("graph-loop"), []
    lines = (Path(__file__).parents[1] / "data" / "decode_h200.csv").read_text().splitlines()[1:]
    for name, batch, context, seconds in (line.split(",") for line in lines):
        steps = step_times(stepcast.load_model(name), cluster, GenerationLayout(), GenerationFormats(), engine)
        predicted = float(steps.decode_s(np.array([float(batch)]), np.array([float(context)]))[0])
        errors.append(abs(predicted / float(seconds) - 1))
    assert len(errors) == 30
    assert np.median(errors) < 0.06
    assert max(errors) < 0.11


def test_drafted_tokens_help_small_batches_most() -> None:
    def gain(concurrency: int) -> float:
        asked = {"tp": 8, "weights": "fp8", "concurrency": concurrency}
        alone = stepcast.predict_generation("deepseek-v3", "hgx-h200", **asked).tpot_s  # type: ignore[arg-type]
        drafted = stepcast.predict_generation("deepseek-v3", "hgx-h200", speculative_tokens=1, **asked)  # type: ignore[arg-type]
        return alone / drafted.tpot_s

    assert 1.2 < gain(1) < 1.86
    assert gain(256) < gain(1)


def test_clients_beyond_the_places_of_decode_engines_wait() -> None:
    parts = load_model("llama-3.1-8b"), GenerationLayout(), GenerationFormats()
    steps = step_times(parts[0], load_cluster("dgx-h100"), *parts[1:], load_engine("trtllm"))
    memory = generation_memory(*parts, steps.cluster.gpu, steps.engine)
    clients = np.array([6.0, 8.0, 9.0, 12.0, 24.0])
    served = split_serving(steps, steps, memory, (2.0, 3.0), clients, 1024.0, 1024.0)
    assert served.running.tolist() == [6.0, 6.0, 9.0, 12.0, 24.0]  # 3 engines of 2, 2, 3, 4 and 8
    assert served.ttft_s[1] - served.ttft_s[0] == pytest.approx(1024 * served.tpot_s[1] / 3, rel=0.05)
    assert split_serving(steps, steps, memory, (2.0, None), clients, 1024.0, 1024.0).waiting.max() == 0.0


def test_a_lone_client_waits_for_its_prompt_alone() -> None:
    engine = load_engine("vllm")
    alone = stepcast.predict_generation("llama-3.1-8b", "h100", concurrency=1)
    assert alone.prefill_s is not None
    assert alone.ttft_s == pytest.approx(engine.request_s + alone.prefill_s)


def test_prompts_that_wait_share_a_step() -> None:
    parts, engine = (load_model("llama-3.1-8b"), GenerationLayout(), GenerationFormats()), load_engine("sglang")
    steps = step_times(parts[0], load_cluster("dgx-h100"), *parts[1:], engine)
    memory = generation_memory(*parts, steps.cluster.gpu, engine)
    served = steady_serving(steps, memory, np.array([1.0, 128.0]), 1024.0, 1024.0)
    # Of 128 prompts that arrive at once, eight share a step of 8,192 tokens, which takes less than eight steps.
    assert served.ttft_s[1] - engine.request_s < 128 / 2 / engine.waves * served.prompt_s[1]


def test_requests_beyond_the_model_and_drafts_without_a_module_are_stated() -> None:
    choices: dict[str, Any] = {"cluster": "dgx-h100", "prompt_length": 200_000, "speculative_tokens": 1}
    for task in ("concurrency", "requests"):
        found = stepcast.predict_generation(model="llama-3.1-8b", **{**choices, task: 2}).facts()
        assert found["warnings"] == ["requests of 201,024 tokens are longer than the 131,072 of llama-3.1-8b"]
        assert any("llama-3.1-8b has no module that drafts" in text for text in found["assumptions"])
        choices_of_one: dict[str, Any] = {"cluster": "dgx-h100", "response_length": 1, task: 2}
        single = stepcast.predict_generation(model="llama-3.1-8b", **choices_of_one)
        assert "the time per output token has no meaning" in single.warnings[0]


@pytest.mark.parametrize(
    ("cluster", "weights", "note"),
    [
        ("dgx-a100", "fp8", "no fp8 matrix units"),
        ("dgx-h100", "nvfp4", "no nvfp4 matrix units"),
        ("dgx-h100", "fp8", ""),
    ],
)
def test_weights_that_a_gpu_cannot_multiply_are_stated(cluster: str, weights: str, note: str) -> None:
    answer = stepcast.predict_generation(model="llama-3.1-8b", cluster=cluster, weights=weights)
    assert any("matrix units" in text and note in text for text in answer.assumptions) == bool(note)


@pytest.mark.parametrize(("cluster", "is_stated"), [("dgx-a100", True), ("dgx-h100", False)])
def test_a_cache_that_a_gpu_cannot_multiply_is_stated(cluster: str, is_stated: bool) -> None:
    answer = stepcast.predict_generation(model="llama-3.1-8b", cluster=cluster, kv_cache="fp8")
    assert any("fp8 KV cache, products in bf16" in text for text in answer.assumptions) == is_stated


def test_a_gpu_may_be_named_as_in_predict(capsys: pytest.CaptureFixture[str]) -> None:
    by_gpu, by_cluster = (run_json(capsys, *LLAMA[:2], name, "h200") for name in ("--gpu", "--cluster"))
    assert by_gpu["tpot_s"] == by_cluster["tpot_s"]


def apart(ranks: tuple[int, int], prompt: float, workers: tuple[float | None, float], rate: str = "400 Gb/s") -> Any:
    """Return steady serving with engines of *ranks* that prefill and decode, as a function of the clients."""
    model, cluster = load_model("llama-3.1-8b"), load_cluster("dgx-h100", [f"node.nic.bandwidth={rate}"])
    layouts, formats = [GenerationLayout(tp=tp) for tp in ranks], GenerationFormats()
    prefill, decode = (step_times(model, cluster, layout, formats, load_engine("vllm")) for layout in layouts)
    memory = generation_memory(model, layouts[1], formats, cluster.gpu, decode.engine)
    return lambda clients: split_serving(prefill, decode, memory, workers, np.array([clients]), prompt, 1024.0)


@pytest.mark.parametrize("ranks", [(2, 4), (4, 2)])
def test_the_cache_of_a_prompt_crosses_the_nics_of_the_smaller_engine(ranks: tuple[int, int]) -> None:
    """8,192 tokens of Llama 3.1 8B, 2 x 8 x 128 x 32 numbers each in bf16: 1.07 GB over two NICs."""
    fast, slow = (apart(ranks, 8192.0, (1.0, 1.0), rate)(1.0).ttft_s[0] for rate in ("400 Gb/s", "200 Gb/s"))
    assert slow - fast == pytest.approx(8192 * 2 * 8 * 128 * 32 * 2 / 2 * (1 / 25e9 - 1 / 50e9))


def test_prefill_engines_of_unknown_number_are_busier_than_they_can_be() -> None:
    """Their number is the demand over 1.15, the ratio fitted to published runs: as if that many were stated."""
    prompt = 16_384.0  # as many tokens as a step takes, so that prompts do not share one
    served = apart((1, 1), prompt, (None, 8.0))(64.0)
    cycle_s = 1024 * served.tpot_s[0] + served.prompt_s[0]
    engines = float(served.running[0] * served.prompt_s[0] / cycle_s / 1.15)
    assert engines > 1.0
    assert served.ttft_s[0] == pytest.approx(apart((1, 1), prompt, (engines, 8.0))(64.0).ttft_s[0])


def test_the_indexer_of_sparse_attention_reads_the_keys_of_all_tokens() -> None:
    """DeepSeek-V3.2: keys of 128 in fp8 with a scale of four bytes in each of 61 layers, at 90 % of 4.8 TB/s; of the
    latents, 2,048 are read from either context.
    """
    parts = load_model("deepseek-v3.2"), load_cluster("hgx-h200"), GenerationLayout(tp=8), GenerationFormats()
    steps, batch = step_times(*parts, load_engine("vllm")), np.array([32.0, 32.0])
    short_s, long_s = steps.attention_s(batch, np.array([65_536.0, 131_072.0]))
    assert long_s - short_s == pytest.approx(61 * 32 * 65_536 * 132 / (0.9 * 4.8e12))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "graph-loop"])
@pytest.mark.parametrize("response", [16, 1024])
@pytest.mark.parametrize("clients", [1, 64, 4096])
def test_clients_are_throughput_times_latency(engine: str, response: int, clients: int) -> None:
    """Little's law: every client always waits for one response."""
    asked: dict[str, Any] = {"engine": engine, "concurrency": clients, "response_length": str(response)}
    served = stepcast.predict_generation("llama-3.1-8b", "dgx-h100", tp=2, **asked)
    latency_s = served.ttft_s + (response - 1) * served.tpot_s
    assert served.tokens_per_s / response * latency_s == pytest.approx(clients)


def test_a_batch_of_one_is_its_first_token_and_the_others() -> None:
    asked: dict[str, Any] = {"requests": 1, "prompt_length": "8192", "response_length": "64"}
    batch = stepcast.predict_generation("qwen2.5-7b", "h20", **asked)
    assert batch.ttft_s + 64 * batch.tpot_s == pytest.approx(batch.seconds)
    assert batch.ttft_s == batch.prefill_s
