"""Profiles of frameworks: the catalogue, users' own files, and what is wrong with them."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import stepcast
from stepcast.frameworks.catalog import Defaults, load_framework, load_profile, missing_features, settle
from stepcast.hardware.catalog import data_names
from stepcast.ir.framework import MEGATRON_CORE, Framework
from stepcast.ir.layout import Layout
from stepcast.ir.schedules import default_schedule
from stepcast.ir.types import DType
from stepcast.models.catalog import load_model

LLAMA = load_model("llama-3.1-8b")


def test_the_default_is_that_of_the_library() -> None:
    profile = load_profile("megatron-core")
    assert profile.framework == MEGATRON_CORE == Framework()
    assert profile.defaults == Defaults()


@pytest.mark.parametrize("name", data_names("frameworks"))
def test_every_profile_is_described_and_sourced(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.description
    # No value has its own file as its source.
    assert not [key for key, source in profile.sources.items() if source.endswith(".toml") and key != "extends"]


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
        ("[software]\nkernels = 'fast'\n", "mine.toml:2: software.kernels: 'fast' is not known; expected one of"),
        ("[software]\ndropout = 1\n", "software.dropout: 1 is not true or false"),
        ("[memory]\ncontext = 3\n", "memory.context: 3 has no unit"),
        ("[memory]\nfragmentation = -1\n", "fragmentation is below 0"),
        ("[defaults]\nrecompute = 'all'\n", "defaults.recompute: 'all': expected none, selective"),
        ("[defaults]\noverlap = ['everything']\n", "defaults.overlap: 'everything': expected gradients"),
        ("[defaults]\nseq = 0\n", "defaults.seq: must be at least 1, not 0"),
        ("extends = 'torchtitn'\n", "mine.toml:1: unknown framework 'torchtitn'; did you mean torchtitan"),
        ("extends = 'mine.toml'\n", "extends: cyclic include: mine.toml -> mine.toml"),
        ("extends = 3\n", "3 is not the name of a framework"),
        ("[[presets]]\nmodels = ['x']\nset = {dropout = true}\n", "mine.toml:1: presets.models: unknown key"),
        ("[[presets]]\nmodel = ['x']\n", "has no settings"),
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


@pytest.mark.parametrize("name", data_names("frameworks"))
def test_profiles_have_what_they_choose_by_default(name: str) -> None:
    profile = load_profile(name)
    for layout in (Layout(tp=2, dp=4), Layout(tp=2, dp=4, pp=4), Layout(tp=2, dp=4, pp=2, vpp=2)):
        if layout.pp > 1 and profile.supports.get("schedules") == ():
            continue
        settled = settle(profile, LLAMA, "h100-sxm", layout, {})
        strategy = settled.strategy(layout, 1, 64, 4096)
        kind = default_schedule(layout.vpp)
        if kind not in profile.supports.get("schedules", (kind,)):
            continue
        missing = missing_features(profile, replace(strategy, schedule=kind), settled.framework)
        # DeepSpeed refuses its default, ZeRO-3, in pipelines.
        assert [each for each in missing if "zero-3 sharding in a pipeline" not in each] == []


@pytest.mark.parametrize(
    ("framework", "choices", "lacks"),
    [
        ("megatron-core", {"pp": 4, "schedule": "dualpipe"}, "no dualpipe schedule (it has 1f1b, interleaved)"),
        ("megatron-core", {"pp": 4, "sharding": "fsdp"}, "no fsdp sharding in a pipeline"),
        ("megatron-core", {"optimizer": "adafactor"}, "no adafactor optimizer (it has adamw, adamw:bf16,"),
        ("megatron-lm", {"optimizer": "adamw:8bit"}, "no adamw:8bit optimizer"),
        ("megatron-bridge", {"optimizer": "muon:bf16"}, "no muon:bf16 optimizer"),
        ("deepspeed-zero", {"pp": 4, "sharding": "zero-2"}, "no zero-2 sharding in a pipeline"),
        ("torchtitan", {"recompute": "block:2"}, "no block recomputation"),
        ("torchtitan", {"cp": 2, "context": "all-to-all"}, "no a2a context-parallel exchange"),
        ("torchtitan", {"optimizer": "muon", "tp": 2}, "no muon optimizer with tensor or pipeline parallelism"),
        ("torchtitan", {"base_weights": "nf4"}, "no nf4 format of frozen weights (it has trained)"),
        ("transformers", {"pp": 2}, "no 1f1b schedule (nor any other)"),
        ("megatron-lm-2021", {"overlap": "gradients"}, "no gradients overlap (nor any other)"),
    ],
)
def test_predict_warns_of_what_the_software_lacks(framework: str, choices: dict[str, Any], lacks: str) -> None:
    values: dict[str, Any] = {"gpus": 16, "global_batch": 64, **choices}
    warnings = stepcast.predict("llama-3.1-8b", "dgx-h100", framework=framework, **values).report.warnings
    assert [each for each in warnings if f"{framework} has {lacks}" in each]


@pytest.mark.parametrize(
    ("framework", "optimizer"),
    [*(("megatron-core", word) for word in ("adamw:fp8", "sgd", "sgd-momentum")), ("generic", "adafactor")],
)
def test_predict_does_not_warn_of_optimizers_that_the_software_has(framework: str, optimizer: str) -> None:
    report = stepcast.predict("llama-3.1-8b", "dgx-h100", framework=framework, gpus=8, optimizer=optimizer).report
    assert not [each for each in report.warnings if f"{framework} has no" in each]


@pytest.mark.parametrize("framework", ["megatron-core", "torchtitan"])
def test_predict_does_not_warn_of_what_the_software_has(framework: str) -> None:
    for choices in ({"pp": 4}, {"pp": 4, "vpp": 2}, {"recompute": "full"}, {"cp": 2}, {"optimizer": "muon"}):
        values: dict[str, Any] = {"gpus": 16, "global_batch": 64, **choices}
        report = stepcast.predict("llama-3.1-8b", "dgx-h100", framework=framework, **values).report
        assert not [each for each in report.warnings if f"{framework} has no" in each]


def test_a_profile_without_lists_allows_everything(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('description = "mine"\n[software]\nexecution = "eager"\n')
    choices: dict[str, Any] = {"gpus": 16, "pp": 4, "schedule": "dualpipe", "global_batch": 64}
    report = stepcast.predict("llama-3.1-8b", "dgx-h100", framework=str(path), **choices).report
    assert not [each for each in report.warnings if "mine has no" in each]
    path.write_text('[supports]\nschedules = ["1f1b"]\n')
    report = stepcast.predict("llama-3.1-8b", "dgx-h100", framework=str(path), **choices).report
    assert "mine has no dualpipe schedule (it has 1f1b)" in report.warnings
    path.write_text('[supports]\nschedules = ["2f2b"]\n')
    with pytest.raises(ValueError, match=r"mine.toml:2: supports.schedules: '2f2b' is not known"):
        stepcast.predict("llama-3.1-8b", "dgx-h100", framework=str(path), **choices)


SEARCHED: tuple[dict[str, Any], ...] = ({}, {"any_framework": True})


def test_search_stays_inside_what_the_software_has() -> None:
    fixed: dict[str, Any] = {"gpus": 16, "global_batch": 64, "top": 50, "workers": 1}
    axes: dict[str, Any] = {"pp": (1, 4), "tp": (2,), "cp": (1,), "micro_batch": (1,), "recompute": ("none",)}
    axes["schedule"] = ("1f1b", "dualpipe", "zb-h1")
    inside, anything = (stepcast.search("llama-3.2-1b", "dgx-h100", axes=axes, **fixed, **asked) for asked in SEARCHED)
    profile = load_profile("megatron-core")
    assert not [each for each in inside.simulated if missing_features(profile, each.strategy, each.framework)]
    assert inside.counts.considered < anything.counts.considered
    with pytest.raises(ValueError, match="megatron-core has no schedule dualpipe"):
        stepcast.search("llama-3.2-1b", "dgx-h100", axes={**axes, "pp": (4,), "schedule": ("dualpipe",)}, **fixed)


def test_former_names_of_exchanges_are_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'extends = "megatron-core"\n[software]\ndispatcher = "forwarding"\n[defaults]\ncontext = "all-to-all"\n'
        '[supports]\ndispatchers = ["all-to-all"]\ncontexts = ["ring"]\n'
    )
    profile = load_profile(str(file))
    assert (str(profile.framework.dispatcher), str(profile.defaults.context)) == ("deepep", "a2a")
    assert (profile.supports["dispatchers"], profile.supports["contexts"]) == (("alltoall",), ("p2p",))
