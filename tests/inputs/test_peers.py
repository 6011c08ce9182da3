"""Inputs of Calculon, SimuMax, ASTRA-sim and SimAI: runs, models and networks."""

import json
from pathlib import Path

import pytest

import stepcast
from stepcast.cli.main import main
from stepcast.inputs.configs.reader import read_config
from stepcast.inputs.source import FormatError
from stepcast.inputs.table import read
from stepcast.ir.model import Model
from tests.shared import ROOT

PEERS = ROOT / "examples" / "peers"


def test_calculon() -> None:
    config = read_config(PEERS / "calculon-execution.json")
    assert config.format == "calculon"
    assert config.options["gpus"] == 64
    assert (config.options["recompute"], config.options["sharding"], config.options["sequence-parallel"]) == (
        "full",
        "none",
        False,
    )
    assert not config.unknown
    model: Model = read(PEERS / "calculon-model.json")
    assert (model.layers, model.hidden, model.ffn) == (96, 12288, 49152)
    assert model.vocab == -(-50_257 // 1024) * 1024  # GPT-2's, padded to 128 words on each of 8 ranks
    prediction = stepcast.predict(
        model=str(PEERS / "calculon-model.json"), cluster="dgx-a100", config=PEERS / "calculon-execution.json"
    )
    # Korthikanti et al. (2022), table 5: 18.13 s with full recomputation.
    assert prediction.report.step_s == pytest.approx(18.13, rel=0.2)


def test_simumax(tmp_path: Path) -> None:
    config = read_config(PEERS / "simumax-strategy.json")
    assert config.format == "simumax"
    assert (config.options["global-batch"], config.options["ep"], config.options["sharding"]) == (32, 4, "zero-1")
    model: Model = read(PEERS / "simumax-model.json")
    assert model.experts
    assert (model.experts.count, model.experts.top_k) == (8, 2)
    latent = {"attention_type": "mla", "hidden_size": 7168, "head_num": 128, "kv_head_num": 128, "head_size": 128, "intermediate_size": 18432, "moe_ffn_hidden_size": 2048,
              "moe_shared_expert_intermediate_size": 2048, "layer_num": 61, "dense_layers": 3, "expert_num": 256, "v_head_dim": 128, "qk_head_dim": 128,
              "qk_pos_emb_head_dim": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "topk": 8, "vocab_size": 129280, "use_swiglu": True}  # fmt: skip
    (tmp_path / "v3.json").write_text(json.dumps(latent))
    big: Model = read(tmp_path / "v3.json")
    assert big.parameters == stepcast.load_model("deepseek-v3").parameters
    grouped = {key: value for key, value in latent.items() if "lora" not in key and key != "qk_pos_emb_head_dim"}
    (tmp_path / "glm.json").write_text(json.dumps({**grouped, "attention_type": "mha"}))
    glm: Model = read(tmp_path / "glm.json")
    assert glm.experts
    assert (glm.experts.first_dense, glm.experts.shared_ffn, glm.latent) == (3, 2048, None)


def test_recomputed_layers_of_simumax_are_reported(tmp_path: Path) -> None:
    table = json.loads((PEERS / "simumax-strategy.json").read_text())
    path = tmp_path / "run.json"
    for granularity, recompute, reported in (
        ("full_block", "full", "recompute_layer_num"),
        ("selective_recompute", "selective", "mlp_recompute"),
    ):
        words = {"recompute_granularity": granularity, "recompute_layer_num": 4, "mlp_recompute": True}
        path.write_text(json.dumps({**table, "enable_recompute": True, **words}))
        config = read_config(path)
        assert (config.options["recompute"], reported in config.not_modelled) == (recompute, True)
    path.write_text(json.dumps({**table, "enable_recompute": True, "recompute_granularity": "full_block"}))
    assert read_config(path).options["recompute"] == "none"


def test_an_option_that_is_not_modelled_is_reported(tmp_path: Path) -> None:
    table = json.loads((PEERS / "calculon-execution.json").read_text())
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**table, "optimizer_offload": True, "tensor_par_overlap": "ring", "speed": 1}))
    config = read_config(path)
    assert set(config.not_modelled) == {"optimizer_offload", "tensor_par_overlap"}
    assert set(config.unknown) == {"speed"}


def test_networks(tmp_path: Path) -> None:
    astra, simai, calculon = (
        read(PEERS / name) for name in ("astra-network.yml", "simai-topology.txt", "calculon-system.json")
    )
    assert (astra.gpus, astra.nodes, astra.fabric_bytes_per_s, astra.nic_bytes_per_s) == (8, 16, 300e9, 25e9)
    assert (simai.gpu, simai.gpus, simai.nodes, simai.nics) == ("h100-sxm", 8, 2, 8)
    assert (simai.fabric_bytes_per_s, simai.nic_bytes_per_s) == (360e9, 50e9)
    assert (calculon.gpus, calculon.nic_bytes_per_s) == (8, 25e9)
    text = (PEERS / "astra-network.yml").read_text()
    for kind, reduces in (("Ring", False), ("Switch", True)):
        (tmp_path / "network.yml").write_text(text.replace("[ Switch,", f"[ {kind},"))
        assert main(["convert", str(tmp_path / "network.yml"), str(tmp_path / "it.toml"), "--gpu", "h100-sxm"]) == 0
        assert stepcast.load_cluster(str(tmp_path / "it.toml")).node.fabric.in_switch_reduction is reduces


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("astra-network.yml", "25.0", "fast", "must be numbers"),
        ("astra-network.yml", "[ 8, 16 ]", "[ 8 ]", "for each dimension"),
        ("astra-network.yml", "16", "99999999", "GPUs"),
        ("simai-topology.txt", "20 8 2 2", "19 8 2 2", "no multiple of 8"),
        ("simai-topology.txt", "5 18 400Gbps", "5 18", "expected a link"),
        ("calculon-system.json", '"size": 8', '"size": 0', "above zero"),
        ("calculon-system.json", '"bandwidth": 25,', '"speed": 25,', "is no system of Calculon"),
    ],
)
def test_damaged_networks(tmp_path: Path, name: str, old: str, new: str, said: str) -> None:
    text = (PEERS / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new))
    with pytest.raises(FormatError, match=said):
        read(tmp_path / name)
