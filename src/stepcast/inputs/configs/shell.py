"""The flags of a launch script: its variables, arrays and simple conditions, without running it."""

import re
import shlex
from collections.abc import Iterator, Sequence

from stepcast.inputs.errors import FormatError
from stepcast.ir.limits import SCRIPT

ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
ARITHMETIC = re.compile(r"\$\(\(([^()\n]*(?:\([^()\n]*\)[^()\n]*)*)\)\)")
COMMAND = re.compile(r"\$\([^()]*(?:\([^()]*\)[^()]*)*\)|`[^`]*`")
VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?:(:?[-=])((?:[^{}]|\{[^{}]*\})*))?\}|(\w+))")
SUM = re.compile(r"[\d\s+\-*/%]+")
MOST_WORDS = 20_000
EXPRESSION = "\x01"
UNKNOWN = "$UNKNOWN"
WORDS_OF_SHELL = ("if", "then", "elif", "else", "fi")


# What a Slurm job asks for, and the variables in which Slurm tells it again.
ASKED = re.compile(
    r"^#SBATCH\s+(?:--(nodes|gpus-per-node|gres)[= ]|-(N)\s*)(?:gpu:)?(?:[a-z]\w*:)?(\d+)\b", re.MULTILINE
)
TOLD = {
    "nodes": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "N": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "gpus-per-node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
    "gres": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
}


def flags_of(text: str) -> dict[str, str | bool]:
    """``--name value`` of all commands; of all its variables where no command has any."""
    _check_length(text)
    script = _Script()
    for long, short, number in ASKED.findall(text):
        script.variables |= {name: [number] for name in TOLD[long or short]}
    script.run(_words(text))
    found = _flags(script.commands)
    if not found:
        everything = [word for words in script.variables.values() for word in words]
        found = _flags(everything)
    return found | {f"${name}": " ".join(words) for name, words in script.variables.items() if words}


def _check_length(text: str) -> None:
    """The time to read a word goes with the square of its length."""
    if len(text) > SCRIPT.most:
        raise FormatError(f"{SCRIPT.said}; is it a launch script?")


def _words(text: str) -> list[str]:
    text = text.replace("\\\r\n", " ").replace("\\\n", " ").replace("\r", "")
    text = ARITHMETIC.sub(lambda found: EXPRESSION + found[1].replace(" ", "") + EXPRESSION, text)
    text = COMMAND.sub(UNKNOWN, text)
    _check_length(text)  # two marks may stand for a longer word
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();&|")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError as error:
        raise FormatError(f"is not a shell script that can be read: {error}") from None
    if len(words) > MOST_WORDS:
        raise FormatError(f"has more than {MOST_WORDS:,} words; is it a launch script?")
    return words


class _Script:
    """Variables as lists of words, and the words of commands, as far as they can be told."""

    def __init__(self) -> None:
        self.variables: dict[str, list[str]] = {}
        self.commands: list[str] = []
        # For each open condition: whether this branch runs, and whether one has run.
        self.branches: list[tuple[bool, bool]] = []
        self.size = 0

    def run(self, words: Sequence[str]) -> None:
        at = 0
        while at < len(words):
            at = self._step(words, at)

    def _step(self, words: Sequence[str], at: int) -> int:
        word = words[at]
        if word in WORDS_OF_SHELL:
            return self._branch(words, at)
        if not all(runs for runs, _ in self.branches):
            return at + 1
        if found := ASSIGNED.fullmatch(word):
            name, added, value = found.groups()
            end = at + 1
            if not value and end < len(words) and words[end].startswith("("):
                end, inside = self._array(words, end)
            else:
                inside = self.expand(value)
            self.variables[name] = [*(self.variables.get(name, []) if added else []), *inside]
            self._grow(self.variables[name])
            return end
        expanded = self.expand(word)
        self._grow(expanded)
        self.commands += expanded
        return at + 1

    def _grow(self, words: Sequence[str]) -> None:
        self.size += sum(map(len, words)) + len(words)
        if self.size > SCRIPT.most:
            raise FormatError("its variables grow too long; is it a launch script?")

    def _array(self, words: Sequence[str], at: int) -> tuple[int, list[str]]:
        inside: list[str] = []
        end = at + 1
        if words[at] == "()":
            return end, inside
        while end < len(words) and not words[end].startswith(")"):
            inside += self.expand(words[end])
            end += 1
        return end + 1, inside

    def _branch(self, words: Sequence[str], at: int) -> int:
        word = words[at]
        if word == "fi":
            self.branches = self.branches[:-1]
        elif word == "then":
            pass
        elif word == "else" and self.branches:
            _, ran = self.branches[-1]
            self.branches[-1] = (not ran, True)
        elif word in ("if", "elif"):
            end = next((n for n in range(at, len(words)) if words[n] == "then"), len(words))
            holds = self._holds(words[at + 1 : end])
            ran = self.branches.pop()[1] if word == "elif" and self.branches else False
            self.branches.append((holds and not ran, holds or ran))
            return end
        return at + 1

    def _holds(self, words: Sequence[str]) -> bool:
        """A test of variables that are known; what cannot be told does not hold."""
        return any(all(map(self._is_true, _split(some, "&&"))) for some in _split(words, "||"))

    def _is_true(self, words: Sequence[str]) -> bool:
        plain = [word for word in words if word not in ("[", "]", "[[", "]]", ";", "test")]
        told = [" ".join(self.expand(word)) for word in plain]
        if any(UNKNOWN in word for word in told):
            return False
        match told:
            case ["!", *rest]:
                return not self._is_true(rest)
            case [left, ("==" | "=" | "-eq"), right]:
                return left == right
            case [left, ("!=" | "-ne"), right]:
                return left != right
            case ["-z", value]:
                return not value or value.startswith("$")
            case ["-n", value] | [value]:
                return bool(value) and not value.startswith(("$", "-"))
        return False

    def expand(self, word: str) -> list[str]:
        """*word* with its variables replaced, split as an unquoted one is."""
        if EXPRESSION in word:
            word = re.sub(f"{EXPRESSION}([^{EXPRESSION}]*){EXPRESSION}", self._sum, word)
        text = VARIABLE.sub(self._value, word)
        self._grow([text])
        return text.split()

    def _value(self, found: re.Match[str]) -> str:
        name, usual = found[1] or found[4], found[3]
        if name in self.variables:
            return " ".join(self.variables[name])
        if usual is not None:
            told = self.expand(usual.strip("\"'"))
            if "=" in found[2]:  # ``${NAME:=value}`` sets it
                self.variables[name] = told
            return " ".join(told)
        return found[0]

    def _sum(self, found: re.Match[str]) -> str:
        """Whole numbers added, multiplied and divided; anything else stays unknown."""
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: " ".join(self.variables.get(name[1], ["?"])), found[1])
        if not SUM.fullmatch(text) or len(text) > 100:
            return UNKNOWN
        terms = re.findall(r"\d+|[+\-*/%]", text)
        try:
            return str(_sum(terms))
        except (ValueError, ZeroDivisionError, IndexError):
            return UNKNOWN


def _split(words: Sequence[str], mark: str) -> Iterator[Sequence[str]]:
    """What stands between the *mark*s."""
    begin = 0
    for at, word in enumerate(words):
        if word == mark:
            yield words[begin:at]
            begin = at + 1
    yield words[begin:]


def _sum(terms: list[str]) -> int:
    """*terms* by the usual precedence."""
    total, sign, at = 0, 1, 0
    while at < len(terms):
        value = int(terms[at])
        at += 1
        while at < len(terms) and terms[at] in "*/%":
            other = int(terms[at + 1])
            value = value * other if terms[at] == "*" else value // other if terms[at] == "/" else value % other
            at += 2
        total += sign * value
        if at < len(terms):
            sign = 1 if terms[at] == "+" else -1
            at += 1
    return total


def _flags(words: Sequence[str]) -> dict[str, str | bool]:
    """``--name value``, ``--name=value`` and ``--name`` alone; the last word counts."""
    found: dict[str, str | bool] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--") or len(word) < 3:
            continue
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and at < len(words) and _is_value(words[at]):
            values.append(words[at])
            at += 1
        found[name.replace("_", "-")] = " ".join(values).strip("\"'") if values else True
    return found


def _is_value(word: str) -> bool:
    if word.startswith("-"):
        return re.fullmatch(r"-[\d.].*", word) is not None
    return word not in (";", "&", "&&", "|", "||", "(", ")") and not ASSIGNED.fullmatch(word)
