"""What decides how long captured programs take besides their kernels: where the host waits, which kernels a GPU
has, how operands lie; where PyTorch is installed.
"""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'stepcast[torch]'")
pytest.importorskip("transformers", reason="needs the extra torch: pip install 'stepcast[torch]'")

from stepcast.inputs import captured as reader  # noqa: E402
from stepcast.inputs.source import Source  # noqa: E402
from stepcast.ir.captured import Captured  # noqa: E402
from stepcast.ir.work import Attention, Elementwise, ElementwiseKind, GroupedMatmul, Matmul  # noqa: E402
from stepcast.ir.workload import Op  # noqa: E402
from stepcast.outputs.plain import write_captured  # noqa: E402
from stepcast.pytorch.capture.program import CaptureOptions, capture  # noqa: E402

PROGRAMS = """
import torch

class Looks(torch.nn.Module):
    def __init__(self, looks):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.looks = looks

    def forward(self, x):
        for at, layer in enumerate(self.layers):
            x = layer(x)
            if self.looks == "value" and (torch.arange(4, device=x.device) > at).any():
                x = torch.tanh(x)
            if self.looks == "copy":
                x = x * torch.tensor([2.0] * 64, device=x.device)
            if self.looks == "host":
                x = x * torch.tensor(2.0)
        return x

def never():
    return Looks(""), torch.randn(8, 64)

def value():
    return Looks("value"), torch.randn(8, 64)

def copy():
    return Looks("copy"), torch.randn(8, 64)

def host():
    return Looks("host"), torch.randn(8, 64)

class Loop(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(32, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        shares, chosen = torch.topk(self.gate(x).softmax(-1), 2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            out.index_add_(0, rows, expert(x[rows]) * shares[rows, places, None])
        return out

def loop():
    return Loop(), torch.randn(64, 32)

class Positions(torch.nn.Module):
    def __init__(self, learnt):
        super().__init__()
        self.q = torch.nn.Linear(32, 32)
        self.bias = torch.nn.Parameter(torch.zeros(1, 4, 16, 16), requires_grad=learnt)

    def forward(self, x):
        heads = self.q(x).view(2, 16, 4, 8).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, self.bias)

def learnt():
    return Positions(True), torch.randn(2, 16, 32)

def given():
    return Positions(False), torch.randn(2, 16, 32)

class Shared(torch.nn.Module):
    def __init__(self, told):
        super().__init__()
        self.q, self.told = torch.nn.Linear(32, 32), told

    def forward(self, x):
        heads = self.q(x).view(2, 16, 4, 8).transpose(1, 2)
        keys = heads[:, :2] if self.told else heads[:, :1]
        return torch.nn.functional.scaled_dot_product_attention(heads, keys, keys, enable_gqa=self.told)

def told():
    return Shared(True), torch.randn(2, 16, 32)

def untold():
    return Shared(False), torch.randn(2, 16, 32)
"""
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 512, "head_dim": 16,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _programs(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = tmp_path_factory.mktemp("programs")
    (folder / "waiting_programs.py").write_text(PROGRAMS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def of(name: str) -> Captured:
    return capture(f"waiting_programs:{name}", CaptureOptions(batch=2, seq=16))


def from_config(folder: Path, asked: CaptureOptions, **keys: object) -> Captured:
    path = folder / "config.json"
    path.write_text(json.dumps({**TINY, **keys}))
    return capture(str(path), asked)


def ops(found: Captured) -> list[Op]:
    return [op for layer, count in found.stage.counted_layers(1) for op in layer.all_ops * count]


def works(found: Captured, kind: type) -> list[Any]:
    return [op.work for op in ops(found) if isinstance(op.work, kind)]


@pytest.mark.parametrize(("name", "waits"), [("never", 0), ("value", 4), ("copy", 4), ("host", 0)])
def test_the_host_waits_where_the_program_looks(name: str, waits: int) -> None:
    """At a value that a GPU has, and for numbers that are copied to it; numbers of the host are no copy."""
    found = of(name)
    assert sum(op.host_reads for op in ops(found)) == waits
    assert reader.read(Source("again", data=write_captured(found))) == found


def test_experts_in_a_loop_get_tokens_alike() -> None:
    """Each of 64 rows chooses two of four experts, so each expert has 32 rows, and the host waits for each expert."""
    found = of("loop")
    products = [work for work in works(found, Matmul) if work.n == work.k == 32]
    assert [work.m for work in products[:4]] == [32] * 4
    assert sum(op.host_reads for op in ops(found)) >= 4


def test_a_library_s_experts_in_a_loop_compute_as_much_as_grouped_ones(tmp_path: Path) -> None:
    keys = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    grouped, loop = (
        from_config(tmp_path, CaptureOptions(batch=2, seq=64, experts=name), **keys) for name in ("grouped_mm", "eager")
    )
    assert works(grouped, GroupedMatmul)
    assert not works(loop, GroupedMatmul)
    assert loop.flops() == pytest.approx(grouped.flops(), rel=1e-9)
    assert loop.parameters == grouped.parameters


@pytest.mark.parametrize(("name", "fused"), [("learnt", 0), ("given", 2), ("told", 2), ("untold", 0)])
def test_attention_is_written_out_where_no_fused_kernel_takes_it(name: str, fused: int) -> None:
    """Forward and backward: of masks that are learnt, and of shared keys that nobody tells of."""
    assert len(works(of(name), Attention)) == fused


def test_an_attention_that_a_release_refuses(tmp_path: Path) -> None:
    """Gemma 2's scores have a cap, which fused attention leaves out."""
    found = from_config(tmp_path, CaptureOptions(batch=2, seq=64, attention="sdpa"), model_type="gemma2")
    assert len(works(found, Attention)) == 2 * TINY["num_hidden_layers"]


def test_encoders_are_trained_as_encoders(tmp_path: Path) -> None:
    """Every token is predicted by all others, and the loss is of as many bits as the weights."""
    found = from_config(tmp_path, CaptureOptions(batch=2, seq=64), model_type="bert")
    (attention, *_) = works(found, Attention)
    assert not attention.causal
    losses = [work for work in works(found, Elementwise) if work.kind is ElementwiseKind.CROSS_ENTROPY]
    assert {str(work.dtype) for work in losses} == {"bf16"}


def test_speech_is_heard(tmp_path: Path) -> None:
    keys = {
        "model_type": "whisper", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0,
        "max_source_positions": 100, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    }  # fmt: skip
    found = from_config(tmp_path, CaptureOptions(batch=2, seq=32), **keys)
    lengths = {work.key_len for work in works(found, Attention)}
    assert lengths == {100, 32}


def test_rows_of_odd_width_are_seen_in_every_product(tmp_path: Path) -> None:
    """A head of 251 tokens: its product, and the gradients of its input and of its weight."""
    found = from_config(tmp_path, CaptureOptions(batch=2, seq=64), model_type="llama", vocab_size=251)
    head = [work for work in works(found, Matmul) if 251 in (work.m, work.n, work.k)]
    assert len(head) == 3
    assert all(work.n % 2 or work.k % 2 for work in head)
    assert found.flops(attention=False) == pytest.approx(
        sum(2 * w.m * w.n * w.k * w.batch for w in works(found, Matmul)), rel=1e-9
    )


def test_gradients_of_a_softmax_take_room_for_a_product() -> None:
    """Of gradient and result, as large as they are, while the fullest moment lasts."""
    found = of("learnt")
    scores = 2 * 4 * 16 * 16 * 4
    assert found.memory.temporary >= 3 * scores
