"""Profiles of frameworks: the catalogue, users' own files, and what is wrong with them."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from stepcast.frameworks.catalog import framework_names, load_framework, load_profile
from stepcast.frameworks.profile import Defaults, settle
from stepcast.ir.dtype import DType
from stepcast.ir.framework import MEGATRON_CORE, Framework
from stepcast.ir.layout import Layout
from stepcast.models.catalog import load_model

LLAMA = load_model("llama-3.1-8b")


def test_the_default_is_that_of_the_library() -> None:
    profile = load_profile("megatron-core")
    assert profile.framework == MEGATRON_CORE == Framework()
    assert profile.defaults == Defaults()


@pytest.mark.parametrize("name", framework_names())
def test_every_profile_is_described_and_sourced(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.description
    # No value has its own file as its source.
    assert not [
        key for key, source in profile.sources.items() if source.endswith(".toml") and key != "extends"
    ]


def test_the_default_states_every_field() -> None:
    stated = {key.partition(".")[2] for key in load_profile("megatron-core").sources}
    named = {"gradient_dtype": "gradients", "bucket_bytes": "bucket"}
    inner = {"name", "optimizer", "overhead"}
    assert {named.get(field.name, field.name) for field in fields(Framework)} - inner <= stated


def test_gradients_may_follow_the_training_precision() -> None:
    profile = load_profile("megatron-lm-2021")
    formats = [
        settle(profile, LLAMA, "a100-sxm-80gb", Layout(), {"precision": precision}).framework.gradient_dtype
        for precision in (DType.FP16, DType.BF16)
    ]
    assert formats == [DType.FP16, DType.BF16]
    transformers = settle(load_profile("transformers"), LLAMA, "h200", Layout(), {"precision": DType.FP32})
    assert transformers.framework.optimizer.moment_dtype is DType.FP32


def test_a_users_file_builds_on_others(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('extends = "torchtitan"\n[software]\nexecution = "graphs"\n')
    path = tmp_path / "mine.toml"
    path.write_text(
        'extends = "base.toml"\n[memory]\ncontext = "2 GB"\n[[presets]]\nmodel = ["llama"]\n'
        'set = { dropout = true }\n[defaults]\nrecompute = "full"\n'
    )
    profile = load_profile(str(path))
    torchtitan = load_framework("torchtitan")
    assert profile.name == "mine"
    assert profile.framework.execution == "graphs"
    assert profile.framework.attention == torchtitan.attention
    assert profile.framework.overhead.context_bytes == 2e9
    assert profile.defaults.recompute.kind == "full"
    assert settle(profile, LLAMA, "h200", Layout()).framework.dropout
    assert not settle(profile, load_model("gpt3-6.7b"), "h200", Layout()).framework.dropout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[software]\nkernel = 'fused'\n", "mine.toml:2: software.kernel: unknown key; did you mean"),
        (
            "[software]\nkernels = 'fast'\n",
            "mine.toml:2: software.kernels: 'fast' is not known; expected one of",
        ),
        ("[software]\ndropout = 1\n", "software.dropout: 1 is not true or false"),
        ("[memory]\ncontext = 3\n", "memory.context: 3 has no unit"),
        ("[memory]\nfragmentation = -1\n", "fragmentation is below 0"),
        ("[defaults]\nrecompute = 'all'\n", "defaults.recompute: 'all': expected none, selective"),
        ("[defaults]\noverlap = ['everything']\n", "defaults.overlap: 'everything': expected gradients"),
        ("[defaults]\nseq = 0\n", "defaults.seq: 0 is not a whole number above zero"),
        ("extends = 'torchtitn'\n", "mine.toml:1: unknown framework 'torchtitn'; did you mean torchtitan"),
        ("extends = 'mine.toml'\n", "builds on itself"),
        ("extends = 3\n", "3 is not the name of a framework"),
        ("[[presets]]\nmodels = ['x']\nset = {dropout = true}\n", "mine.toml:1: presets.models: unknown key"),
        ("[[presets]]\nmodel = ['x']\n", "sets nothing"),
        ("[[presets]]\nset = {speed = 1}\n", "presets.set.speed: unknown key"),
        ("[sources]\nspeed = 'x'\n", "sources.speed: names no key of a profile"),
        ("[software\n", "not valid TOML"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_profile(str(path))
    assert "\n" not in str(error.value)


def test_an_unknown_name_says_which_are_known() -> None:
    with pytest.raises(ValueError, match="unknown framework 'torch-tytan'; did you mean torchtitan"):
        load_profile("torch-tytan")
    assert load_profile("Megatron_Core").name == "megatron-core"
