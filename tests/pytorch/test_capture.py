"""Captured programs, where PyTorch is installed."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'stepcast[torch]'")
pytest.importorskip("transformers", reason="needs the extra torch: pip install 'stepcast[torch]'")

from stepcast.forecast.captured import CapturedSharding, Spread, predict_captured  # noqa: E402
from stepcast.forecast.predict import predict  # noqa: E402
from stepcast.frameworks.catalog import load_profile, settle  # noqa: E402
from stepcast.generate.workload import generate  # noqa: E402
from stepcast.hardware import load_cluster  # noqa: E402
from stepcast.inputs import captured as reader  # noqa: E402
from stepcast.inputs.source import Source  # noqa: E402
from stepcast.ir.captured import Captured  # noqa: E402
from stepcast.ir.layout import Layout  # noqa: E402
from stepcast.ir.work import GroupedMatmul, Matmul  # noqa: E402
from stepcast.models.catalog import load_model  # noqa: E402
from stepcast.outputs.plain import write_captured  # noqa: E402
from stepcast.pytorch.capture.program import CaptureOptions, build_program, capture  # noqa: E402
from stepcast.pytorch.capture.tracer import CaptureError  # noqa: E402

TINY = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
# Families of the catalogue, each with few layers; what differs is how their code computes.
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {}, "mistral": {"sliding_window": None}, "qwen2": {}, "qwen3": {"head_dim": 16},
    "phi3": {"pad_token_id": 0}, "olmo2": {}, "gpt_neox": {"num_key_value_heads": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
BATCH, SEQ = 2, 64


def config(folder: Path, **changes: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**TINY, **changes}))
    return str(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    return capture(config(tmp_path_factory.mktemp("tiny")), CaptureOptions(batch=BATCH, seq=SEQ))


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_what_is_generated(family: str, tmp_path: Path) -> None:
    """Products within half a per cent, parameters exactly."""
    path = config(tmp_path, model_type=family, **FAMILIES[family])
    found, model = capture(path, CaptureOptions(batch=BATCH, seq=SEQ)), load_model(path)
    assert found.parameters == model.parameters
    settled = settle(load_profile("transformers"), model, "h200", Layout(), {})
    workload = generate(model, settled.strategy(Layout(), BATCH, BATCH, SEQ), settled.framework)
    expected = sum(
        count * op.work.flops
        for layer, count in workload.stages[0].counted_layers(1)
        for op in layer.all_ops
        if isinstance(op.work, Matmul | GroupedMatmul)
    )
    assert found.flops(attention=False) == pytest.approx(expected, rel=0.005)


def test_repeats_are_folded(tiny: Captured) -> None:
    assert [block.repeat for block in tiny.stage.body if block.repeat > 1] == [3]
    assert len(tiny.parts) == tiny.stage.body_layer_count


def test_memory_holds_what_there_is(tiny: Captured) -> None:
    """Weights and two moments in bf16, each rounded up to blocks."""
    weights = 2 * tiny.parameters
    assert weights <= tiny.memory.parameters <= weights * 1.2
    assert 2 * weights <= tiny.memory.optimizer <= 2 * weights * 1.3
    logits = BATCH * SEQ * 256 * 4
    assert tiny.memory.activations > 0
    assert tiny.memory.peak > weights * 3 + logits


def test_written_and_read_again(tiny: Captured) -> None:
    assert reader.read(Source("x.json", write_captured(tiny))) == tiny


def test_checkpoints_keep_less_and_compute_more(tiny: Captured, tmp_path: Path) -> None:
    again = capture(config(tmp_path), CaptureOptions(batch=BATCH, seq=SEQ, checkpoint=True))
    assert again.memory.activations < tiny.memory.activations
    assert again.flops() > tiny.flops() * 1.2


def test_compiled_has_fewer_kernels_and_keeps_less(tiny: Captured, tmp_path: Path) -> None:
    joined = capture(config(tmp_path), CaptureOptions(batch=BATCH, seq=SEQ, compiled=True))
    assert joined.ops < 0.6 * tiny.ops
    assert joined.memory.peak < tiny.memory.peak
    assert joined.flops(attention=False) == tiny.flops(attention=False)


@pytest.mark.parametrize(
    "spread",
    [Spread(), Spread(dp=4), Spread(dp=4, sharding=CapturedSharding.FSDP), Spread(pp=2, dp=2, micro_batches=4)],
)
def test_spread_over_ranks(tiny: Captured, spread: Spread) -> None:
    prediction = predict_captured(tiny, load_cluster("hgx-h200"), spread)
    assert prediction.step_s > 0
    assert len(prediction.memory) == spread.pp
    assert prediction.report.memory_bytes is not None
    if spread.dp > 1:
        assert prediction.report.communication_s["dp"].total_s > 0


def test_stages_begin_at_blocks(tiny: Captured) -> None:
    prediction = predict_captured(tiny, load_cluster("hgx-h200"), Spread(pp=2, micro_batches=4))
    assert prediction.report.run["begins"] == ["model.layers.*.input_layernorm"]
    assert prediction.workload.boundary_bytes == BATCH * SEQ * 64 * 2


def test_stages_take_as_long_as_generated_ones(tmp_path: Path) -> None:
    """Where layers are all there is, balanced cuts are equal numbers of them."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
             "intermediate_size": 4096, "num_hidden_layers": 8}  # fmt: skip
    path = config(tmp_path, **sizes)
    model, cluster, layout = load_model(path), load_cluster("hgx-h200"), Layout(pp=4)
    settled = settle(load_profile("transformers"), model, "h200", layout, {})
    strategy = settled.strategy(layout, 4, 32, 2048)
    expected = predict(model, cluster, strategy, settled.framework)
    found = predict_captured(capture(path, CaptureOptions(batch=4, seq=2048)), cluster, Spread(pp=4, micro_batches=8))
    assert found.step_s == pytest.approx(expected.step_s, rel=0.03)


PROGRAMS = """
import torch

class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(100, 32)
        self.first, self.second = torch.nn.Linear(32, 48), torch.nn.Linear(48, 100)
        self.scale = torch.nn.Parameter(torch.ones(32))

    def forward(self, ids):
        x = self.table(ids) * self.scale
        return self.second(torch.sin(self.first(x)).cumsum(1))

class StateSpace(torch.nn.Module):
    def __init__(self, width=32, state=8):
        super().__init__()
        self.take, self.give = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, width)
        self.conv = torch.nn.Conv1d(width, width, 4, groups=width, padding=3)
        self.decay = torch.nn.Parameter(torch.zeros(width, state))

    def forward(self, x):
        data, gate = self.take(x).chunk(2, -1)
        data = self.conv(data.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        state = torch.zeros(x.shape[0], data.shape[2], self.decay.shape[1], dtype=x.dtype)
        outs = []
        for at in range(data.shape[1]):
            state = state * torch.exp(-torch.exp(self.decay)) + data[:, at, :, None]
            outs.append(state.sum(-1))
        return self.give(torch.stack(outs, 1) * torch.nn.functional.silu(gate))

class Wants(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return y * 2 if y.sum() > 0 else y

def odd():
    return Odd()

def space(batch, seq):
    return StateSpace(), torch.randn(batch, 16, 32)

def wants():
    return Wants(), torch.randn(4, 8)
"""


@pytest.mark.parametrize(("name", "parameters"), [("odd", 3200 + 1584 + 4900 + 32), ("space", 2112 + 1056 + 160 + 256)])
def test_programs_of_a_user(name: str, parameters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_program.py").write_text(PROGRAMS)
    monkeypatch.chdir(tmp_path)
    found = capture(f"users_program:{name}", CaptureOptions(batch=2, seq=8, dtype="fp32"))
    assert found.parameters == parameters
    assert predict_captured(found, load_cluster("generic:gpu=a100")).step_s > 0


def test_vision_and_translation(tmp_path: Path) -> None:
    vit = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
           "intermediate_size": 64, "image_size": 32, "patch_size": 8}  # fmt: skip
    t5 = {"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
          "vocab_size": 128, "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
    for keys in (vit, t5):
        path = tmp_path / f"{keys['model_type']}.json"
        path.write_text(json.dumps(keys))
        found = capture(str(path), CaptureOptions(batch=2, seq=16))
        assert found.parameters == sum(
            each.numel() for each in build_program(str(path), CaptureOptions()).model.parameters()
        )
        assert predict_captured(found, load_cluster("generic:gpu=h100")).fits


def test_a_program_that_looks_at_its_data_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "looking_program.py").write_text(PROGRAMS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CaptureError, match="looks at the value"):
        capture("looking_program:wants", CaptureOptions(dtype="fp32"))
