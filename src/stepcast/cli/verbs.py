"""The verbs: what each is for, in a line and in a paragraph, two commands, and the page of the docs."""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import cleandoc

TOLD = """
show: what is in a file of any known format [command-line]
    Says what is in a file of any known format, or in an entry of the catalogue. Files are recognised by
    their content, not by their name.
    $ show examples/simai-llama-405b.txt
    $ show dgx-h100
predict: run a model under a strategy on a cluster [predict]
    Takes a model, a place to run and a strategy, and says how long a training step takes, where the
    time goes and whether it fits. What is left out is the framework's usual choice, and said.
    $ predict llama-3.1-70b --cluster dgx-h100 --gpus 64 --tp 8 --pp 2
    $ predict llama-3.1-8b --gpu h200 --framework pytorch
search: the best strategies of a model on a cluster, and why [search]
    Finds the best strategies of a model on so many GPUs, proves that no other is better, and says what
    binds. Choices that are given, as --tp 8, stay as they are.
    $ search --model llama-3.1-8b --cluster dgx-h100 --gpus 16 --gbs 128
    $ search --model llama-3.1-8b --cluster h100 --gpus 8 --gbs 64 --tp 2
sweep: many predictions or searches at once, resumable, here or on a cluster [sweep]
    Asks for every point of a spec, models x clusters x sizes x strategies, into one store that no kill
    or full disk tears; the same command goes on where it stopped.
    $ sweep examples/sweeps/small.toml --dry-run
    $ sweep examples/sweeps/small.toml -o answers
plan: days, cost, energy and failures of a whole run [plan]
    Days, GPU-hours, cost and energy of a whole run, with failures, checkpoints and repairs.
    $ plan --model llama-3.1-8b --cluster dgx-h100 --gpus 64 --tokens 1T
    $ plan --step-s 12 --gpus 1024 --steps 100000 --failures none
simulate: run a workload file on a cluster [simulate]
    Runs a workload file (SimAI text, operator table, Chakra) on a cluster.
    $ simulate examples/simai-llama-405b.txt --cluster dgx-h100
    $ simulate examples/simai-gpt-13b.txt --cluster dgx-a100 --gantt
network: what the links do while a step runs [network]
    Runs a step whose collectives and messages share NICs, rails and spines as they come, and says how
    full each tier is over time, which links are hottest, who shares them, and what that costs.
    $ network llama-3.1-8b --cluster dgx-h100 --gpus 64 --html links.html
    $ network examples/simai-gpt-13b.txt --cluster dgx-h100
capture: a PyTorch model as a workload, without a GPU [capture]
    Traces one training step of any PyTorch model without a GPU, and prices it on any.
    $ capture config.json --predict --gpu h200
    $ capture my_model:make -o mine.json
record: a real PyTorch job, written down per rank [record]
    Writes down what a real job does, per rank, for analyze.
    $ record -o run -- torchrun --nproc-per-node 8 train.py
    $ record -o run -- python train.py
run: execute a workload for real over torch.distributed [run]
    Executes a workload for real over torch.distributed, beside what was predicted of it.
    $ run examples/simai-gpt-13b.txt --cluster dgx-h100 --rank 0
    $ run --model llama-3.1-8b --cluster dgx-h100 --gpus 8 --rank 0
analyze: where a measured run's time went [analyze]
    Says where the time of a measured run went: waits, stragglers, bubble, what was hidden.
    $ analyze examples/kineto-llama-1b.json.gz
    $ analyze examples/nccl-32-h100.txt --cluster dgx-h100
replay: a measured run under changed conditions [analyze]
    Runs a traced Megatron-LM run again under changed conditions: other links, healthy ranks, other
    micro-batches.
    $ replay runs/gpt --what-if rank.7=healthy
    $ replay runs/gpt --what-if bandwidth.tp=2x
compare: two steps side by side, each predicted or measured [analyze]
    Puts two accounts of a step side by side: predicted beside measured, or measured beside measured.
    $ compare predicted.json runs/gpt
    $ compare before.json after.json --json
convert: write a file in another format [command-line]
    Writes a file in another format: simai, optable, chakra, perfetto or json.
    $ convert examples/simai-gpt-13b.txt gpt.et --to chakra
    $ convert examples/megatron-rank7.txt rank7.json --to perfetto
collective: what a collective costs on a cluster [collectives]
    What one collective costs on a cluster: time, algorithm bandwidth, bus bandwidth.
    $ collective all-reduce --ranks 64 --size 1GiB --cluster dgx-h100
    $ collective all-to-all --ranks 8 --size 64MB --cluster h200
op: what an operator costs on a GPU [compute]
    What one operator costs on a GPU: time, what bounds it, where the number comes from.
    $ op matmul --m 8192 --n 8192 --k 8192 --gpu h100
    $ op attention --seq 8192 --heads 32 --head-dim 128 --gpu h200
calibrate: fit named constants to measured runs [calibrate]
    Fits named constants to your own runs, operators or collectives, and checks them on what was left
    out.
    $ calibrate examples/operators-h200.csv --gpu h200 -o my-h200.toml
    $ calibrate examples/nccl-32-h100.txt --cluster dgx-h100 -o mine.toml
validate: the accuracy scoreboard: predictions against measurements [validate]
    The accuracy scoreboard: predictions beside measurements, set by set, with the worst rows.
    $ validate --set h200
    $ validate --set published -o rows.csv
profile: measure this GPU and write a calibration [profile]
    Measures this machine's GPU with PyTorch and writes a calibration of it.
    $ profile -o my-gpu.toml
    $ profile --quick -o my-gpu.toml
list: the formats, GPUs, clusters, models, frameworks and failures stepcast knows [models]
    What stepcast knows: formats, GPUs, clusters, models, frameworks, failure profiles.
    $ list gpus
    $ list models --json
serve: the local app: forms, live answers, traces to look into
demo: a first look on the shipped examples [tutorial]
    A first look: reads the shipped examples, forecasts one of them and writes traces to open.
    $ demo
    $ demo --output first-look
completion: print a completion script for your shell
"""


@dataclass(frozen=True, slots=True)
class Verb:
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
        """Commands to begin with."""
        return "\n".join(["examples:", *(f"  stepcast {each}" for each in self.examples)]) if self.page else None

    def help(self, width: int) -> str:
        """What ``stepcast help VERB`` prints."""
        from stepcast.views.text import wrap

        options = f"All options: stepcast {self.name} --help"
        if not self.page:
            return f"{self.sentence}\n\n{options}"
        about = "\n".join(wrap(self.about, width))
        return f"{about}\n\n{self.epilog}\n\n{options}. The page: docs/{self.page}.md"


def _verbs(told: str) -> Iterator[Verb]:
    for block in cleandoc(told).replace("\n    ", "\t").splitlines():
        head, *lines = block.split("\t")
        name, _, rest = head.partition(": ")
        summary, _, page = rest.removesuffix("]").partition(" [")
        examples = tuple(line.removeprefix("$ ") for line in lines if line.startswith("$ "))
        yield Verb(name, summary, page, " ".join(line for line in lines if line[0] != "$"), examples)


VERBS = tuple(_verbs(TOLD))
