"""Words that people use: other names of options, units, GPUs; and suggestions that are right."""

from typing import Any

import pytest

from stepcast.cli.main import OTHER_VERBS, build_parser
from stepcast.cli.main import VERBS as OWN_VERBS
from stepcast.cli.options import other_names
from stepcast.questions.choices import alias_flags
from stepcast.questions.question import PredictQuestion
from tests.cli.test_main import run, run_json

pytestmark = pytest.mark.slow

LLAMA = ("predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100")


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (("--gpus", "16", "--tensor-parallel", "2"), ("--gpus", "16", "--tp", "2")),
        (("--num_gpus", "16", "--tensor_model_parallel_size=2"), ("--gpus", "16", "--tp", "2")),
        (("--world-size", "16", "-tp", "2"), ("--gpus", "16", "--tp", "2")),
        (("--nodes", "2", "--TP", "2"), ("--gpus", "16", "--tp", "2")),
        (("--nnodes", "2"), ("--gpus", "16")),
        (("--dp", "8", "--tp", "2"), ("--gpus", "16", "--tp", "2")),
        (("--gpus", "16", "--zero", "3"), ("--gpus", "16", "--sharding", "zero-3")),
        (("--gpus", "16", "--zero-stage=2"), ("--gpus", "16", "--sharding", "zero-2")),
        (("--gpus", "16", "--zero3"), ("--gpus", "16", "--sharding", "zero-3")),
        (("--gpus", "16", "--sharding", "ZeRO-3"), ("--gpus", "16", "--sharding", "zero-3")),
        (("--gpus", "16", "--sharding", "FULL_SHARD"), ("--gpus", "16", "--sharding", "fsdp")),
        (("--gpus", "16", "--fsdp"), ("--gpus", "16", "--sharding", "fsdp")),
        (("--gpus", "16", "--ddp"), ("--gpus", "16", "--sharding", "none")),
        (("--gpus", "16", "--dtype", "BF16"), ("--gpus", "16", "--precision", "bf16")),
        (("--gpus", "16", "--precision", "bfloat16"), ("--gpus", "16", "--precision", "bf16")),
        (("--gpus", "16", "--fp8"), ("--gpus", "16", "--precision", "fp8")),
        (("--gpus", "16", "--seq", "8k"), ("--gpus", "16", "--seq", "8192")),
        (("--gpus", "16", "--seq-length", "8K"), ("--gpus", "16", "--seq", "8192")),
        (("--gpus", "16", "--seq", "8,192"), ("--gpus", "16", "--seq", "8192")),
        (("--gpus", "1k"), ("--gpus", "1024")),
        (("--gpus", "16", "--gbs", "64", "--mbs", "2"), ("--gpus", "16", "--global-batch", "64", "--micro-batch", "2")),
        (("--gpus", "16", "--gradient-checkpointing"), ("--gpus", "16", "--recompute", "full")),
        (("--gpus", "16", "--recompute", "Full"), ("--gpus", "16", "--recompute", "full")),
        (("--gpus", "16", "--pp", "4", "--schedule", "1F1B"), ("--gpus", "16", "--pp", "4", "--schedule", "1f1b")),
        (("--gpus", "16", "--framework", "hf"), ("--gpus", "16", "--framework", "transformers")),
        (("--gpus", "16", "--backend", "Megatron"), ("--gpus", "16", "--framework", "megatron-core")),
        (("--gpus", "16", "--tokens", "15 trillion"), ("--gpus", "16", "--tokens", "15T")),
        (
            ("--gpus", "16", "--tokens", "1T", "--price", "$2.50/hr"),
            ("--gpus", "16", "--tokens", "1T", "--price", "2.5"),
        ),
        (
            ("--gpus", "16", "--set", "node.nic.bandwidth=200Gbps"),
            ("--gpus", "16", "--set", "node.nic.bandwidth=200 Gb/s"),
        ),
    ],
)
def test_other_words_mean_the_same(
    capsys: pytest.CaptureFixture[str], said: tuple[str, ...], meant: tuple[str, ...]
) -> None:
    def answer(words: tuple[str, ...]) -> Any:
        found = run_json(capsys, *LLAMA, *words)
        found.pop("command")
        return found

    assert answer(said) == answer(meant)


@pytest.mark.parametrize(
    ("where", "gpu", "gpus"),
    [
        (("--gpu", "h200"), "h200", 1),
        (("--gpu", "RTX 4090"), "rtx-4090", 1),
        (("--gpu", "NVIDIA GeForce RTX 3090"), "rtx-3090", 1),
        (("--gpu", "5090", "--gpus", "4"), "rtx-5090", 4),
        (("--gpu", "RTX 6000 Ada"), "rtx-6000-ada", 1),
        (("--gpu", "rtx-pro-6000"), "rtx-pro-6000", 1),
        (("--gpu", "l40s"), "l40s", 1),
        (("--gpu", "a10"), "a10", 1),
        (("--gpu", "a30"), "a30", 1),
        (("--gpu", "gh200"), "gh200", 1),
        (("--cluster", "a100"), "a100-sxm-80gb", 8),
        (("--cluster", "H100 SXM5"), "h100-sxm", 8),
        (("--cluster", "l40s", "--gpus", "4"), "l40s", 4),
    ],
)
def test_any_gpu_is_a_place_to_run(
    capsys: pytest.CaptureFixture[str], where: tuple[str, ...], gpu: str, gpus: int
) -> None:
    found = run_json(capsys, "predict", "--model", "llama-3.2-1b", *where, "--seq", "1024")
    assert (found["gpu"], found["gpus"]) == (gpu, gpus)
    assert found["step_s"] > 0


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ((*LLAMA, "--gpus", "64", "--tp", "10"), "use --tp 8 or 16"),
        ((*LLAMA, "--gpus", "60", "--tp", "8"), "use --gpus 56 or 64, or --tp 4"),
        ((*LLAMA, "--gpus", "64", "--tp", "2", "--dp", "8"), "--dp means 16 GPUs"),
        (LLAMA, "--gpus 64, --nodes 8, or --dp"),
        ((*LLAMA[:3], "--gpus", "8"), "use --cluster NAME or --gpu NAME"),
        (("predict", "--cluster", "dgx-h100", "--gpus", "8"), "use --model with a name from 'stepcast list models'"),
        ((*LLAMA, "--gpu", "h100", "--gpus", "8"), "--gpu and --cluster both"),
        (
            (*LLAMA[:3], "--cluster", "h100", "--gpus", "64"),
            "one node of dgx-h100; clusters of any size: --cluster dgx-h100",
        ),
        ((*LLAMA[:3], "--cluster", "tpu-v4"), "tpu-v5p, tpu-v6e and trainium2"),
        ((*LLAMA, "--gpus", "8", "--tensr-parallel", "2"), "did you mean --tensor-parallel"),
        ((*LLAMA, "--gpus", "8", "--precision", "bf15"), "did you mean bf16"),
        (("estimate", "--model", "llama-3.1-8b"), "did you mean predict?"),
        (("autotune", "--model", "llama-3.1-8b"), "did you mean search?"),
    ],
)
def test_suggestions_are_right(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], answer: str) -> None:
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert answer in err


def test_other_words_lead_to_options_that_exist() -> None:
    """And to none that some verb has under the very word."""
    own: set[str] = set()
    for verb in OWN_VERBS:
        parser = build_parser([verb])
        sub = parser._subparsers._group_actions[0].choices[verb.name]  # type: ignore[union-attr, index]
        own |= {option for action in sub._actions for option in action.option_strings}
    for ours in {*other_names().values(), *(option for option, _ in alias_flags(PredictQuestion).values())}:
        assert f"--{ours}" in own, ours
    assert set(OTHER_VERBS.values()) <= {verb.name for verb in OWN_VERBS}
    assert not set(OTHER_VERBS) & {verb.name for verb in OWN_VERBS}
    assert not set(other_names()) & set(alias_flags(PredictQuestion))
