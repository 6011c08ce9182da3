"""Searches over dispatchers and exchanges, and families of layouts."""

import pytest

from stepcast.forecast.predict import predict
from stepcast.questions.choices import build_question
from stepcast.questions.question import PredictQuestion
from stepcast.questions.search import SearchQuestion, settle_search
from stepcast.questions.settle import settle

ASKED = {
    "model": "qwen3-30b-a3b", "cluster": "dgx-h100", "gpus": 16, "global_batch": 32, "seq": 4096, "workers": 1,
    "tp": 1, "pp": 1, "micro_batch": 1, "recompute": "full", "sharding": "zero-1",
}  # fmt: skip


def test_dispatchers_and_exchanges_are_searched() -> None:
    question = build_question(SearchQuestion, {**ASKED, "dispatcher": "alltoall,deepep", "cp_comm": "p2p,a2a"})
    asked = settle_search(question)
    result = asked.answer()
    simulated = {(str(each.framework.dispatcher), str(each.strategy.context)) for each in result.simulated}
    assert {dispatcher for dispatcher, _ in simulated} == {"alltoall", "deepep"}
    assert {exchange for _, exchange in simulated} == {"p2p", "a2a"}
    assert len({each.number for each in result.simulated}) == len(result.simulated)
    best = result.best[0]
    assert best.step_s == predict(asked.model, asked.cluster, best.strategy, best.framework).step_s


def test_each_rank_is_a_family_and_the_best_of_it() -> None:
    asked = settle_search(build_question(SearchQuestion, {**ASKED, "pp": "1,2", "micro_batch": "1,2", "top": 4}))
    result = asked.answer()
    assert len({each.family for each in result.best}) == len(result.best) > 1
    for row in result.best:
        assert row.score <= min(each.score for each in result.simulated if each.family == row.family)


def test_formats_and_offloading_are_searched_and_named() -> None:
    formats = {"gradients": "fp32,bf16", "optimizer": "adamw,adamw:bf16", "offload": "none,optimizer=0.5"}
    asked = settle_search(build_question(SearchQuestion, {**ASKED, **formats, "ep": 8, "cp": 1, "top": 1}))
    result = asked.answer()
    rows = [asked.facts(each) for each in result.simulated]
    assert {(row["gradients"], row["optimizer"], row["offload"]) for row in rows} > {("bf16", "adamw:bf16", "none")}
    assert "--gradients bf16 --optimizer adamw:bf16" in " ".join(map(asked.command, result.simulated))
    for each in result.simulated:
        assert each.step_s == predict(asked.model, asked.cluster, each.strategy, each.framework).step_s


def test_the_layout_of_deepseek_v3_is_found() -> None:
    """DualPipe with 16 stages and experts on 64 ranks, as its report says, leaves 5 % of an H800 free."""
    given = {"model": "deepseek-v3", "cluster": "h800-node", "gpus": 2048, "global_batch": 15360, "seq": 4096}
    given |= {"framework": "hai-llm", "fp8_params": "yes", "mtp_layers": 1, "memory_reserve": "5%", "workers": 1}
    given |= {"tp": 1, "cp": 1, "pp": "8,16", "ep": "32,64", "micro_batch": 1, "schedule": "1f1b,dualpipe", "top": 2}
    given |= {"recompute": "selective:norms+latent-up+expert-activation", "sharding": "zero-1"}
    best = settle_search(build_question(SearchQuestion, given)).answer().best[0].strategy
    assert (best.layout.ep, best.layout.pp, str(best.schedule)) == (64, 16, "dualpipe")


def test_adapters_are_searched_with_peft_and_predicted_by_the_printed_command() -> None:
    place = {"model": "llama-3.1-8b", "gpu": "rtx-4090", "gpus": 4, "global_batch": 16, "seq": 2048, "workers": 1}
    asked = settle_search(build_question(SearchQuestion, {**place, "lora": "16", "base_weights": "trained,nf4"}))
    result = asked.answer()
    assert asked.profile.name == "peft"
    assert {asked.facts(each)["base_weights"] for each in result.simulated} == {"trained", "nf4"}
    words = asked.command(result.best[0]).split()[2:]
    choices = dict(zip((word[2:].replace("-", "_") for word in words[::2]), words[1::2], strict=True))
    assert settle(build_question(PredictQuestion, choices)).prediction.step_s == result.best[0].step_s
    with pytest.raises(ValueError, match="--lora 16"):
        settle_search(build_question(SearchQuestion, {**place, "base_weights": "nf4"}))
