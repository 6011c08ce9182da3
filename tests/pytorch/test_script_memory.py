"""The memory of training scripts that use torch.compile or accumulate gradients, compared with known answers."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.pytorch.test_scripts import MODEL, captured_facts

TOKENS, WIDTH, WORDS = 4096, 256, 32_768
LOGITS = TOKENS * WORDS * 2  # bytes in bf16, most of the memory of this program

LANGUAGE_MODEL = f"""
import torch, torch.nn as nn, torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding({WORDS}, {WIDTH}), nn.Linear({WIDTH}, {WORDS}, bias=False)

    def forward(self, ids):
        logits = self.head(self.table(ids))
        RETURN

plain = Model().to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
COMPILE
for _ in range(3):
    ids = torch.zeros({TOKENS}, dtype=torch.long, device="cuda")
    LOSS
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
LOSS_OF_LOGITS = "F.cross_entropy(logits.float(), ids)"
COMPILED_MODULE = "model = torch.compile(plain)"


def peak_of(tmp_path: Path, returned: str, loss: str, compiled: str = COMPILED_MODULE) -> int:
    script = tmp_path / "words.py"
    text = LANGUAGE_MODEL.replace("RETURN", f"return {returned}").replace("COMPILE", compiled)
    script.write_text(text.replace("LOSS", loss))
    peak: int = captured_facts("python", str(script))["peak_memory_bytes"]
    return peak


def test_a_backward_reuses_what_the_program_does_not_return(tmp_path: Path) -> None:
    """The gradient of logits takes their place, but not where the script still has them; the unread ones that it
    returns have a gradient of zeros, too: three tensors instead of one.
    """
    alone = peak_of(tmp_path, LOSS_OF_LOGITS, "loss = model(ids)")
    returned = peak_of(tmp_path, f"logits, {LOSS_OF_LOGITS}", "logits, loss = model(ids)")
    assert returned - alone == pytest.approx(2 * LOGITS, rel=0.1)


def test_results_that_the_script_reads_have_no_gradient_of_zeros(tmp_path: Path) -> None:
    unread = peak_of(tmp_path, f"logits, {LOSS_OF_LOGITS}", "logits, loss = model(ids)")
    read = peak_of(
        tmp_path, f"logits, {LOSS_OF_LOGITS}", "logits, loss = model(ids); loss = loss + logits[0].float().mean()"
    )
    assert read - unread < 0.1 * LOGITS


def test_results_stay_as_long_as_the_script_holds_them(tmp_path: Path) -> None:
    loss = "loss = F.cross_entropy({}.float(), ids)"
    passed_on = peak_of(tmp_path, "logits", loss.format("model(ids)"))
    held = peak_of(tmp_path, "logits", "logits = model(ids); " + loss.format("logits"))
    assert held - passed_on == pytest.approx(LOGITS, rel=0.1)


def test_compiled_functions_are_as_compiled_modules(tmp_path: Path) -> None:
    """Libraries look whether they are compiled, and leave out what reads values."""
    function = """
assert not torch.compiler.is_compiling()

@torch.compile
def model(ids):
    assert torch.compiler.is_compiling()
    return plain(ids)
"""
    peaks = {peak_of(tmp_path, LOSS_OF_LOGITS, "loss = model(ids)", each) for each in (COMPILED_MODULE, function)}
    assert len(peaks) == 1


def test_autocast_casts_what_several_layers_read_once(tmp_path: Path) -> None:
    """Each of three layers casts its input; compiled they share one cast, as a layer three times as wide."""
    script, peaks = tmp_path / "layers.py", []
    for layers in ("nn.Linear(2048, 1024, bias=False)] * 1", "nn.Linear(2048, 256, bias=False) for _ in range(4)]"):
        script.write_text(
            f"""
import torch, torch.nn as nn
layers = nn.ModuleList([{layers}).cuda()
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
run = torch.compile(lambda x: torch.cat([layer(x) for layer in layers], -1).float().square().mean())
for _ in range(3):
    x = torch.randn(65536, 2048, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = run(x)
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
        )
        peaks.append(captured_facts("python", str(script))["peak_memory_bytes"])
    cast_bytes = 65536 * 2048 * 2
    assert abs(peaks[1] - peaks[0]) < 1.2 * cast_bytes  # three more casts without


def test_gradients_of_passes_that_sum_none_are_no_views_yet(tmp_path: Path) -> None:
    """With ``no_sync`` the gradients of the first passes are outside of DDP's buckets until the last pass sums them."""
    body = """
model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
for step in range(3):
    for number in range(4):
        SYNC
        model(torch.randn(8, 64, device="cuda")).mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""
    script, gradients = tmp_path / "passes.py", []
    for sync in ("pass", "model.require_backward_grad_sync = number == 3"):
        script.write_text(MODEL + body.replace("SYNC", sync))
        facts = captured_facts("python", str(script), options=("--predict", "--gpu", "h200"))
        gradients.append(facts["prediction"]["memory_bytes"]["gradients"])
    size_bytes = 4 * (64 * 128 + 128 + 128 * 64 + 64)
    assert gradients == pytest.approx([size_bytes, 2 * size_bytes], rel=0.01)


def test_gradients_of_an_accumulating_pass_are_counted_once(tmp_path: Path) -> None:
    """Weights, their gradients, DDP's buckets and the gradients of this pass, before they are added."""
    script, size_bytes = tmp_path / "wide.py", 4 * 8192 * 16384
    script.write_text(
        """
import torch, torch.nn as nn
model = nn.parallel.DistributedDataParallel(nn.Linear(8192, 16384, bias=False).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    for number in range(4):
        model.require_backward_grad_sync = number == 3
        model(torch.randn(8, 8192, device="cuda")).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""
    )
    facts = captured_facts("python", str(script), options=("--predict", "--gpu", "h200"))
    assert facts["prediction"]["memory_bytes"]["allocated"] == pytest.approx(4 * size_bytes, rel=0.05)


def test_compiled_code_may_copy_from_the_host(tmp_path: Path) -> None:
    """Such a copy is named like a cast, but reads nothing on the GPU."""
    script = tmp_path / "copies.py"
    script.write_text(
        """
import torch, torch.nn as nn
layer = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
run = torch.compile(lambda x: (layer(x) * torch.ones(64, 256).to("cuda", torch.bfloat16)).sum())
for _ in range(3):
    run(torch.randn(64, 256, device="cuda")).backward(); optimizer.step(); optimizer.zero_grad()
"""
    )
    assert captured_facts("python", str(script))["ops"] > 0
