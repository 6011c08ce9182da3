"""Lengths of samples: what is read, and what padding, grouping and packing make of them."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import stepcast
from stepcast.inputs.source import FormatError
from stepcast.questions.choices import ValueSpellingError, read_targets, split_lora
from stepcast.questions.lengths import SampleLengths, read_lengths, shape_batches


def test_equal_samples_fill_their_batches() -> None:
    lengths = read_lengths("512:1")
    for batching in ("padded", "grouped"):
        shape = shape_batches(lengths, batching, 2048, 4, 2, 8)
        assert (shape.seq, shape.longest, shape.document, shape.samples_per_sequence) == (512, 512, 0, 1.0)
    packed = shape_batches(lengths, "packed", 2048, 4, 2, 8)
    assert (packed.seq, packed.document, packed.samples_per_sequence) == (2048, 512, 4.0)


def test_padding_costs_most_and_grouping_hardly_anything() -> None:
    lengths = read_lengths("mean=600,max=4096")
    mean = float(lengths.tokens.mean())
    padded, grouped = (shape_batches(lengths, batching, 4096, 8, 1, 1) for batching in ("padded", "grouped"))
    assert grouped.seq < 1.1 * mean < padded.seq < 4096
    assert padded.longest == 4096
    more_ranks = shape_batches(lengths, "padded", 4096, 8, 1, 64)
    more_rounds = shape_batches(lengths, "padded", 4096, 8, 16, 64)
    assert padded.seq < more_rounds.seq < more_ranks.seq


def test_attention_of_packed_samples_is_weighted_by_tokens() -> None:
    lengths = SampleLengths(np.array([100.0, 300.0]), "two")
    assert shape_batches(lengths, "packed", 1000, 1, 1, 1).document == round((100**2 + 300**2) / 400)


def test_files_of_samples_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ({"input_ids": [1] * 7}, {"text": "x" * 40}, {"length": 30})))
    assert read_lengths(str(path)).tokens.tolist() == [7.0, 10.0, 30.0]
    path.write_text(json.dumps([{"messages": [{"role": "user", "content": "x" * 36}]}]))
    assert read_lengths(str(path)).tokens.tolist() == [10.0]


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"length": -3}', '{"length": 1e99}'])
def test_damaged_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(FormatError):
        read_lengths(str(path))


@pytest.mark.parametrize("text", ["", "3", "mean=0", "mean=9,max=3", "1:nan", "-5:1", "a:b", "5:0", "mean=5,median=3"])
def test_other_distributions_are_refused(text: str) -> None:
    with pytest.raises(ValueSpellingError):
        read_lengths(text)


def test_adapters_are_named_as_tools_name_them() -> None:
    assert split_lora("16") == {"lora_rank": 16, "lora_targets": None, "lora_dropout": 0.0}
    assert split_lora("16,32,q_proj+v_proj,0.05") == {
        "lora_rank": 16,
        "lora_targets": "query,value",
        "lora_dropout": 0.05,
    }
    assert read_targets("model.layers.0.self_attn.o_proj,mlp") == "output,gate,up,down"
    assert read_targets("all-linear") == ""
    with pytest.raises(ValueSpellingError, match="did you mean"):
        read_targets("q_prj")
    for wrong in ("", "x", "1.5", "16,32,0.1,0.2"):
        with pytest.raises(ValueSpellingError):
            split_lora(wrong)


def test_a_tokenizer_counts_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token a word here; prompts and answers count together."""

    class WordTokenizer:
        @staticmethod
        def from_pretrained(name: str) -> "WordTokenizer":
            return WordTokenizer()

        def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
            return {"input_ids": [[0] * len(text.split()) for text in texts]}

    path = tmp_path / "samples.jsonl"
    path.write_text('{"prompt": "two words", "answer": "and three more"}\n{"messages": [{"content": "one"}]}\n')
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=WordTokenizer))
    lengths = read_lengths(f"{path}@some/llama")
    assert lengths.tokens.tolist() == [5.0, 1.0]
    assert "the tokenizer llama, without a chat template" in lengths.source
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="needs the package transformers"):
        read_lengths(f"{path}@some/other")


def test_samples_that_are_not_padded_keep_their_mean() -> None:
    lengths = read_lengths("100:0.5,8000:0.5")
    shape = shape_batches(lengths, "padded", 4096, 1, 1, 1)
    assert shape.seq == pytest.approx((100 + 4096) / 2, rel=0.02)
    assert "100 % of them samples" in shape.description


@pytest.mark.parametrize("batching", ["padded", "grouped", "packed"])
def test_padding_is_neither_trained_on_nor_needed(batching: str) -> None:
    asked: dict[str, Any] = {"model": "llama-3.2-1b", "cluster": "dgx-h100", "gpus": 8, "framework": "trainer"}
    asked |= {"global_batch": 16, "seq": 2048, "lengths": "300:0.5,900:0.5", "batching": batching}
    of_samples = stepcast.predict(**asked, samples=100_000).to_dict()
    of_tokens = stepcast.predict(**asked, tokens=60e6).to_dict()
    assert of_samples["training"]["tokens"] == pytest.approx(60e6, rel=0.01)
    assert of_samples["training"]["steps"] == pytest.approx(of_tokens["training"]["steps"], rel=0.01)
    length = of_samples["strategy"]["seq"]
    full = stepcast.predict(**{**asked, "lengths": None, "batching": None, "seq": length})
    if batching != "packed":
        share = of_samples["tokens_per_s"] * of_samples["step_s"] / (16 * length)
        assert share == pytest.approx(600 / length, rel=0.01)
        assert of_samples["mfu"] == pytest.approx(full.to_dict()["mfu"] * share, rel=0.02)
