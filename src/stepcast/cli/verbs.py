"""The verbs: a summary, a paragraph and two examples of each, and its page in the docs."""

from collections.abc import Iterator
from inspect import cleandoc

from stepcast.ir.dataclass import dataclass

VERB_TEXTS = """
predict: forecast a training step: time, breakdown, memory [predict]
    Forecasts one training step of a model under a strategy on a cluster: how long it takes, where the time
    goes and whether it fits into memory. The framework's defaults fill the options that are not given.
    $ predict llama-3.1-8b --cluster dgx-h100 --gpus 8 --framework fsdp
    $ predict llama-3.1-70b --cluster dgx-h100 --gpus 64 --tp 8 --pp 2
search: find the best strategies for a model on a cluster, and explain why [search]
    Finds the best strategies for a model on a number of GPUs, proves that no other candidate is better, and
    names the bottleneck. Options such as --tp 8 restrict the search.
    $ search --model llama-3.1-8b --cluster dgx-h100 --gpus 16 --gbs 128
    $ search --model llama-3.1-8b --cluster h100 --gpus 8 --gbs 64 --tp 2
plan: days, cost, energy and failures of a whole training run [plan]
    Reports the days, GPU-hours, cost and energy of a whole training run, with failures, checkpoints and repairs.
    $ plan --model llama-3.1-8b --cluster dgx-h100 --gpus 64 --tokens 1T
    $ plan --step-s 12 --gpus 1024 --steps 100000 --failures none
generate: serving and rollouts of a model: time per token, throughput, memory [generate]
    Forecasts the generation of text by vLLM, SGLang or TensorRT-LLM: time to first token, time per output token,
    throughput and the concurrency that fits; or the time of a batch of responses to completion, with its long tail.
    $ generate llama-3.1-70b --cluster dgx-h100 --tp 4 --concurrency 64
    $ generate qwen3-8b --cluster dgx-h100 --gpus 8 --requests 512
rl: a step of RL post-training: rollout, updates, idle GPUs, the best split [rl]
    Forecasts a step of GRPO, DAPO, PPO or RLOO: generation with its long tail, log-probabilities, updates, weight
    synchronisation and idle GPUs, colocated, split or asynchronous. --search finds the best use of the GPUs.
    $ rl qwen3-8b --cluster dgx-h100 --gpus 8 --prompts 128 --group 16
    $ rl qwen3-8b --cluster dgx-h100 --gpus 64 --search
sweep: run many predictions, searches or plans, locally or on a cluster, resumable [sweep]
    Answers every point of a specification (models x clusters x sizes x strategies) and stores the answers in
    one database. A killed sweep resumes with the same command.
    $ sweep examples/sweeps/small.toml --dry-run
    $ sweep examples/sweeps/small.toml -o answers
simulate: simulate a workload file on a cluster [simulate]
    Simulates a workload file (SimAI text, operator table, Chakra) on a cluster.
    $ simulate examples/simai-llama-405b.txt --cluster dgx-h100
    $ simulate examples/simai-gpt-13b.txt --cluster dgx-a100 --gantt
network: link utilisation and contention during a step [network]
    Simulates a step whose collectives and messages share NICs, rails and spines, and reports the utilisation of
    each tier over time, the busiest links, the jobs that share them, and the slowdown.
    $ network llama-3.1-8b --cluster dgx-h100 --gpus 64 --html links.html
    $ network examples/simai-gpt-13b.txt --cluster dgx-h100
capture: capture a PyTorch model as a workload, without a GPU [capture]
    Traces one training step of any PyTorch model without a GPU, and estimates its time on any.
    $ capture --predict --gpu h200 -- python train.py
    $ capture my_model:make -o mine.json
record: record a real PyTorch job, a trace per rank [record]
    Records a real PyTorch job, a trace per rank, for analyze.
    $ record -o run -- torchrun --nproc-per-node 8 train.py
    $ record -o run -- python train.py
run: execute a workload for real over torch.distributed [run]
    Executes a workload for real over torch.distributed, and compares it with its prediction.
    $ run examples/simai-gpt-13b.txt --cluster dgx-h100 --rank 0
    $ run --model llama-3.1-8b --cluster dgx-h100 --gpus 8 --rank 0
analyze: explain where the time of a measured run went [analyze]
    Explains where the time of a measured run went: waits, stragglers, bubble, overlapped communication.
    $ analyze examples/kineto-llama-1b.json.gz
    $ analyze examples/nccl-32-h100.txt --cluster dgx-h100
replay: replay a measured run under changed conditions [analyze]
    Replays a traced Megatron-LM run under changed conditions: other links, healthy ranks, other micro-batches.
    $ replay runs/gpt --what-if rank.7=healthy
    $ replay runs/gpt --what-if bandwidth.tp=2x
compare: compare two steps, each predicted or measured [analyze]
    Compares two steps: predicted vs measured, or measured vs measured.
    $ compare predicted.json runs/gpt
    $ compare before.json after.json --json
gate: fail CI if a run is slower than the runs before it, or than its forecast [gate]
    Compares a measured run with a history or a baseline, with noise learnt from repeats, and names the part that
    changed and the run it started with. The exit status is 1 for a regression.
    $ gate examples/gate/night-1.log --history gate.sqlite
    $ gate examples/gate/night-2.log --baseline examples/gate/night-1.log
watch: follow the log of a running job: drift, stragglers, slow links, expected finish [watch]
    Follows the log of a running job, compares its steps with their start and with the forecast, and names drift,
    stragglers, slow links and the expected finish.
    $ watch train.log
    $ watch examples/watch/megatron-timers.log --once
show: show the contents of a file of any known format [command-line]
    Shows the contents of a file of any known format, or an entry of the catalogue. Formats are detected by
    content, not by file name.
    $ show examples/simai-llama-405b.txt
    $ show dgx-h100
convert: write a file in another format [command-line]
    Writes a file in another format: simai, optable, chakra, perfetto or json.
    $ convert examples/simai-gpt-13b.txt gpt.et --to chakra
    $ convert examples/megatron-rank7.txt rank7.json --to perfetto
collective: estimate the time of a collective on a cluster [collectives]
    Estimates the time, algorithm bandwidth and bus bandwidth of one collective on a cluster.
    $ collective all-reduce --ranks 64 --size 1GiB --cluster dgx-h100
    $ collective all-to-all --ranks 8 --size 64MB --cluster h200
op: estimate the time of an operator on a GPU [compute]
    Estimates the time of one operator on a GPU, with its bottleneck and the source of the estimate.
    $ op matmul --m 8192 --n 8192 --k 8192 --gpu h100
    $ op attention --seq 8192 --heads 32 --head-dim 128 --gpu h200
calibrate: fit named constants to measured runs [calibrate]
    Fits named constants to your own runs, operators or collectives, and checks them on measurements that were
    left out of the fit.
    $ calibrate examples/operators-h200.csv --gpu h200 -o my-h200.toml
    $ calibrate examples/nccl-32-h100.txt --cluster dgx-h100 -o mine.toml
validate: compare predictions with measurements: the accuracy scoreboard [validate]
    Compares predictions with measurements, set by set, with the worst rows: the accuracy scoreboard.
    $ validate --set h200
    $ validate --set published -o rows.csv
profile: measure this GPU and write a calibration [profile]
    Measures the GPU of this machine with PyTorch and writes a calibration of it.
    $ profile -o my-gpu.toml
    $ profile --quick -o my-gpu.toml
list: list known formats, GPUs, clusters, models, frameworks and failure profiles [models]
    Lists the known formats, GPUs, clusters, models, frameworks and failure profiles.
    $ list gpus
    $ list models --json
mcp: answer agents over the Model Context Protocol [mcp]
    Offers predict, search, plan, analyze, collective and list as tools to coding agents, over standard streams. Tools
    read files below one folder alone, write none, and reach no network.
    $ mcp
    $ mcp --folder runs
serve: start the local app: forms, live answers, trace analysis
demo: a first look at the shipped examples [tutorial]
    Reads the shipped examples, forecasts one of them and writes traces and pages to open.
    $ demo
    $ demo --output first-look
completion: print a completion script for your shell
"""
# Verbs with a second spelling.
SPELLINGS = {"analyse": "analyze"}
# Verbs of other tools and of everyday language.
OTHER_VERBS = {
    other: verb
    for verb, others in {
        "predict": "estimate forecast run-model",
        "search": "optimize optimise tune autotune find best recommend",
        "plan": "cost budget",
        "generate": "inference infer rollout decode",
        "rl": "grpo ppo rlhf dapo",
        "show": "inspect info describe cat",
        "compare": "diff",
        "replay": "what-if whatif",
        "gate": "regression ci guard",
        "watch": "tail follow monitor",
        "convert": "export",
        "validate": "accuracy verify",
        "profile": "measure benchmark",
        "list": "ls models gpus clusters",
        "collective": "allreduce nccl",
        "op": "matmul gemm",
        "demo": "example quickstart",
    }.items()
    for other in others.split()
}


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of the command line; its module in ``cli`` has its name."""

    name: str
    summary: str
    page: str = ""
    about: str = ""
    examples: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return f"stepcast.cli.{self.name}"

    @property
    def sentence(self) -> str:
        return f"{self.summary[:1].upper()}{self.summary[1:]}."

    @property
    def epilog(self) -> str | None:
        """Two example commands."""
        return "\n".join(["examples:", *(f"  stepcast {each}" for each in self.examples)]) if self.page else None

    def help(self, width: int) -> str:
        """Return the text of ``stepcast help VERB``."""
        from stepcast.views.text import wrap

        options = f"All options: stepcast {self.name} --help"
        if not self.page:
            return f"{self.sentence}\n\n{options}"
        about = "\n".join(wrap(self.about, width))
        return f"{about}\n\n{self.epilog}\n\n{options}. Documentation: docs/{self.page}.md"


def _read_verbs(texts: str) -> Iterator[Verb]:
    for block in cleandoc(texts).replace("\n    ", "\t").splitlines():
        head, *lines = block.split("\t")
        name, _, rest = head.partition(": ")
        summary, _, page = rest.removesuffix("]").partition(" [")
        examples = tuple(line.removeprefix("$ ") for line in lines if line.startswith("$ "))
        yield Verb(name, summary, page, " ".join(line for line in lines if line[0] != "$"), examples)


VERBS = tuple(_read_verbs(VERB_TEXTS))
