"""Files of the package are parsed as tomllib parses them."""

import tomllib
from pathlib import Path

import stepcast
from stepcast.ir.tables import parse_tables

FILES = sorted((Path(stepcast.__file__).parent / "data").rglob("*.toml"))


def test_all_data_are_parsed_as_tomllib_does() -> None:
    assert len(FILES) > 200
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        assert repr(parse_tables(text)) == repr(tomllib.loads(text)), file.name
