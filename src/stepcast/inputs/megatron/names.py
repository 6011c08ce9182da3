"""What the name of a Megatron-LM trace says of its run.

Echo writes ``wd8_tp2_pp4_numl40_bs2_..._rank7_....txt``, ``wd8_tp1_pp2_exp4_expNum8_l8_bs1_...`` and folders
such as ``pp2_tp1_exp4_expn8_dp4_nl8_hs1024_sl2048`` (fwyc0573/Megatron-LM, megatron/profiler): fields of a
word and a number in any order.
"""

import re

FIELD = re.compile(r"(?:^|(?<=[_\-.]))([A-Za-z]{1,8})([0-9]{1,7})(?=[_\-.]|$)", re.ASCII)
WORDS = {
    "wd": "world",
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
    "exp": "ep",
    "ep": "ep",
    "numl": "layers",
    "nl": "layers",
    "l": "layers",
    "bs": "micro_batch",
    "mbs": "micro_batch",
}
# A name that gives fewer of these is not one of a run: l8.txt may be anything.
DEGREES = ("world", "tp", "pp")
FEWEST_DEGREES = 2


def file_name_hints(path: str) -> dict[str, int]:
    """Sizes that the file's name gives, or else the name of its folder."""
    hints: dict[str, int] = {}
    for name in reversed(path.replace("\\", "/").split("/")[-2:]):
        hints = {**_fields(name), **hints}
    dp = hints.pop("dp", 0)
    if dp and "tp" in hints and "pp" in hints:
        hints.setdefault("world", hints["tp"] * hints["pp"] * dp)
    return hints


def _fields(name: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for word, text in FIELD.findall(name):
        known = WORDS.get(word.lower())
        if known is not None and int(text):
            found.setdefault(known, int(text))
    return found if sum(word in found for word in DEGREES) >= FEWEST_DEGREES else {}
