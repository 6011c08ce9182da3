"""The flags of a launch script: its variables, arrays and simple conditions, without running it."""

import re
import shlex
from collections.abc import Iterator, Sequence

from stepcast.inputs.expression import Expression
from stepcast.inputs.source import FormatError, expect, read_words
from stepcast.ir.limits import SCRIPT

ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
ARITHMETIC = re.compile(r"\$\(\(([^()\n]*(?:\([^()\n]*\)[^()\n]*)*)\)\)")
COMMAND = re.compile(r"\$\([^()]*(?:\([^()]*\)[^()]*)*\)|`[^`]*`")
VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?:(:?[-=])((?:[^{}]|\{[^{}]*\})*))?\}|(\w+))")
# Ends the values of a flag: another flag (a number may be negative), the end of a command, or an assignment.
NO_VALUE = re.compile(rf"-(?![\d.]).*|;|&&?|\|\|?|[()]|{ASSIGNED.pattern}", re.DOTALL)
SUM = re.compile(r"[\d\s+\-*/%]+")
MOST_WORDS = 20_000
EXPRESSION = "\x01"
UNKNOWN = "$UNKNOWN"

SLURM_VARIABLES = {option: names.split() for option, names in read_words("configs")["slurm"].items()}
REQUESTED = re.compile(
    r"^#SBATCH\s+(?:--(nodes|gpus-per-node|gres)[= ]|-(N)\s*)(?:gpu:)?(?:[a-z]\w*:)?(\d+)\b", re.MULTILINE
)


def read_flags(text: str) -> dict[str, str | bool]:
    """Return ``--name value`` of all commands; of all its variables where no command has any."""
    _check_length(text)
    script = _Script()
    for long, short, number in REQUESTED.findall(text):
        script.variables |= {name: [number] for name in SLURM_VARIABLES[long or short]}
    script.run(_split_words(text))
    flags = _find_flags(script.commands) or _find_flags([word for words in script.variables.values() for word in words])
    return flags | {f"${name}": " ".join(words) for name, words in script.variables.items() if words}


def _check_length(text: str) -> None:
    """Refuse long texts: the time to read a word grows with the square of its length."""
    expect(len(text) <= SCRIPT.most, f"{SCRIPT.message}; is it a launch script?")


def _split_words(text: str) -> list[str]:
    text = text.replace("\\\r\n", " ").replace("\\\n", " ").replace("\r", "")
    text = ARITHMETIC.sub(lambda match: EXPRESSION + match[1].replace(" ", "") + EXPRESSION, text)
    text = COMMAND.sub(UNKNOWN, text)
    _check_length(text)  # two marks may replace a shorter word
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();&|")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError as error:
        why = str(error).lower()
        raise FormatError(f"is no known configuration, and not a shell script that can be read ({why})") from None
    expect(len(words) <= MOST_WORDS, f"has more than {MOST_WORDS:,} words; is it a launch script?")
    return words


class _Script:
    """Variables as lists of words, and the words of commands, as far as they can be worked out."""

    def __init__(self) -> None:
        self.variables: dict[str, list[str]] = {}
        self.commands: list[str] = []
        # For each open condition: whether this branch runs, and whether one has run.
        self._branches: list[tuple[bool, bool]] = []
        self._size = 0

    def run(self, words: Sequence[str]) -> None:
        index = 0
        while index < len(words):
            word = words[index]
            if word in ("if", "then", "elif", "else", "fi"):
                index = self._branch(words, index)
            elif not all(runs for runs, _ in self._branches):
                index += 1
            elif assigned := ASSIGNED.fullmatch(word):
                name, added, value = assigned.groups()
                value_words = [*(self.variables.get(name, []) if added else []), *self.expand(value)]
                index += 1
                if not value and index < len(words) and words[index].startswith("("):  # an array
                    end = index + 1
                    while words[index] != "()" and end < len(words) and not words[end].startswith(")"):
                        value_words += self.expand(words[end])
                        end += 1
                    index = end + (words[index] != "()")
                self.variables[name] = self._grow(value_words)
            else:
                self.commands += self._grow(self.expand(word))
                index += 1

    def _grow(self, words: list[str]) -> list[str]:
        self._size += sum(map(len, words)) + len(words)
        expect(self._size <= SCRIPT.most, "its variables grow too long; is it a launch script?")
        return words

    def _branch(self, words: Sequence[str], index: int) -> int:
        word = words[index]
        if word == "fi":
            self._branches = self._branches[:-1]
        elif word == "else" and self._branches:
            self._branches[-1] = (not self._branches[-1][1], True)
        elif word in ("if", "elif"):
            end = next((n for n in range(index, len(words)) if words[n] == "then"), len(words))
            # What cannot be worked out does not hold.
            parts = split_words(words[index + 1 : end], "||")
            holds = any(all(map(self._is_true, split_words(part, "&&"))) for part in parts)
            ran = self._branches.pop()[1] if word == "elif" and self._branches else False
            self._branches.append((holds and not ran, holds or ran))
            return end
        return index + 1

    def _is_true(self, words: Sequence[str]) -> bool:
        plain = [word for word in words if word not in ("[", "]", "[[", "]]", ";", "test")]
        expanded = [" ".join(self.expand(word)) for word in plain]
        if any(UNKNOWN in word for word in expanded):
            return False
        match expanded:
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
        """Return *word* with its variables replaced, split as an unquoted one is."""
        if EXPRESSION in word:
            word = re.sub(f"{EXPRESSION}([^{EXPRESSION}]*){EXPRESSION}", self._sum, word)
        text = VARIABLE.sub(self._value, word)
        self._grow([text])
        return text.split()

    def _value(self, match: re.Match[str]) -> str:
        name, default = match[1] or match[4], match[3]
        if name in self.variables:
            return " ".join(self.variables[name])
        if default is None:
            return match[0]
        words = self.expand(default.strip("\"'"))
        if "=" in match[2]:  # ``${NAME:=value}`` sets it
            self.variables[name] = words
        return " ".join(words)

    def _sum(self, match: re.Match[str]) -> str:
        """Add, multiply and divide whole numbers; anything else stays unknown."""
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: " ".join(self.variables.get(name[1], ["?"])), match[1])
        if not SUM.fullmatch(text) or len(text) > 100:
            return UNKNOWN
        try:
            return str(Expression(text.replace("/", "//")).value({}))
        except FormatError:
            return UNKNOWN


def split_words(words: Sequence[str], separator: str) -> Iterator[Sequence[str]]:
    """Yield the runs of words between separators."""
    begin = 0
    for index, word in enumerate(words):
        if word == separator:
            yield words[begin:index]
            begin = index + 1
    yield words[begin:]


def _find_flags(words: Sequence[str]) -> dict[str, str | bool]:
    """Return ``--name value``, ``--name=value`` and ``--name`` alone; the last one counts."""
    flags: dict[str, str | bool] = {}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("--") or len(word) < 3:
            continue
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and index < len(words) and not NO_VALUE.fullmatch(words[index]):
            values.append(words[index])
            index += 1
        flags[name.replace("_", "-")] = " ".join(values).strip("\"'") if values else True
    return flags
