"""Tensor parallelism of captured programs, found by what flows where; where PyTorch is installed."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'stepcast[torch]'")
pytest.importorskip("transformers", reason="needs the extra torch: pip install 'stepcast[torch]'")

from stepcast.forecast.captured import Spread, predict_captured  # noqa: E402
from stepcast.forecast.predict import predict  # noqa: E402
from stepcast.forecast.splitting import SplitError, split_captured  # noqa: E402
from stepcast.frameworks.catalog import load_profile, settle  # noqa: E402
from stepcast.hardware import load_cluster  # noqa: E402
from stepcast.inputs import captured as reader  # noqa: E402
from stepcast.inputs.source import Source  # noqa: E402
from stepcast.ir.captured import Captured  # noqa: E402
from stepcast.ir.layout import Layout  # noqa: E402
from stepcast.ir.work import Attention, Collective, Matmul  # noqa: E402
from stepcast.models.catalog import load_model  # noqa: E402
from stepcast.outputs.plain import write_captured  # noqa: E402
from stepcast.pytorch.capture.program import CaptureOptions, capture  # noqa: E402

HIDDEN, LAYERS, BATCH, SEQ = 2048, 4, 2, 2048
CONFIG = {
    "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 512, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
PROGRAMS = """
import torch

class Pairs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64), torch.nn.Linear(64, 10)

    def forward(self, x):
        return self.c(torch.nn.functional.layer_norm(x + self.b(torch.tanh(self.a(x))), (64,)))

class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x):
        return self.b(torch.nn.functional.layer_norm(self.a(x), (256,)))

def pairs():
    return Pairs(), torch.randn(8, 64)

def mixed():
    return Mixed(), torch.randn(8, 64)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("splits") / "config.json"
    found.write_text(json.dumps(CONFIG))
    return str(found)


@pytest.fixture(scope="module")
def llama(path: str) -> Captured:
    return capture(path, CaptureOptions(batch=BATCH, seq=SEQ))


def works(found: Captured, kind: type) -> list[tuple[object, int]]:
    return [
        (op.work, count)
        for layer, count in found.stage.counted_layers(1)
        for op in layer.all_ops
        if isinstance(op.work, kind)
    ]


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_agrees_with_the_generated_model(tp: int, path: str, llama: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepcast.forecast.captured.KERNEL_GAP_S", 0.0)  # generated models leave gaps out
    model, cluster, layout = load_model(path), load_cluster("hgx-h200"), Layout(tp=tp)
    settled = settle(load_profile("transformers"), model, "h200", layout, {})
    strategy = settled.strategy(layout, BATCH, BATCH, SEQ)
    expected = predict(model, cluster, strategy, settled.framework)
    found = predict_captured(llama, cluster, Spread(tp=tp))
    ours, theirs = found.report.breakdown_s, expected.report.breakdown_s
    assert ours["compute"] == pytest.approx(theirs["compute"], rel=0.05)
    # Of the rest what the host starts with differs: one knows modules, the other operators.
    work, other = (sum(parts[name] for name in ("compute", "tp", "optimizer")) for parts in (ours, theirs))
    assert work == pytest.approx(other, rel=0.05)


def test_each_rank_has_its_share(llama: Captured) -> None:
    """All products but the output's are split, all weights but norms and vocabulary; two sums a layer and
    direction, each of the whole stream.
    """
    half = split_captured(llama, 2)
    outer = 3 * 2.0 * BATCH * SEQ * HIDDEN * 512
    flops = llama.flops(attention=False)
    assert half.flops(attention=False) == pytest.approx((flops - outer) / 2 + outer)
    assert {work.heads for work, _ in works(half, Attention)} == {8}  # type: ignore[attr-defined]
    sums = works(half, Collective)
    assert sum(count for _, count in sums) == 4 * LAYERS
    assert {work.size_bytes for work, _ in sums} == {BATCH * SEQ * HIDDEN * 2}  # type: ignore[attr-defined]
    vocabulary, norms = 2 * 512 * HIDDEN, (2 * LAYERS + 1) * HIDDEN
    whole = llama.parameters
    assert sum(part.parameters for part in half.parts) == pytest.approx(
        (whole - vocabulary - norms) / 2 + vocabulary + norms, rel=1e-3
    )


def test_written_and_read_again(llama: Captured) -> None:
    assert reader.read(Source("x.json", write_captured(llama))) == llama


def test_checkpointed_layers_are_split_too(path: str, llama: Captured) -> None:
    """PyTorch stops to compute again when it has what the backward needs: the last map is left out."""
    whole = capture(path, CaptureOptions(batch=BATCH, seq=SEQ, checkpoint=True))
    again = split_captured(whole, 4)
    assert sum(count for _, count in works(again, Collective)) == 5 * LAYERS
    outer = 3 * 2.0 * BATCH * SEQ * HIDDEN * 512
    assert again.flops(attention=False) == pytest.approx((whole.flops(attention=False) - outer) / 4 + outer)
    assert whole.flops(attention=False) > llama.flops(attention=False) * 1.2


def test_names_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "paired_program.py").write_text(PROGRAMS)
    monkeypatch.chdir(tmp_path)
    found = capture("paired_program:pairs", CaptureOptions(dtype="fp32"))
    half = split_captured(found, 2)
    assert sum(part.split_bytes for part in found.parts) == 4 * (64 * 256 + 256 + 256 * 64)
    sizes = {(work.m, work.n, work.k) for work, _ in works(half, Matmul)}  # type: ignore[attr-defined]
    assert {(8, 128, 64), (8, 64, 128)} <= sizes
    assert sum(count for _, count in works(half, Collective)) == 1  # no gradient of the data


def test_what_mixes_all_features_is_not_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mixed_program.py").write_text(PROGRAMS)
    monkeypatch.chdir(tmp_path)
    found = capture("mixed_program:mixed", CaptureOptions(dtype="fp32"))
    with pytest.raises(SplitError, match="no linear maps"):
        split_captured(found, 2)


def test_heads_that_do_not_divide(llama: Captured) -> None:
    with pytest.raises(SplitError, match="cannot be split 16 ways"):
        split_captured(llama, 16)
