"""Searches over dispatchers and exchanges, and families of layouts."""

from stepcast.forecast.predict import predict
from stepcast.questions.choices import build_question
from stepcast.questions.search import SearchQuestion, settle_search

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
    assert len({each.at for each in result.simulated}) == len(result.simulated)
    best = result.best[0]
    assert best.step_s == predict(asked.model, asked.cluster, best.strategy, best.framework).step_s


def test_each_rank_is_a_family_and_the_best_of_it() -> None:
    asked = settle_search(build_question(SearchQuestion, {**ASKED, "pp": "1,2", "micro_batch": "1,2", "top": 4}))
    result = asked.answer()
    assert len({each.family for each in result.best}) == len(result.best) > 1
    for row in result.best:
        assert row.score <= min(each.score for each in result.simulated if each.family == row.family)
