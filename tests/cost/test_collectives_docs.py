"""Every example of docs/collectives.md runs and says what the page says, and its constants are those of the catalogue."""

import doctest
import re
from pathlib import Path

from stepcast.hardware import load_cluster
from stepcast.units import US

PAGE = Path(__file__).parents[2] / "docs" / "collectives.md"


def test_the_examples_run() -> None:
    examples = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    test = doctest.DocTestParser().get_doctest(examples, {}, PAGE.name, str(PAGE), 0)
    failures: list[str] = []
    result = doctest.DocTestRunner().run(test, out=failures.append)
    assert result.attempted >= 8
    assert result.failed == 0, "".join(failures)


def test_the_constants_are_the_catalogues() -> None:
    cluster = load_cluster("azure-nd-a100-v4")
    assert cluster.node.nic is not None
    text = PAGE.with_name("collectives-tables.md").read_text(encoding="utf-8")
    for value in (
        f"{cluster.communication.launch_overhead_s / US:.2f} us",
        f"{cluster.communication.channel_overhead_s / US:.2f} us",
        f"{cluster.node.nic.latency_s / US:.1f} us",
        f"{cluster.node.fabric.link.efficiency:.3f}",
        f"{cluster.node.nic.efficiency:.3f}",
    ):
        assert f"| {value} |" in text
