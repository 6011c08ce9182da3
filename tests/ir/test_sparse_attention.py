"""Sparse attention of DeepSeek-V3.2: its indexer adds the parameters, FLOPs and saved bytes that arithmetic gives."""

import pytest

from stepcast.generate.flops import model_flops
from stepcast.generate.workload import generate
from stepcast.ir.layers.kinds import count_saved
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import Strategy
from stepcast.ir.work import Attention
from stepcast.models.catalog import load_model

DENSE, SPARSE = load_model("deepseek-v3"), load_model("deepseek-v3.2")
SEQ = 16384
ALONE = Strategy(Layout(ep=64, dp=64), 1, 64, SEQ)


def test_parameters_of_the_indexer() -> None:
    """Queries from the rank of 1,536 to 64 heads of 128, one key, a weight for each head, a norm with a bias."""
    indexer = 1536 * 64 * 128 + 7168 * 128 + 7168 * 64 + 2 * 128
    assert indexer == 13_959_424
    assert SPARSE.parameters - DENSE.parameters == 61 * indexer


def test_flops_are_those_of_chosen_keys_and_of_all_scores() -> None:
    products = 61 * SEQ * 2 * (1536 * 64 * 128 + 7168 * 128 + 7168 * 64)
    scores = 61 * SEQ * (SEQ / 2) * 2 * 64 * (128 + 1)
    # The first 2,048 queries see fewer than 2,048 keys: 1,024.5 on average.
    pairs = 2048 * 2049 / 2 + (SEQ - 2048) * 2048
    core = 61 * 2 * 128 * (192 + 128)
    change = products + scores + core * (pairs - SEQ * SEQ / 2)
    sparse, dense = (model_flops(model, SEQ, 1, causal=True) for model in (SPARSE, DENSE))
    assert sparse - dense == pytest.approx(3 * change, rel=1e-3)
    assert sparse < dense


def test_saved_are_the_indexer_and_the_places_of_chosen_keys() -> None:
    block = SPARSE.blocks[5]
    saved = count_saved(SPARSE, ALONE, block).saved - count_saved(DENSE, ALONE, block).saved
    assert saved == SEQ * ((64 * 128 + 128 + 64) * 2 + 2048 * 4)


def test_short_sequences_see_all_keys() -> None:
    short = Strategy(Layout(ep=64, dp=64), 1, 64, 2048)
    layers = generate(SPARSE, short).stages[0].body_layers()
    works = [op.work for layer in layers for op in layer.forward if isinstance(op.work, Attention)]
    core, index = (next(work for work in works if work.heads == heads) for heads in (128, 64))
    assert (core.key_len, core.causal) == (2048, True)
    assert (index.key_len, index.kv_heads, index.head_dim, index.value_dim) == (1024, 1, 128, 1)


@pytest.mark.parametrize("layout", [Layout(tp=4, ep=16, dp=16), Layout(cp=4, ep=16, dp=16)])
def test_ranks_that_share_tokens_share_the_scores(layout: Layout) -> None:
    split = Strategy(layout, 1, layout.dp, SEQ, sequence_parallel=layout.tp > 1)
    layers = generate(SPARSE, split).stages[0].body_layers()
    layer = next(layer for layer in layers if layer.name == "attention down")
    (scores,) = (op.work for op in layer.forward if isinstance(op.work, Attention))
    assert (scores.query_len, scores.heads) == (SEQ // 4, 64)
    assert sum("all-gather" in op.name for op in layer.forward) == 1
