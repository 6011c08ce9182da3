"""Hugging Face config.json: every family reads to the catalogue's model, and junk to one clear error."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepcast
from stepcast.inputs.huggingface.reader import FAMILIES, looks_like, read, read_config
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Activation, QkNorm
from stepcast.models.catalog import catalogue_model, load_model
from tests.inputs.huggingface_configs import CONFIGS


def as_json(config: object) -> bytes:
    return json.dumps(config, indent=2).encode()


def without_unused_ffn(model: Model) -> Model:
    """Configs give a dense width even where every layer has experts; it names no weight. What the code of a
    family does besides, a catalogue of architectures does not say.
    """
    written = (Activation.GELU_NEW, Activation.GELU_BLOOM)
    plain = Activation.GELU if model.activation in written else model.activation
    model = replace(model, joined=False, wide_norms=False, dropout=0.0, drops_attention=False, activation=plain)
    position = replace(model.position, share=1.0, tailed=False)
    experts = model.experts and replace(model.experts, wide_weights=False)
    model = replace(model, position=position, experts=experts)
    dense = any(block.feed_forward == "dense" for block in model.blocks)
    return model if dense else replace(model, ffn=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_is_the_catalogue_model(name: str) -> None:
    expected = replace(catalogue_model(name), source="")
    model = read_config(as_json(CONFIGS[name]), name)
    assert without_unused_ffn(model) == without_unused_ffn(expected)
    assert model.parameters == expected.parameters


def test_every_family_but_aliases_has_a_config() -> None:
    covered = {config["model_type"] for config in CONFIGS.values()}
    covered |= {inner["model_type"] for c in CONFIGS.values() if (inner := c.get("text_config"))}
    aliases = {"granite", "grok", "internlm2", "kimi_k2", "smollm3"}
    elsewhere = {kind for kind in FAMILIES if "_vl" in kind} | {"glm4_moe"}  # test_huggingface_types.py
    assert set(FAMILIES) - covered == aliases | elsewhere


def changed(name: str, **changes: Any) -> Model:
    return read_config(as_json(CONFIGS[name] | changes), name)


def test_learned_positions_and_biases_of_mpt() -> None:
    attention = {"alibi": False}
    model = changed("mpt-7b-alibi", attn_config=attention, no_bias=False, vocab_size=50368)
    assert model.parameters == catalogue_model("mpt-7b").parameters == 6_658_859_008


def test_qwen_window_starts_at_max_window_layers() -> None:
    model = changed("qwen2.5-7b", use_sliding_window=True, max_window_layers=20, sliding_window=4096)
    assert [block.window for block in model.blocks] == [None] * 20 + [4096] * 8


def test_mlp_only_layers_and_sparse_step() -> None:
    model = changed("qwen3-30b-a3b", decoder_sparse_step=2, mlp_only_layers=[1])
    routed = [index for index, block in enumerate(model.blocks) if block.feed_forward == "experts"]
    assert routed == list(range(3, 48, 2))


def test_dense_deepseek_and_latent_biases() -> None:
    model = changed("deepseek-v3", n_routed_experts=None, attention_bias=True)
    assert model.experts is None
    unbiased = changed("deepseek-v3", n_routed_experts=None)
    assert model.parameters - unbiased.parameters == 61 * (1536 + 512 + 64 + 7168)


def test_phi_with_normed_queries_and_keys() -> None:
    model = changed("phi-2", qk_layernorm=True)
    assert model.qk_norm is QkNorm.HEAD
    assert model.parameters - catalogue_model("phi-2").parameters == 32 * 2 * 2 * 80


def test_architectures_stand_in_for_a_missing_type() -> None:
    config = {key: value for key, value in CONFIGS["llama-3.1-8b"].items() if key != "model_type"}
    assert read_config(as_json(config), "x").parameters == 8_030_261_248


def test_reads_a_file_named_after_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "My-Llama"
    folder.mkdir()
    file = folder / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + as_json(CONFIGS["llama-3.2-1b"]))
    model = read(Source(file))
    assert (model.name, model.parameters) == ("My-Llama", 1_235_814_400)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ('{"model_type": "llama"', True),
        ('\ufeff\n {\n "architectures" : ["X"]', True),
        ('{"d_model": 1, "n_heads": 2, "n_layers": 3}', True),
        ('{"hidden_size": 1, "vocab_size": 2}', False),
        ('{"traceEvents": [], "model_type": "x"}', False),
        ('["model_type"]', False),
        ('model_type: "llama"', False),
        ("", False),
    ],
)
def test_recognises(head: str, expected: bool) -> None:
    assert looks_like(head) is expected


LLAMA = CONFIGS["llama-3.1-8b"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"model_type": "t5"}, "unknown model_type 't5': it has an encoder"),
        ({"hidden_size": 4}, "names no model_type; docs/models.md lists"),
        ([LLAMA], "expected a JSON object with a model's sizes, not a list"),
        (LLAMA | {"hidden_size": None}, "the llama config lacks hidden_size"),
        (LLAMA | {"hidden_size": "4096"}, "hidden_size must be a whole number of at least 1, not '4096'"),
        (LLAMA | {"hidden_size": -1}, "hidden_size must be a whole number of at least 1, not -1"),
        (LLAMA | {"hidden_size": True}, "hidden_size must be a whole number"),
        (LLAMA | {"hidden_size": 10**50}, "hidden_size must be a whole number of at least 1, not"),
        (LLAMA | {"num_hidden_layers": 0.5}, "num_hidden_layers must be a whole number"),
        (LLAMA | {"num_hidden_layers": 10**7}, "layers must be at most 10,000"),
        (LLAMA | {"num_attention_heads": 7}, "hidden size 4096 is not a multiple of 7 attention heads"),
        (LLAMA | {"num_key_value_heads": 5}, "heads 32 is not a multiple of kv_heads 5"),
        (LLAMA | {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, not 'no'"),
        (LLAMA | {"hidden_act": "sine"}, "unknown activation 'sine'; known: silu"),
        (CONFIGS["mixtral-8x7b"] | {"num_experts_per_tok": 9}, "top_k 9 exceeds the 8 experts"),
        (CONFIGS["gpt-oss-120b"] | {"layer_types": ["x"] * 36}, "unknown layer type 'x'"),
        (CONFIGS["gpt-oss-120b"] | {"layer_types": ["full_attention"]}, "1 entries for 36 layers"),
        (CONFIGS["qwen3-30b-a3b"] | {"mlp_only_layers": [99]}, "mlp_only_layers names 99"),
        (CONFIGS["gemma-3-4b"] | {"text_config": [1]}, "text_config must be a JSON object, not a list"),
        (CONFIGS["mpt-7b-alibi"] | {"attn_config": 3}, "attn_config must be a JSON object, not 3"),
        (CONFIGS["gemma-2-9b"] | {"attn_logit_softcapping": -1}, "attn_logit_softcapping must be a number"),
    ],
)
def test_bad_config_gets_one_clear_line(config: object, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_config(as_json(config), "x")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "as JSON"),
        (b"{", "as JSON"),
        (b'{\n"a": 1,\n"b" 2}', "3: cannot be read as JSON"),
        (b"\x80\x81\xff", "as JSON"),
        (b'{"model_type": "\xff\xfe"}', "as JSON"),
        (b'{"model_type": NaN, "x": "\xff"}', "as JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": NaN, "b":' + b"[" * 100_000, "nested too deeply"),
        (b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}", "out of range"),
        (b"null", "not None"),
    ],
)
def test_bad_bytes_get_one_clear_line(data: bytes, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_config(data, "x")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_text_and_duplicate_keys() -> None:
    text = as_json(LLAMA).decode().replace('"hidden_size": 4096', '"hidden_size": 1, "hidden_size": 4096')
    assert read_config(text, "x").parameters == 8_030_261_248
    with pytest.raises(FormatError):
        read_config('{"model_type": "\ud800"}', "x")


def check(data: bytes) -> None:
    """A model whose weights can be counted, or a FormatError of one line; nothing else."""
    message = ""
    try:
        model = read_config(data, "fuzzed")
    except FormatError as error:
        message = str(error)
    else:
        assert 0 < model.active_parameters <= model.parameters
    assert "\n" not in message


SEEDS = [as_json(config) for config in CONFIGS.values()]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**53, 2**63, 10**30, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(list(FAMILIES)),
    st.lists(st.one_of(st.integers(-2, 99), st.text(max_size=4), st.booleans()), max_size=6),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_mutated_values(data: st.DataObject) -> None:
    config = copy.deepcopy(data.draw(st.sampled_from(list(CONFIGS.values()))))
    for _ in range(data.draw(st.integers(1, 3))):
        table = config.get("text_config", config)
        table = table if isinstance(table, dict) else config
        keys = sorted(set(table) | set(LLAMA) | {"layer_types", "sliding_window", "text_config", "head_dim"})
        key = data.draw(st.sampled_from(keys))
        if data.draw(st.booleans()):
            table.pop(key, None)
        else:
            table[key] = data.draw(VALUES)
    check(as_json(config))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_mutated_bytes(data: st.DataObject) -> None:
    text = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(len(text) - 1, 0)))
        match data.draw(st.sampled_from(["flip", "insert", "cut", "drop", "repeat"])):
            case "flip":
                text[place : place + 1] = bytes([data.draw(st.integers(0, 255))])
            case "insert":
                text[place:place] = data.draw(st.binary(min_size=1, max_size=6))
            case "cut":
                del text[place:]
            case "drop":
                del text[place : place + data.draw(st.integers(1, 30))]
            case "repeat":
                text[place:place] = text[place : place + 40]
    check(bytes(text))


def test_a_quantised_checkpoint_is_stated(tmp_path: Path) -> None:
    """The file of an fp8 checkpoint differs from that of the same model in bf16 in this key alone."""
    path, plain = tmp_path / "config.json", CONFIGS["llama-3.1-8b"]
    path.write_bytes(as_json(plain | {"quantization_config": {"quant_method": "fp8"}}))
    assert load_model(path) == replace(read_config(as_json(plain), ""), name=tmp_path.name)
    step = stepcast.predict(model=str(path), cluster="dgx-h100", gpus=8)
    served = stepcast.predict_generation(model=str(path), cluster="dgx-h100")
    for answer in (step, served):
        assert any("quantization_config ('fp8')" in text for text in answer.facts()["assumptions"])
    assert served.facts()["weights"] == "fp8"
