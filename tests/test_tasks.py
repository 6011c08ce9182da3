"""Tasks of people in several roles: the command that a person would type first, and what it must answer.

A task passes where the first command already answers: its words are understood, and what it prints holds what
was asked for. Where no answer exists, the one line that comes instead must say how to get one.
"""

import shlex
from pathlib import Path

import pytest

from tests.cli.test_main import run
from tests.shared import ROOT

CONFIGS = "configs"
P8 = "predict --model llama-3.1-8b --cluster dgx-h100"
P70 = "predict --model llama-3.1-70b --cluster dgx-h100"
# Role, question, command, exit status, what must be told.
TASKS: list[tuple[str, str, str, int, tuple[str, ...]]] = [
    # ---- who trains a model from scratch
    (
        "pretraining",
        "how long is a step?",
        f"{P70} --gpus 512 --tp 8 --pp 4 --seq 8k",
        0,
        ("step  ", "90 % interval", "70.55B parameters"),
    ),
    ("pretraining", "does it fit on 8 GPUs?", f"{P70} --gpus 8 --tp 8", 0, ("DOES NOT FIT", "to fit")),
    ("pretraining", "what would make it fit?", f"{P8} --gpus 8 --mbs 8 --gbs 64", 0, ("to fit         --", " %), ")),
    (
        "pretraining",
        "what fills the memory?",
        f"{P70} --gpus 64 --tp 8 --pp 2 --memory",
        0,
        ("parameters", "optimizer", "activations"),
    ),
    (
        "pretraining",
        "fail my script if it does not fit",
        f"{P8} --gpus 8 --micro-batch 8 --require-fit",
        1,
        ("DOES NOT FIT",),
    ),
    ("pretraining", "with FSDP?", f"{P8} --gpus 64 --fsdp", 0, ("fsdp", "step  ")),
    ("pretraining", "in fp8?", f"{P8} --gpus 64 --fp8", 0, ("in fp8",)),
    (
        "pretraining",
        "a mixture of experts",
        "predict deepseek-v3 --cluster dgx-h100 --gpus 1024 --pp 16 --ep 64",
        0,
        ("expert parallel", "671B parameters"),
    ),
    (
        "pretraining",
        "my launch script",
        "predict --config examples/configs/megatron-llama3-8b.sh --cluster dgx-h100",
        0,
        ("megatron-lm", "no effect on step time or memory (8): master-addr"),
    ),
    (
        "pretraining",
        "which strategy is best?",
        "search --model llama-3.2-1b --cluster h100 --gpus 8 --gbs 32 --seq 2k --schedule 1f1b",
        0,
        ("rank ", "dp 8, micro-batch 4, zero-1", "bottleneck"),
    ),
    # ---- who decides what to rent
    (
        "deciding",
        "H100, H200 or B200?",
        "plan llama-3.1-70b --cluster dgx-h100,dgx-h200,dgx-b200 --gpus 64 --tp 8 --tokens 1T --price auto --runs 50",
        0,
        ("best cost", "best days", "break-even price", "dgx-b200"),
    ),
    (
        "deciding",
        "the best layout on each",
        "search llama-3.2-1b --cluster h100,a100 --gpus 4 --gbs 8 --seq 2k --workers 1",
        0,
        ("best step time", "reproduce a row"),
    ),
    (
        "deciding",
        "which framework?",
        f"{P8} --gpus 64 --framework torchtitan,megatron-core,nemo --gbs 512 --seq 4k",
        0,
        ("best throughput per GPU", "torchtitan"),
    ),
    (
        "deciding",
        "how many GPUs?",
        "plan llama-3.1-8b --cluster dgx-h100 --gpus 64,128,256 --tokens 1T --gbs 1024 --runs 50",
        0,
        ("256 GPUs", "days", "goodput"),
    ),
    (
        "deciding",
        "with our prices",
        f"{P8},dgx-b200 --gpus 64 --tokens 1T --price 2.1,4.9",
        0,
        ("break-even price", "against"),
    ),
    ("deciding", "what do GPUs cost?", "list prices", 0, ("h100-sxm", "2026")),
    (
        "deciding",
        "in euros",
        "plan llama-3.1-8b --cluster dgx-h100 --gpus 64 --tokens 1T --price 2.5 --currency EUR --runs 50",
        0,
        ("EUR",),
    ),
    (
        "deciding",
        "the winner as a launch script",
        "search llama-3.2-1b --cluster h100 --gpus 4 --gbs 8 --seq 2k --workers 1 --emit megatron",
        0,
        ("torchrun", "--tensor-model-parallel-size"),
    ),
    (
        "deciding",
        "as a torchtitan job",
        f"{P8} --gpus 64 --framework torchtitan --emit torchtitan=job.toml",
        0,
        ("wrote job.toml",),
    ),
    ("deciding", "a page for my boss", f"{P8},dgx-b200 --gpus 64 --html decision.html", 0, ("decision.html",)),
    (
        "deciding",
        "two clouds",
        "predict llama-3.1-8b --cluster p5.48xlarge,azure-nd-h100-v5 --gpus 64",
        0,
        ("p5.48xlarge", "azure-nd-h100-v5"),
    ),
    (
        "deciding",
        "no spare nodes",
        "plan llama-3.1-70b --cluster dgx-h100 --gpus 512 --tp 8 --tokens 1T --spares 0 --runs 50",
        0,
        ("spare nodes", "goodput"),
    ),
    # ---- who tunes one on few GPUs
    ("fine-tuning", "one H200", "predict llama-3.1-8b --gpu h200 --framework hf", 0, ("1 h200", "transformers")),
    (
        "fine-tuning",
        "my gaming card",
        "predict llama-3.2-1b --gpu 4090 --framework pytorch --seq 2k",
        0,
        ("1 rtx-4090", "fits", "ada"),
    ),
    ("fine-tuning", "LoRA", "predict llama-3.1-8b --gpu 'RTX 4090' --lora 16 --seq 2k --gbs 4", 0, ("rtx-4090",)),
    (
        "fine-tuning",
        "gradient checkpointing",
        "predict llama-3.1-8b --gpu h100 --gradient-checkpointing",
        0,
        ("recompute full",),
    ),
    (
        "fine-tuning",
        "my DeepSpeed file",
        f"predict --config {CONFIGS}/deepspeed/zero3_offload.json --model llama-3.1-8b --gpu a100 --gpus 8",
        0,
        ("deepspeed", "zero-3"),
    ),
    (
        "fine-tuning",
        "my accelerate file",
        f"predict --config {CONFIGS}/accelerate/fsdp.yaml --model qwen2.5-7b --cluster a100",
        0,
        ("accelerate", "fsdp"),
    ),
    (
        "fine-tuning",
        "a file that names no model",
        f"predict --config {CONFIGS}/accelerate/fsdp.yaml --cluster a100",
        2,
        ("use --model as well",),
    ),
    (
        "fine-tuning",
        "plain eager PyTorch",
        "predict llama-3.2-1b --gpu h200 --framework torch",
        0,
        ("plain kernels, eager",),
    ),
    ("fine-tuning", "8-bit optimizer", "predict llama-3.1-8b --gpu h100 --optimizer adamw:8bit", 0, ("memory  ",)),
    (
        "fine-tuning",
        "a checkpoint from the hub",
        "predict meta-llama/Llama-3.1-8B-Instruct --gpu h200",
        0,
        ("llama-3.1-8b",),
    ),
    # ---- who buys or rents
    (
        "planning",
        "how many days?",
        f"plan {P8.removeprefix('predict ')} --gpus 64 --tokens 1T --runs 50",
        0,
        ("days", "GPU-hours"),
    ),
    (
        "planning",
        "at what cost?",
        f"plan {P8.removeprefix('predict ')} --gpus 64 --tokens 1T --price $2.50/hr --runs 50",
        0,
        ("cost",),
    ),
    ("planning", "days without a plan", f"{P8} --gpus 64 --tokens '15 trillion'", 0, ("15T tokens", "days")),
    ("planning", "what can I rent?", "list clusters", 0, ("aws-p5", "azure-nd-h100-v5")),
    ("planning", "which GPUs are known?", "list gpus", 0, ("h200", "rtx-4090", "l40s")),
    ("planning", "on AWS", "predict llama-3.1-8b --cluster p5.48xlarge --gpus 64", 0, ("aws-p5",)),
    (
        "planning",
        "a TPU",
        "predict llama-3.1-8b --cluster tpu-v5p --gpus 64 --fsdp",
        0,
        ("64 tpu-v5p", "nobody measured", "fits"),
    ),
    (
        "planning",
        "16k GPUs",
        "predict llama-3.1-405b --cluster dgx-h100 --gpus 16k --tp 8 --pp 16 --gbs 2048 --seq 8k",
        0,
        ("16,384 h100-sxm", "6,144"),
    ),
    (
        "planning",
        "a measured step",
        "plan --step-s 12 --gpus 1024 --steps 10000 --failures none --runs 20",
        0,
        ("takes", "GPU-hours"),
    ),
    (
        "planning",
        "H100 in bulk by its name",
        "predict llama-3.1-8b --cluster h100 --gpus 64",
        2,
        ("--cluster dgx-h100",),
    ),
    # ---- who builds the network
    (
        "network",
        "an all-reduce",
        "collective all-reduce --ranks 64 --size 1GiB --cluster dgx-h100",
        0,
        ("time", "GB/s"),
    ),
    ("network", "an all-to-all", "collective all-to-all --ranks 64 --size 256MB --cluster dgx-h100", 0, ("time",)),
    ("network", "one node by its GPU", "collective all-reduce --ranks 8 --size 1GiB --cluster h200", 0, ("time",)),
    ("network", "half the NICs", f"{P8} --gpus 64 --set node.nics=4", 0, ("step  ",)),
    (
        "network",
        "slower links, as people write them",
        f"{P8} --gpus 64 --set node.nic.bandwidth=200Gbps",
        0,
        ("step  ",),
    ),
    ("network", "my nccl-tests log", "analyze examples/nccl-32-h100.txt --cluster dgx-h100", 0, ("measured",)),
    ("network", "what is wrong with it?", "analyze examples/nccl-one-nic.txt --cluster dgx-h100", 0, ("NIC",)),
    ("network", "what a cluster is", "show dgx-h100", 0, ("h100-sxm",)),
    (
        "network",
        "a misspelt cluster",
        "collective all-reduce --ranks 8 --size 1GiB --cluster dgx-h10",
        2,
        ("did you mean dgx-h100",),
    ),
    (
        "network",
        "constants of my cluster",
        "calibrate examples/nccl-32-h100.txt --cluster dgx-h100 -o mine.toml",
        0,
        ("mean error", "left out"),
    ),
    # ---- who has traces of a run
    (
        "performance",
        "where did the time go?",
        "analyze examples/megatron-rank7.txt",
        0,
        ("bottleneck", "time breakdown"),
    ),
    ("performance", "a PyTorch trace", "analyze examples/kineto-llama-1b.json.gz", 0, ("step", "kernels")),
    ("performance", "British spelling", "analyse examples/megatron-rank7.txt", 0, ("bottleneck",)),
    ("performance", "what is this file?", "show examples/optimus-llama-1b.txt", 0, ("optimus",)),
    (
        "performance",
        "open it in Perfetto",
        "convert examples/megatron-rank7.txt out.json --to perfetto",
        0,
        ("out.json",),
    ),
    ("performance", "a trace of a forecast", f"{P8} --gpus 16 --pp 2 --timeline step.json", 0, ("ui.perfetto.dev",)),
    ("performance", "draw it", f"{P8} --gpus 16 --pp 4 --gantt", 0, ("stage",)),
    ("performance", "one matmul", "op matmul --m 8192 --n 8192 --k 8192 --gpu h100", 0, ("TFLOP/s", "source")),
    ("performance", "what it waited for", f"{P8} --gpus 16 --pp 2 --critical-path", 0, ("on the critical path",)),
    ("performance", "how sure are you?", f"{P8} --gpus 16 --jitter 0.05 --runs 20", 0, ("with jitter",)),
    # ---- who studies simulators
    (
        "research",
        "a SimAI workload",
        "simulate examples/simai-llama-405b.txt --cluster dgx-h100",
        0,
        ("workload  ", "1,024 h100-sxm"),
    ),
    (
        "research",
        "with SimAI's own prices",
        "simulate examples/simai-llama-405b.txt --engine simai",
        0,
        ("SimAI's part",),
    ),
    ("research", "write Chakra", "convert examples/simai-gpt-13b.txt gpt.et --to chakra", 0, ("gpt",)),
    ("research", "a generated workload", f"{P8} --gpus 8 --tp 2 --to-workload out.txt", 0, ("step  ",)),
    ("research", "as JSON", f"{P8} --gpus 8 --json", 0, ('"command"', '"version"', '"assumptions"')),
    ("research", "which formats?", "list formats", 0, ("chakra", "simai")),
    ("research", "which models?", "list models", 0, ("llama-3.1-405b",)),
    (
        "research",
        "a schedule by its other name",
        "predict llama-3.1-8b --cluster dgx-h100 --gpus 16 --pp 4 --pp-schedule ZBV",
        2,
        ("zb-v", "use vpp 2"),
    ),
    ("research", "keep a run", f"{P8} --gpus 16 --tp 2 --save run.toml", 0, ("step  ",)),
    ("research", "how far off?", "help validate", 0, ("stepcast validate --set h200",)),
    # ---- who comes with the words of other tools
    (
        "newcomer",
        "the arguments of a Trainer",
        "predict llama-3.1-8b --cluster h100 --gpus 8 --gradient-accumulation-steps 4 --per-device-train-batch-size 2",
        0,
        ("4 gradient accumulation steps", "micro-batches of 2"),
    ),
    (
        "newcomer",
        "an all-reduce over 64 GPUs",
        "collective allreduce --size 1GB --gpus 64 --cluster dgx-h100",
        0,
        ("bus bandwidth",),
    ),
    (
        "newcomer",
        "more GPUs than one node has",
        "search mixtral-8x7b --gpu h100 --gpus 16 --batch-size 64",
        2,
        ("--cluster dgx-h100",),
    ),
    (
        "newcomer",
        "an instance type of AWS",
        "predict llama-3.1-70b --cluster p5.48xlarge --nodes 4 --fsdp --activation-checkpointing",
        0,
        ("32 h100-sxm", "recompute full"),
    ),
    (
        "newcomer",
        "DeepEP",
        "predict deepseek-v3 --gpus 2048 --cluster dgx-h800 --ep 64 --pp 16 --dispatcher deepep",
        0,
        ("671B parameters",),
    ),
    ("newcomer", "Ulysses", f"{P8} --gpus 8 --cp 4 --cp-comm ulysses", 0, ("cp 4",)),
    ("newcomer", "a GPU without bf16", "predict gpt2 --gpu t4", 0, ("no bf16 matrix units",)),
    (
        "newcomer",
        "a DeepSpeed file alone",
        "predict --config examples/configs/deepspeed-zero3.json --cluster h100",
        2,
        ("use --model",),
    ),
    (
        "newcomer",
        "what does the run cost?",
        "plan llama-2-7b --cluster a100 --gpus 8 --tokens 1T --price 2",
        0,
        ("$", "days", "GPU-hours"),
    ),
    ("newcomer", "a misspelt dispatcher", f"{P8} --gpus 8 --dispatcher deepp", 2, ("did you mean deepep",)),
]


TUNING = "predict llama-3.1-8b --seq 2048 --micro-batch 2 --gradient-accumulation-steps 8"
TASKS += [
    (
        "hugging-face",
        "QLoRA of 50,000 samples on my card",
        f"{TUNING} --gpu rtx-4090 --framework peft --lora 16,32 --qlora --gradient-checkpointing --samples 50k --epochs 3",
        0,
        ("rtx-4090", "fits", "GPU-hours"),
    ),
    ("hugging-face", "does full training fit?", f"{TUNING} --gpu rtx-4090 --framework trainer", 0, ("DOES NOT FIT",)),
    (
        "hugging-face",
        "what does QLoRA need?",
        f"{TUNING} --gpu l40s --framework peft --lora-r 64 --load-in-4bit --json",
        0,
        ('"step_s"',),
    ),
    (
        "hugging-face",
        "what does packing save?",
        f"{TUNING} --gpu h100 --framework peft --lora 16 --lengths mean=600,max=2048 --packing --samples 50k",
        0,
        ("packed sequences of 2,048 tokens", "filled"),
    ),
    (
        "hugging-face",
        "DPO with adapters",
        f"{TUNING} --gpu h100 --framework peft --lora 16 --dpo",
        0,
        ("2 pairs of a micro-batch are 4 sequences",),
    ),
    (
        "hugging-face",
        "my Axolotl file",
        "predict --config examples/configs/axolotl-qlora-8b.yaml --gpu l40s",
        0,
        ("axolotl", "same as: stepcast predict --model=llama-3.1-8b"),
    ),
    (
        "hugging-face",
        "70B on eight GPUs",
        "predict llama-3.1-70b --gpu h100 --gpus 8 --framework peft --fsdp --lora 16 --gradient-checkpointing --seq 2048",
        0,
        ("fits", "fsdp"),
    ),
    ("hugging-face", "on my Mac?", f"{TUNING} --gpu m3-max --lora 16", 2, ("Apple silicon is not modelled",)),
]


def test_ten_tasks_in_each_role() -> None:
    roles = [role for role, *_ in TASKS]
    assert all(roles.count(role) >= 8 for role in roles)
    assert len(TASKS) >= 78


@pytest.mark.parametrize(
    ("role", "question", "command", "status", "told"),
    TASKS,
    ids=[f"{role}: {question}" for role, question, *_ in TASKS],
)
def test_task(
    role: str,
    question: str,
    command: str,
    status: int,
    told: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / CONFIGS).symlink_to(ROOT / "tests" / "inputs" / "configs")
    ended, out, err = run(capsys, *shlex.split(command))
    printed = out + err
    assert ended == status, printed
    whole = " ".join(printed.split())
    for words in told:
        assert words in printed or words in whole, f"{role}, {question}: {command} printed\n{printed}"


# Typed wrong, or in other words: either it means the same as the second command, or the one line says the words.
OTHERWISE: list[tuple[str, str]] = [
    ("predict --modle llama-3.1-8b --gpu h200", "did you mean --model"),
    ("predict --model lama-3.1-8b --gpu h200", "did you mean llama-3.1-8b"),
    ("predict --model llama3.1-8B --gpu h200", "llama-3.1-8b: 8.03B"),
    ("predict --model Llama_3_1_8B --gpu h200", "llama-3.1-8b: 8.03B"),
    ("predict llama-3.1-8b --gpu h20O", "did you mean h20 or h200"),
    ("predict llama-3.1-8b --gpu H200-SXM", "1 h200"),
    ("predict llama-3.1-8b --cluster DGX_H100 --gpus 8", "dgx-h100: 8"),
    ("predict llama-3.1-8b --cluster dgxh100 --gpus 8", "did you mean dgx-h100"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpu 8", "--gpu and --cluster both"),
    ("predict llama-3.1-8b --cluster dgx-h100 --ngpus 8", "8 h100-sxm"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus eight", "expected a whole number"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --tp 3", "use --tp 2 or 4"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 64 --tp 10", "use --tp 8 or 16"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --tensor-paralel 2", "did you mean --tensor-parallel"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --tensor_parallel 2", "tp 2, dp 4"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 -tp 2", "tp 2, dp 4"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --zero stage3", "zero-3"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --zero 4", "choose from none, zero-1, zero-2, zero-3, fsdp"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --sharding fdsp", "did you mean fsdp"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --precision BFloat16", "in bf16"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --precision fp7", "did you mean"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --seq 8K", "of 8,192 tokens"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --sequence-length=8192", "of 8,192 tokens"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --seq 8kb", "expected a whole number"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --batch-size 60", "the nearest is 64"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 16 --pp 3", "--pp 2 or 4"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 16 --pp 4 --schedule interleved", "did you mean interleaved"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --framework torch-titan", "torchtitan"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --framework megatorn", "did you mean megatron"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --recompute ful", "expected none, selective, full"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --tokens 15TT", "is not a count"),
    ("predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --set node.nics=4x", "node.nics"),
    (
        "predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --set node.nic.bandwith=200Gbps",
        "did you mean node.nic.bandwidth",
    ),
    ("predcit llama-3.1-8b --gpu h200", "did you mean predict"),
    ("forecast llama-3.1-8b --gpu h200", "did you mean predict"),
    ("optimise --model llama-3.1-8b", "did you mean search"),
    ("list gpu", "did you mean gpus"),
    ("collective AllReduce --ranks 8 --size 1GiB --cluster dgx-h100", "all-reduce"),
    ("op matmull --m 1 --n 1 --k 1 --gpu h100", "did you mean matmul"),
    ("show exampels/simai-llama-405b.txt", "no such file"),
]


def test_forty_other_wordings() -> None:
    assert len({command for command, _ in OTHERWISE}) == 40


@pytest.mark.parametrize(("command", "words"), OTHERWISE, ids=[command for command, _ in OTHERWISE])
def test_other_wordings_are_understood_or_answered(
    command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *shlex.split(command))
    assert words in " ".join((out + err).split())
    if status:
        assert (status, out, err.count("\n")) == (2, "", 1)
