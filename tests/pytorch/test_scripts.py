"""Capture training scripts unchanged: what they place, wrap, read and accumulate."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from stepcast.cli.capture import read_captured
from stepcast.cli.main import main
from stepcast.ir.work import HostCopy

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "scripts"

MODEL = """
import os, torch, torch.nn as nn
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def run_capture(*words: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "stepcast", "capture", "--json", *options, "--", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, cwd=SCRIPTS, env=environment, check=False)


def captured_facts(*words: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    done = run_capture(*words, options=options)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


@pytest.mark.parametrize(
    ("words", "parameters"),
    [
        (("python", "gpt.py", "--layers", "2"), 53_597_184),
        (("python", "resnet.py", "--blocks", "1,1,1,1", "--channels-last", "--amp", "fp16"), None),
        (("python", "convnext.py"), 28_589_128),
        (("python", "gan.py"), 23_694_592),
        (("python", "dlrm.py"), 667_968_897),
        (("python", "lstm.py"), 84_980_222),
        (("python", "fourier.py"), 18_899_713),
        (("python", "moe.py", "--layers", "1"), None),
        (("python", "lora.py", "--layers", "1"), None),
    ],
)
def test_scripts_are_captured_unchanged(words: tuple[str, ...], parameters: int | None) -> None:
    facts = captured_facts(*words)
    if parameters is not None:
        assert facts["parameters"] == parameters
    memory = facts["memory_bytes"]
    assert isinstance(memory, dict)
    assert 0 < memory["parameters"] < memory["peak"]


def test_accumulation_and_wrappers_decide_the_distribution() -> None:
    options = ("--predict", "--cluster", "hgx-h200")
    words = ("torchrun", "--nproc-per-node", "8", "bert.py", "--layers", "1")
    facts = captured_facts(*words, options=options)
    assert facts["facts"]["accumulation"] == "4"
    assert facts["facts"]["sharding"] == "none"
    assert facts["facts"]["bucket_mb"] == "50"
    assert facts["prediction"]["strategy"]["dp"] == 8
    words = ("torchrun", "--nproc-per-node=4", "llama_fsdp2.py", "--layers", "1", "--ac")
    facts = captured_facts(*words, options=options)
    assert facts["facts"]["sharding"] == "fsdp"
    assert facts["precision"] == "bf16"
    assert facts["prediction"]["strategy"]["dp"] == 4
    facts = captured_facts(
        "torchrun", "--nproc-per-node", "8", "fsdp1.py", "--layers", "1", "--strategy", "SHARD_GRAD_OP"
    )
    assert facts["precision"] == "bf16"


def test_utilisation_is_that_of_the_formats_a_program_multiplies_in(tmp_path: Path) -> None:
    """cuDNN runs fp32 convolutions as TF32, at 495 TFLOP/s on an H200: of 67 in fp32 a GAN would use 132 %."""
    prediction = captured_facts("python", "gan.py", options=("--predict", "--gpu", "h200"))["prediction"]
    assert prediction["run"]["precision"] == "tf32"
    assert prediction["mfu"] == pytest.approx(prediction["tflops_per_gpu"] / 495, rel=0.01)
    assert not any("mfu" in text for text in prediction["warnings"])


def test_recomputed_forwards_are_no_model_flops() -> None:
    words, options = ("python", "llama_fsdp2.py", "--layers", "2"), ("--predict", "--gpu", "h200")
    plain, checkpointed = (captured_facts(*words, *more, options=options) for more in ((), ("--ac",)))
    assert checkpointed["flops"] > 1.05 * plain["flops"]
    did, again = (
        facts["prediction"]["tflops_per_gpu"] * facts["prediction"]["step_s"] for facts in (plain, checkpointed)
    )
    assert again == pytest.approx(did, rel=1e-6)


def test_a_step_without_a_pipeline_has_no_bubble(tmp_path: Path) -> None:
    script = tmp_path / "small.py"
    script.write_text(
        MODEL
        + """
for step in range(3):
    loss = model(torch.randn(8, 64, device="cuda")).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
    )
    options = ("--predict", "--cluster", "hgx-h200", "--gpus", "16")
    breakdown = captured_facts("python", str(script), options=options)["prediction"]["breakdown_s"]
    assert breakdown["bubble"] == 0 < breakdown["dp"]


def test_values_that_a_script_reads_are_named_by_line(tmp_path: Path) -> None:
    script = tmp_path / "reads.py"
    script.write_text(
        MODEL
        + """
for step in range(3):
    loss = model(torch.randn(8, 64, device="cuda")).square().mean()
    assert torch.isfinite(loss).all() and not torch.isnan(loss)
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    print(f"{loss:.3f}", loss.tolist(), loss.cpu().numpy())
"""
    )
    done = run_capture("python", str(script), options=("--predict", "--gpu", "h200"))
    assert done.returncode == 0, done.stderr
    assert any("reads.py:10" in text for text in json.loads(done.stdout)["prediction"]["warnings"])
    assert "1.000 1.0 1.0" in done.stderr


def test_arguments_of_distributions_are_valid(tmp_path: Path) -> None:
    script = tmp_path / "policy.py"
    script.write_text(
        MODEL
        + """
for step in range(3):
    policy = torch.distributions.Normal(model(torch.randn(8, 64, device="cuda")), 1.0)
    (-policy.log_prob(torch.zeros(8, 64, device="cuda")).mean()).backward(); optimizer.step(); optimizer.zero_grad()
"""
    )
    assert captured_facts("python", str(script))["parameters"] > 0


def test_values_read_after_the_first_step_alone_are_not_waited_for(tmp_path: Path) -> None:
    script, output = tmp_path / "logs.py", tmp_path / "step.json"
    body = """
for step in range({steps}):
    loss = model(torch.randn(8, 64, device="cuda")).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    if step % 10 == 0: print(loss.item())
"""
    for steps, waits in ((2, True), (3, False)):
        script.write_text(MODEL + body.format(steps=steps))
        captured_facts("python", str(script), options=("-o", str(output)))
        assert ("host_reads" in output.read_text()) == waits


@pytest.mark.parametrize(
    ("module", "script", "facts"),
    [
        ("torch", "ddp_compile.py", {"sharding": "none", "accumulation": "2"}),
        ("lightning", "lightning_gpt.py", {"model": "LanguageModel"}),
        ("accelerate", "accelerate_bert.py", {"accumulation": "2"}),
        ("peft", "trainer_lora.py", {"accumulation": "2"}),
        ("timm", "timm_swin.py", {"model": "SwinTransformer"}),
        ("diffusers", "diffusers_unet.py", {"model": "UNet2DConditionModel"}),
    ],
)
def test_scripts_of_libraries_are_captured_unchanged(module: str, script: str, facts: dict[str, str]) -> None:
    pytest.importorskip(module)
    layers = ("--layers", "1") if module in ("torch", "lightning", "accelerate", "peft") else ()
    command = ("torchrun", "--nproc-per-node", "2") if module == "torch" else ("python",)
    found = captured_facts(*command, script, *layers)["facts"]
    assert {name: found.get(name) for name in facts} == facts


def test_buckets_of_ddp_are_part_of_memory(tmp_path: Path) -> None:
    """DDP has a second copy of all gradients, or gradients that are views into its buckets, which stay."""
    script, size_bytes = tmp_path / "ddp.py", 4 * (64 * 128 + 128 + 128 * 64 + 64)

    def gradients(wrap: str) -> float:
        body = """
for _ in range(3):
    model(torch.randn(8, 64, device="cuda")).mean().backward(); optimizer.step(); optimizer.zero_grad()
"""
        script.write_text(MODEL + wrap + body)
        found = captured_facts("python", str(script), options=("--predict", "--gpu", "h200"))
        held: float = found["prediction"]["memory_bytes"]["gradients"]
        return held

    ddp = "model = torch.nn.parallel.DistributedDataParallel"
    assert gradients(f"{ddp}(model)") == gradients("") + size_bytes
    assert gradients(f"{ddp}(model, gradient_as_bucket_view=True)") == size_bytes


def test_ddp_sums_gradients_in_every_pass_without_no_sync(tmp_path: Path) -> None:
    body = """
torch.distributed.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.Linear(8192, 16384).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    for number in range(4):
        {sync}
        model(torch.randn(8, 8192, device="cuda")).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""
    script, seconds = tmp_path / "accumulates.py", []
    for sync in ("pass", "model.require_backward_grad_sync = number == 3"):
        script.write_text(MODEL + body.format(sync=sync))
        words = ("torchrun", "--nproc-per-node", "8", str(script))
        facts = captured_facts(*words, options=("--predict", "--cluster", "hgx-h200"))
        assert ("gradients summed" in facts["facts"]) == (sync == "pass")
        seconds.append(facts["prediction"]["step_s"])
    assert seconds[0] > 1.5 * seconds[1]  # 537 MB are summed four times and once


def test_experts_that_masks_select_are_run(tmp_path: Path) -> None:
    """The largest share of a router is a choice; rows that a mask of choices selects are counted, both ways."""
    script = tmp_path / "switch.py"
    script.write_text(
        """
import torch, torch.nn as nn
gate, experts = nn.Linear(64, 4).cuda(), nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).cuda()
optimizer = torch.optim.SGD([*gate.parameters(), *experts.parameters()], lr=0.1)
for _ in range(3):
    x = torch.randn(512, 64, device="cuda")
    shares, chosen = gate(x).softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        rows = chosen == number
        if rows.any():
            out[rows] = expert(x[rows]) * shares[rows, None]
    out.mean().backward(); optimizer.step(); optimizer.zero_grad()
"""
    )
    memory = captured_facts("python", str(script))["memory_bytes"]
    assert memory["all_gradients"] == memory["parameters"]


def test_batches_are_on_the_gpu_once_they_are_copied(tmp_path: Path) -> None:
    """Casts and sums of a large batch that was copied from the host run on the GPU, as those of one made there."""
    script = tmp_path / "copied.py"

    def count_kernels(batch: str) -> int:
        body = f"""
for _ in range(3):
    x = {batch}
    assert x.is_cuda
    model(x.half().float() - 1).mean().backward(); optimizer.step(); optimizer.zero_grad()
"""
        script.write_text(MODEL + body)
        ops: int = captured_facts("python", str(script))["ops"]
        return ops

    assert count_kernels("torch.randn(4096, 64).cuda()") == count_kernels('torch.randn(4096, 64, device="cuda")')


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "waits"), [(True, True, 0), (True, False, 1), (False, True, 1), (False, False, 1)]
)
def test_copies_of_batches_take_the_time_of_the_host_s_link(
    tmp_path: Path, pinned: bool, non_blocking: bool, waits: int
) -> None:
    """The GPU reads pinned memory itself; the CPU stages other memory, and waits before it does."""
    script, output = tmp_path / "copies.py", tmp_path / "step.json"
    script.write_text(
        MODEL
        + f"""
loader = torch.utils.data.DataLoader(torch.randn(32, 2**12, 64), batch_size=8, pin_memory={pinned})
for x in loader:
    model(x.to("cuda", non_blocking={non_blocking})).mean().backward(); optimizer.step(); optimizer.zero_grad()
"""
    )
    step = captured_facts("python", str(script), options=("-o", str(output), "--predict", "--gpu", "h200"))[
        "prediction"
    ]
    captured = read_captured(str(output))
    ops = [op for layer, _ in captured.stage.counted_layers(1) for op in layer.all_ops]
    copies = [op.work.size_bytes for op in ops if isinstance(op.work, HostCopy)]
    assert copies == ([2**15 * 64 * 4] if pinned else [])
    assert sum(op.host_reads for op in ops) == waits
    seconds = 2**15 * 64 * 4 / (55.2e9 if pinned else 7.2e9)
    assert seconds < step["step_s"] < seconds + 2e-3


def test_a_scaler_waits_for_the_gradients(tmp_path: Path) -> None:
    """It reads whether any is infinite before it lets the optimizer update, in every step."""
    script, output = tmp_path / "scaled.py", tmp_path / "step.json"
    script.write_text(
        MODEL
        + """
scaler = torch.amp.GradScaler("cuda")
for step in range(4):
    scaler.scale(model(torch.randn(8, 64, device="cuda")).mean()).backward()
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
"""
    )
    captured_facts("python", str(script), options=("-o", str(output)))
    (update,) = read_captured(str(output)).stage.epilogue
    assert [op.name for op in update.forward if op.host_reads] == ["update"]


def test_batches_can_be_described(tmp_path: Path) -> None:
    script = tmp_path / "loads.py"
    script.write_text(
        MODEL
        + """
class Absent(torch.utils.data.Dataset):
    def __len__(self): return 10
    def __getitem__(self, index): raise OSError("no data here")
for x, y in torch.utils.data.DataLoader(Absent(), batch_size=4, num_workers=2):
    loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
    )
    facts = captured_facts("python", str(script), options=("--batch", "48x64,48:int64"))
    assert facts["batch"] == 48
    done = run_capture("python", str(script), options=("--batch", "48xa"))
    assert done.returncode != 0
    assert "expected sizes and a type" in done.stderr


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('data')", "broken.py:5: KeyError"),
        ("os.environ['LOCAL_RANK']", "broken.py:5: KeyError: 'LOCAL_RANK'; start the script with torchrun"),
        ("model(torch.randn(8, 65, device='cuda'))", "broken.py:5: RuntimeError"),
        ("pass", "ended before any optimizer step"),
        ("while torch.ones(1).cuda().item() > 0.5: pass", "a loop depends on the values of tensors"),
    ],
)
def test_errors_of_scripts_are_one_line(tmp_path: Path, body: str, message: str) -> None:
    script = tmp_path / "broken.py"
    script.write_text(MODEL + body)
    done = run_capture("python", str(script))
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_processes_that_a_script_starts_itself_are_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text("""
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
def train(rank, world, width):
    dist.init_process_group("nccl", rank=rank, world_size=world)
    model = DistributedDataParallel(torch.nn.Linear(width, width).cuda(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3): model(torch.randn(8, width, device=rank)).sum().backward(); optimizer.step()
if __name__ == "__main__":
    mp.spawn(train, args=(4, 64), nprocs=4)
""")
    facts = captured_facts("python", "-W", "ignore", str(script), options=("--predict", "--cluster", "hgx-h200"))
    assert facts["prediction"]["strategy"]["dp"] == 4


def test_errors_of_functions_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "faulty.py").write_text("def build():\n    raise RuntimeError('no data here')\n")
    monkeypatch.chdir(tmp_path)
    assert main(["capture", "faulty:build"]) == 2
    assert capsys.readouterr().err == "stepcast: faulty.py:2: RuntimeError: no data here\n"
    assert main(["capture", "faulty"]) == 2
    assert "expected a config.json, module:function" in capsys.readouterr().err


def test_a_script_that_stays_on_the_cpu_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "cpu.py"
    steps = "\nfor step in range(3): model(torch.randn(8, 64)).sum().backward(); optimizer.step()"
    script.write_text(MODEL.replace(".cuda()", "") + steps)
    done = run_capture("python", str(script), options=("--predict", "--gpu", "h200"))
    assert done.returncode == 2
    assert "cpu.py: the step runs nothing on a GPU" in done.stderr


def test_options_that_a_script_decides_are_refused() -> None:
    done = run_capture("python", "gpt.py", options=("--batch", "4"))
    assert done.returncode != 0
    assert "--batch has no effect on a script" in done.stderr
    done = run_capture("python", "absent.py")
    assert done.returncode != 0
    assert "no such script" in done.stderr
