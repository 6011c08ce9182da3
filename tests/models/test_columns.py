"""Models from rows of measurement tables."""

import csv

import pytest

from stepcast.models.catalog import UnknownModelError, load_model, model_of_columns
from tests.shared import DATA, needs_data


def test_a_known_name_with_its_own_sizes() -> None:
    model = model_of_columns("deepseekv3-l4", {"layers": "4.0", "moe_dense_layers": "1.0", "seq": "4096"})
    assert model.layers == 4
    assert model.expert_layers == 3
    assert model.latent == load_model("deepseek-v3").latent


def test_learned_positions_follow_the_sequence() -> None:
    long = model_of_columns("mpt-125m", {"seq": 65536})
    assert f"{long.parameters / 1e9:.3f}" == "0.174"  # as llm-foundry prints it
    assert model_of_columns("llama3-8b", {"seq": 16384}).parameters == load_model("llama3-8b").parameters


def test_an_unknown_gpt_from_its_sizes() -> None:
    row = {"layers": 24, "hidden": 2048, "heads": 16, "vocab": 131072, "seq": 4096, "params_b": 1.7}
    model = model_of_columns("gpt-1.7B-h100", row)
    assert not model.tied  # 1.75 billion; tied weights would make 1.49
    assert not model.gated


def test_layers_follow_from_parameters() -> None:
    model = model_of_columns("bloom-tuning-195B", {"hidden": 14400, "vocab": 250000, "params_b": 195})
    assert abs(model.parameters / 195e9 - 1) < 0.01
    assert model.hidden % model.heads == 0


def test_an_unknown_llama() -> None:
    row = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 172, "vocab": 100, "seq": 32}
    model = model_of_columns("mine", row)
    assert model.gated
    assert model.parameters == 2 * (3 * 64 * 64 + 3 * 64 * 172 + 2 * 64) + 2 * 6400 + 64


def test_too_little_to_go_by() -> None:
    with pytest.raises(UnknownModelError, match="no hidden size"):
        model_of_columns("mystery", {"layers": 3})
    with pytest.raises(UnknownModelError, match="neither layers nor params_b"):
        model_of_columns("mystery", {"hidden": 64})
    with pytest.raises(ValueError, match="column hidden: 'wide' is not a number"):
        model_of_columns("mystery", {"hidden": "wide"})
    with pytest.raises(ValueError, match="column layers"):
        model_of_columns("gpt2", {"layers": 1.5})


@needs_data("published")
def test_every_published_run_has_its_model() -> None:
    """All rows but the one of DeepSeek-V4-Flash, whose architecture is not described here."""
    missing = set()
    with open(DATA / "published" / "training_runs.csv") as file:
        for row in csv.DictReader(file):
            try:
                model = model_of_columns(row["model"], row)
            except UnknownModelError:
                missing.add(row["model"])
                continue
            if row["params_b"] and not row["model"].startswith("bloom-tuning"):
                assert abs(model.parameters / 1e9 / float(row["params_b"]) - 1) < 0.05, row["model"]
    assert missing <= {"deepseek-v4-flash"}


@needs_data("h200")
def test_measured_models_have_the_counted_parameters() -> None:
    for file_name in ("models.csv", "models_compiled_moe.csv"):
        with open(DATA / "h200" / file_name) as file:
            for row in csv.DictReader(file):
                name = row["model"].replace("mixtral-mini", "mixtral-8x7b")
                assert load_model(name).parameters == int(row["params"])
