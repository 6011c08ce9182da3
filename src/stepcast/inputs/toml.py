"""TOML files, whole: clusters, frameworks, models, calibrations."""

import os
import re
import tomllib
from typing import Any

from stepcast.inputs.errors import FormatError
from stepcast.inputs.source import Source
from stepcast.ir.limits import DESCRIPTION, KEY_PARTS

_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
# The parser's time grows with the square of the parts of a key.
_DEEP_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{KEY_PARTS.most}}}")


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the file at *path* says."""
    return parse_toml(Source(path).text(DESCRIPTION), os.fspath(path))


def parse_toml(text: str, path: str | None = None) -> dict[str, Any]:
    """What *text* says; a FormatError where it is not TOML."""
    if _DEEP_KEY.search(text):
        raise FormatError(KEY_PARTS.said, path)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise FormatError("not valid TOML: nested too deeply", path) from None
    except ValueError as error:  # a TOMLDecodeError, or a number of thousands of digits
        raise FormatError(f"not valid TOML: {error}", path) from None
