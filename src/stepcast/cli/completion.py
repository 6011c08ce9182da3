"""``stepcast completion bash|zsh|fish``: a script made from the parsers themselves."""

import argparse

from stepcast.cli.main import VERBS, build_parser
from stepcast.inputs.source import DATA


def run(args: argparse.Namespace) -> int:
    chooser = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    words = {}
    for verb, sub in chooser.choices.items():
        words[verb] = [option for action in sub._actions for option in action.option_strings if option[:2] == "--"]
        places = (action for action in sub._actions if not action.option_strings)
        words[verb] += [str(choice) for action in places for choice in action.choices or ()]
    print(SCRIPTS[args.shell](words), end="")
    return 0


def _bash(words: dict[str, list[str]]) -> str:
    cases = "\n".join(f'    {verb}) words="{" ".join(listed)}" ;;' for verb, listed in words.items())
    script = (DATA / "completion.bash").read_text(encoding="utf-8")
    return script.replace("@VERBS@", " ".join(words)).replace("@CASES@", cases)


def _fish(words: dict[str, list[str]]) -> str:
    summaries = {verb.name: verb.summary for verb in VERBS}
    lines = []
    for verb, listed in words.items():
        lines.append(f"complete -c stepcast -n __fish_use_subcommand -f -a {verb} -d '{summaries[verb]}'")
        for word in listed:
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c stepcast -n '__fish_seen_subcommand_from {verb}' {kind}")
    return "\n".join(lines) + "\n"


ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
SCRIPTS = {"bash": _bash, "zsh": lambda words: ZSH + _bash(words), "fish": _fish}
