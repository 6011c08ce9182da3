"""Questions: one table of choices, from which options, keywords, files and commands follow."""

import inspect
import shlex
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

import stepcast
from stepcast.cli.main import VERBS, build_parser
from stepcast.cli.options import read_question
from stepcast.keywords import AnalyzeChoices, PlanChoices, PredictChoices, ReplayChoices, SearchChoices
from stepcast.questions.choices import NOUNS, Question, build_question, choices_of, spell_choices
from stepcast.questions.plan import PlanQuestion
from stepcast.questions.question import CHOICES, DEFAULTS, AnalyzeQuestion, PredictQuestion, ReplayQuestion, rules_of
from stepcast.questions.search import SearchQuestion
from stepcast.questions.settle import settle
from tools.write_keywords import STUB, write_stub

LLAMA: dict[str, Any] = {"model": "llama-3.1-8b", "cluster": "dgx-h100", "gpus": 64}


def ask(*words: str, verb: str = "predict") -> Any:
    parser = build_parser([known for known in VERBS if known.name == verb])
    return read_question(parser.parse_args([verb, *words]))[0]


def test_the_keywords_of_predict_are_the_choices_of_a_question() -> None:
    named = set(inspect.signature(stepcast.predict).parameters) & set(CHOICES)
    assert named == set(NOUNS)
    assert set(get_type_hints(PredictChoices)) == set(CHOICES) - set(NOUNS)


@pytest.mark.parametrize(
    ("function", "keywords", "kind"),
    [
        (stepcast.search, SearchChoices, SearchQuestion),
        (stepcast.plan, PlanChoices, PlanQuestion),
        (stepcast.analyze, AnalyzeChoices, AnalyzeQuestion),
        (stepcast.replay, ReplayChoices, ReplayQuestion),
    ],
)
def test_the_keywords_of_a_function_are_the_choices_of_its_question(
    function: Callable[..., Any], keywords: type, kind: type[Question]
) -> None:
    files = {"trace"} if function in (stepcast.analyze, stepcast.replay) else set()
    files |= {"config", "ignore_unknown"} if function is stepcast.plan else set()
    parameters = set(inspect.signature(function).parameters)
    assert set(get_type_hints(keywords)) == (set(choices_of(kind)) | files) - parameters


def test_type_checkers_see_the_keywords() -> None:
    assert STUB.read_text(encoding="utf-8") == write_stub(), "run python -m tools.write_keywords"


@pytest.mark.parametrize("verb", ["predict", "plan", "search", "analyze", "replay"])
def test_every_choice_has_an_option(verb: str) -> None:
    parser = build_parser([known for known in VERBS if known.name == verb])._subparsers
    sub = parser._group_actions[0].choices[verb]  # type: ignore[union-attr,index]
    kind = sub.get_default("asks")
    assert set(choices_of(kind)) <= {action.dest for action in sub._actions}
    assert all(choice.group and choice.help for choice in choices_of(kind).values())


def test_rules_name_choices() -> None:
    assert {name for rule in rules_of("predict") for name in rule.options} <= set(CHOICES)


@pytest.mark.parametrize(
    ("words", "choices"),
    [
        ("--tp 8 --sharding ZeRO-1,fsdp", {"tp": 8, "sharding": ["zero-1", "fsdp"]}),
        ("--gpus 8..64 --seq 8k --fp8 --top 3", {"gpus": "8..64", "seq": 8192, "precision": "fp8", "top": 3}),
        ("--sequence-parallel yes --time 1m", {"sequence_parallel": True, "time": 60}),
    ],
)
def test_searches_are_asked_alike_in_words_and_in_python(words: str, choices: dict[str, Any]) -> None:
    assert ask(*words.split(), verb="search") == build_question(SearchQuestion, choices)


def test_plans_are_asked_alike_in_words_and_in_python() -> None:
    words = "--model llama-3.1-8b --tokens 1T --from 2027-01-01 --stage tokens=1T --stage steps=5 --blocking"
    choices = {"tokens": 1e12, "from_": "2027-01-01", "stage": ["tokens=1T", "steps=5"], "blocking": True}
    assert ask(*words.split(), verb="plan") == build_question(PlanQuestion, {"model": "llama-3.1-8b", **choices})


# For each choice a value that is not its default.
VALUES: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "cluster": "dgx-h100",
    "gpu": "h100-sxm",
    "framework": "nemo",
    "set": ("node.nics=4", "gpus=8"),
    "calibration": "a.toml",
    "background": "b.toml",
    "stage_layers": "3,4",
    "recompute": "selective:mlp,norms",
    "offload": "optimizer=0.5",
    "overlap": "gradients,tensor",
    "optimizer": "adamw:bf16",
    "currency": "EUR",
    "lora": "16,32,all-linear,0.05",
    "lora_targets": "query,value",
    "lengths": "mean=600,max=4096",
    "expert_load": "power-law:1.2",
    "zero_gradients": 0.25,
}


def other_value(name: str) -> Any:
    choice, default = CHOICES[name], DEFAULTS[name]
    if name in VALUES:
        return VALUES[name]
    if choice.deniable or default is False:
        return True
    return next((value for value in choice.values if value != default), 3)


@pytest.mark.parametrize("name", CHOICES)
def test_text_keywords_and_printed_commands_mean_the_same(name: str) -> None:
    value = other_value(name)
    asked = build_question(PredictQuestion, {name: value})
    assert getattr(asked, name) == value
    assert ask(*spell_choices({name: value})) == asked
    assert asked.given == {name}
    if isinstance(value, int | float) and not isinstance(value, bool):
        assert build_question(PredictQuestion, {name: str(value)}) == asked
    if CHOICES[name].deniable:
        assert ask(*spell_choices({name: False})) == build_question(PredictQuestion, {f"no_{name}": True})


def test_names_of_other_tools_are_read() -> None:
    asked = build_question(
        PredictQuestion, {"tensor_parallel_size": 2, "zero": 3, "gradient_checkpointing": True, "seq_length": "8k"}
    )
    assert asked == PredictQuestion(tp=2, sharding="zero-3", recompute="full", seq=8192)


@pytest.mark.parametrize(
    ("choices", "error", "problem"),
    [
        ({"tpp": 2}, TypeError, "got an unexpected keyword argument 'tpp'; did you mean tp?"),
        ({"tp": 0}, ValueError, "^tp: expected a whole number from 1 to"),
        ({"tp": True}, ValueError, "^tp: expected a value, not True"),
        ({"dropout": "yes"}, ValueError, "^dropout: expected True or False, not 'yes'"),
        ({"precision": "bf15"}, ValueError, "^precision: 'bf15' is not known; did you mean bf16"),
        ({"micro_batch": 1.5}, ValueError, "^micro_batch: expected a whole number"),
        ({"tp": 3}, ValueError, "use tp=2 or 4$"),
        ({"global_batch": 64, "accumulation": 3}, ValueError, "^accumulation=3 means a global batch of 192"),
    ],
)
def test_mistakes_are_told_in_the_words_of_python(
    choices: dict[str, Any], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        stepcast.predict(**LLAMA, **choices)


def test_settling_fills_in_defaults_and_changes_nothing() -> None:
    asked = build_question(PredictQuestion, {**LLAMA, "gpus": None, "nodes": 8, "tp": 8})
    before = build_question(PredictQuestion, {**LLAMA, "gpus": None, "nodes": 8, "tp": 8})
    run = settle(asked)
    assert asked == before
    assert (run.strategy.layout.dp, run.question.gpus) == (8, 64)
    assert any("sequences of 4096 tokens" in note for note in run.assumptions)
    changed = settle(run.question.change({"tp": 4, "nodes": None}))
    assert changed.strategy.layout.dp == 16
    assert (
        settle(ask(*shlex.split("--model llama-3.1-8b --cluster dgx-h100 --nodes 8 --tp 8"))).strategy == run.strategy
    )


@pytest.mark.parametrize(
    ("function", "choices", "error", "problem"),
    [
        (stepcast.search, {"global_batch": 32, "tpp": 2}, TypeError, "unexpected keyword argument 'tpp'"),
        (stepcast.plan, {"chekpoint_size": "1TB"}, TypeError, "did you mean checkpoint_size?"),
        (stepcast.plan, {"tokens": "many"}, ValueError, "^tokens: "),
        (stepcast.plan, {}, ValueError, "one of tokens=15T, samples=50k, steps=100000 or until=2027-01-31"),
        (stepcast.analyze, {}, TypeError, "unexpected keyword argument 'model'"),
    ],
)
def test_other_functions_tell_mistakes_in_the_words_of_python(
    function: Callable[..., object], choices: dict[str, Any], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        function(**LLAMA, **choices)


def test_gpus_without_a_fused_attention_kernel_store_scores() -> None:
    """Transformer Engine has no FlashAttention and no cuDNN attention below compute capability 8.0; PyTorch's attention
    has a fused kernel for all GPUs.
    """
    plan: dict[str, Any] = {"tp": 8, "gpus": 8, "seq": 2048, "global_batch": 8}
    old = stepcast.predict("llama-3.1-8b", gpu="v100", **plan)
    unfused = stepcast.predict("llama-3.1-8b", gpu="v100", flash_attention=False, **plan)
    note = "attention stores its scores, since megatron-core has no fused kernel for it on v100-sxm-32gb"
    assert note in old.report.assumptions
    assert old.step_s == unfused.step_s
    ways: list[dict[str, Any]] = [
        {"gpu": "a100"},
        {"gpu": "v100", "flash_attention": True},
        {"gpu": "v100", "framework": "pytorch-fsdp"},
    ]
    for way in ways:
        other = stepcast.predict("llama-3.1-8b", **plan, **way)
        assert not any("scores" in line for line in other.report.assumptions)


def test_a_batch_that_is_likely_meant_in_tokens_is_noted() -> None:
    """4M sequences of 4,096 tokens are 17 billion tokens; 4M tokens are 1,024 sequences."""
    note = "17,179,869,184 tokens in a step, since batches count sequences (--global-batch 1,024 is about 4,194,304 tokens)"
    place: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "h100", "gpus": 8, "seq": 4096}
    assert note in stepcast.predict(**place, global_batch="4M").report.assumptions
    assert not any("in a step" in line for line in stepcast.predict(**place, global_batch=1024).report.assumptions)


def test_a_gpu_without_bf16_trains_in_fp16_unless_a_precision_is_given() -> None:
    """V100 multiplies bf16 as fp32, at 15.7 instead of 125 TFLOP/s (NVIDIA V100 data sheet)."""
    place: dict[str, Any] = {"model": "gpt2-xl", "cluster": "dgx-2", "gpus": 16}
    step, stated = stepcast.predict(**place), stepcast.predict(**place, precision="fp16")
    assert step.step_s == stated.step_s < stepcast.predict(**place, precision="bf16").step_s / 3
    note = "precision fp16, since v100-sxm-32gb has no bf16 matrix units (--precision)"
    assert note in step.report.assumptions
    assert note not in stated.report.assumptions
    found = stepcast.search(**place, global_batch=128, tp=1, pp=1, micro_batch=1, sharding="zero-1", recompute="none")
    assert stepcast.rows(found)[0]["step_s"] == step.step_s
    # The prompts of a prefill take two operations for each weight and token.
    reply = stepcast.predict_generation("gpt2-xl", "v100-sxm-32gb", prompt_length="1000").to_dict()
    assert 2 * 1.5e9 * 1000 / 125e12 < reply["prefill_s"] < 2 * 1.5e9 * 1000 / 31e12
