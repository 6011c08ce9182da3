"""Runs that files describe: configurations of other tools, and runs that ``predict --save`` wrote.

What a file says stands before the words of the command line, so that those win.
"""

import argparse
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepcast.version import __version__

if TYPE_CHECKING:
    from stepcast.inputs.configs.keys import RunConfig
    from stepcast.questions.settle import SettledRun

TABLE = "predict"
CONFIGS = (".toml", ".yaml", ".yml", ".sh", ".bash", ".slurm", ".sbatch", ".args", ".txt")
MOST_OPTIONS = 1_000


@dataclass(frozen=True, slots=True)
class Described:
    """What a file says: choices of a question, and how much of it was understood."""

    choices: Mapping[str, Any]
    file: str
    config: "RunConfig | None" = None

    def facts(self, command: str) -> dict[str, Any] | None:
        """Return what became of each key, and the *command* that asks for the same without the file."""
        if self.config is None:
            return None
        found = self.config
        return {
            "file": self.file,
            "format": found.format,
            "understood": list(found.understood),
            "ignored": list(found.ignored),
            "not_modelled": dict(found.not_modelled),
            "unknown": dict(found.unknown),
            "unset": list(found.unset),
            "assumed": list(found.assumed),
            "command": command,
        }

    @property
    def warnings(self) -> list[str]:
        """Return a sentence for each reason why keys are not modelled, and one for unrecognised keys."""
        if self.config is None:
            return []
        reasons: dict[str, list[str]] = {}
        for key, why in self.config.not_modelled.items():
            reasons.setdefault(why, []).append(key)
        found = [f"{self.file}: {', '.join(keys)} not modelled: {why}" for why, keys in reasons.items()]
        if self.config.unknown:
            found.append(f"{self.file}: unrecognised keys left out: {', '.join(self.config.unknown)}")
        return found


def described(args: argparse.Namespace) -> Described | None:
    """What the files that *args* name say; None where they name none."""
    run, config = getattr(args, "run", None), getattr(args, "config", None)
    if config is not None and not isinstance(config, str):
        return None
    if run is not None and config is not None:
        raise ValueError(f"{run}: --config {config} describes a run already; leave one of them out")
    leaves_out = getattr(args, "ignore_unknown", False)
    if config is not None:
        return _of_config(config, leaves_out)
    if run is None:
        return None
    if args.model is not None and not _is_run(run):
        raise ValueError(f"{run}: --model names the model already; leave one of them out")
    if not _is_run(run) or (getattr(args, "workloads", False) and is_workload(run)):
        return Described({"model": run}, run)
    return _saved(run) if _is_saved(run) else _of_config(run, leaves_out)


def _is_run(name: str) -> bool:
    """Whether *name* is a file that describes more than a model."""
    if not (name.endswith(CONFIGS) or (name.endswith(".json") and "config.json" not in os.path.basename(name))):
        return False
    return os.path.isfile(name) and not _is_model(name)


def is_workload(name: str) -> bool:
    """Whether *name* is a file that says what must run."""
    from stepcast.inputs.source import Source
    from stepcast.inputs.table import recognise

    if not os.path.isfile(name) or name.endswith((".toml", ".json")):
        return False
    try:
        return recognise(Source(name)).gives == "workload"
    except ValueError:
        return False


def _is_model(name: str) -> bool:
    """A TOML file of a model has its sizes at the top, one of Hugging Face names its kind there."""
    from stepcast.inputs.huggingface.reader import looks_like
    from stepcast.inputs.source import Source, read_toml
    from stepcast.models.catalog import SIZES

    if name.endswith(".json"):
        return looks_like(Source(name).head)
    return name.endswith(".toml") and len(set(SIZES) & set(read_toml(name))) > 1


def _is_saved(name: str) -> bool:
    from stepcast.inputs.source import read_toml

    return name.endswith(".toml") and isinstance(read_toml(name).get(TABLE), dict)


def _saved(name: str) -> Described:
    from stepcast.inputs.source import read_toml

    table = read_toml(name)[TABLE]
    if len(table) > MOST_OPTIONS:
        raise ValueError(f"{name}: more than {MOST_OPTIONS:,} options; is it a run that --save wrote?")
    return Described(_read_table(table, name), name)


def _read_table(table: Mapping[str, Any], file: str) -> dict[str, Any]:
    from stepcast.questions.spelling import read_choices

    try:
        return read_choices(table)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None


def _of_config(name: str, leaves_out_unknown: bool) -> Described:
    from stepcast.inputs.configs.reader import read_config
    from stepcast.models.catalog import model_words

    if _is_toml_run(name):
        return _saved(name)
    config = read_config(name)
    if config.unknown and not leaves_out_unknown:
        raise ValueError(f"{name}: {_unrecognised(config)}; --ignore-unknown leaves it out")
    choices = {"framework": config.framework, **config.options}
    stem = os.path.basename(name).partition(".")[0]
    seq = config.options.get("seq", 0)
    if model := model_words(config.sizes, [config.model, stem], int(seq)):
        choices = {"model": model, **choices}
    return Described(_read_table(choices, name), name, config)


def _unrecognised(config: "RunConfig") -> str:
    """Name the keys that a tool does not have, with the nearest ones that it has."""
    dashes = "--" if config.format == "megatron-lm" else ""
    named = [
        f"'{dashes}{key}'" + (f" (did you mean '{dashes}{near}'?)" if near else "")
        for key, near in config.unknown.items()
    ]
    return f"{config.format} has no {', '.join(named[:5])}" + (f" and {len(named) - 5} more" if named[5:] else "")


def _is_toml_run(name: str) -> bool:
    return name.endswith(".toml") and os.path.isfile(name) and _is_saved(name)


def equivalent_command(run: "SettledRun", verb: str = "predict") -> str:
    """Return the command that asks for the same run without its file."""
    from stepcast.questions.spelling import spell_choices

    choices = {name: value for name, value in run.question.choices.items() if name not in ("nodes", "dp")}
    return shlex.join(["stepcast", verb, *spell_choices(choices)])


def save_run(run: "SettledRun") -> bytes:
    """Return the run as a file that ``stepcast predict FILE`` runs again, with the defaults used."""
    strategy = run.strategy
    settled = {
        "gpus": strategy.layout.gpus,
        "seq": strategy.seq,
        "global_batch": strategy.global_batch,
        "framework": run.question.framework or run.framework.name,
    }
    choices = {name: value for name, value in run.question.choices.items() if name not in ("nodes", "dp")}
    lines = [
        "# Run it again with 'stepcast predict FILE'; options on the command line win.",
        f"stepcast = {_toml(__version__)}",
        "",
        f"[{TABLE}]",
    ]
    lines += [f"{name.replace('_', '-')} = {_toml(value)}" for name, value in {**choices, **settled}.items()]
    return ("\n".join(lines) + "\n").encode()


def _toml(value: Any) -> str:
    import json

    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value))
