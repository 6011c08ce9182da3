"""``--html FILE``: every verb's answer as one page, whole, safe, and saying what the report says."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from stepcast.cli.main import main
from stepcast.units import format_bytes, format_percent, format_seconds
from tests.cli.test_main import run
from tests.faults.test_hostile_text import FILES, HOSTILE
from tests.fuzz.targets import targets
from tests.pages.parsed import Parsed, assert_safe
from tests.shared import ROOT

EXAMPLES = ROOT / "examples"
MEGATRON = str(EXAMPLES / "megatron-rank7.txt")
MOST_BYTES = 1_500_000
PREDICT = [
    "predict",
    "--model",
    "llama-3.1-8b",
    "--cluster",
    "dgx-h100",
    "--gpus",
    "16",
    "--tp",
    "2",
    "--pp",
    "2",
    "--global-batch",
    "32",
    "--seq",
    "2048",
]
SEARCH = [
    "search",
    "--model",
    "llama-3.2-1b",
    "--cluster",
    "dgx-h100",
    "--gpus",
    "4",
    "--global-batch",
    "8",
    "--fix",
    "schedule=1f1b",
    "--fix",
    "cp=1",
    "--top",
    "3",
]
PLAN = [
    "plan",
    "--gpus",
    "64",
    "--step-s",
    "2",
    "--steps",
    "100000",
    "--checkpoint-size",
    "1TB",
    "--runs",
    "50",
    "--price",
    "2",
]
VALIDATE = ["validate", "--set", "h200", "--data", "rows"]
VERBS = {
    "predict": PREDICT,
    "alternatives": [*PREDICT[:4], "dgx-h100,dgx-h200", *PREDICT[5:], "--tokens", "1T", "--price", "auto"],
    "simulate": ["simulate", str(EXAMPLES / "simai-gpt-13b.txt"), "--cluster", "dgx-h100"],
    "analyze a rank": ["analyze", MEGATRON],
    "analyze a profile": ["analyze", str(EXAMPLES / "kineto-llama-1b.json.gz")],
    "analyze a log": ["analyze", str(EXAMPLES / "optimus-llama-1b.txt")],
    "analyze a sweep": ["analyze", str(EXAMPLES / "nccl-one-nic.txt"), "--cluster", "dgx-h100"],
    "replay": ["replay", MEGATRON],
    "replay changed": ["replay", MEGATRON, "--what-if", "compute=0.5x"],
    "compare": ["compare", MEGATRON, MEGATRON],
    "gate": ["gate", *(str(EXAMPLES / "gate" / f"night-{night}.log") for night in (1, 2, 3, 4, 6, 7)), "--save", "base.json"],
    "search": SEARCH,
    "network": ["network", *PREDICT[1:]],
    "plan": PLAN,
    "generate": ["generate", "llama-3.1-8b", "--cluster", "dgx-h100", "--requests", "64"],
    "rl": ["rl", "qwen3-0.6b", "--cluster", "dgx-h100", "--gpus", "8", "--steps", "100", "--prompts", "8"],
    "rl search": ["rl", "qwen3-0.6b", "--cluster", "dgx-h100", "--gpus", "4", "--search", "--prompts", "8", "--tp", "1"],
    "validate": VALIDATE,
    "op": ["op", "matmul", "--m", "4096", "--n", "4096", "--k", "4096", "--gpu", "h200"],
    "op sweep": ["op", "attention", "--heads", "8", "--head-dim", "128", "--gpu", "h200", "--sweep"],
    "collective": ["collective", "all-reduce", "--size", "1GiB", "--ranks", "16", "--cluster", "dgx-h100"],
    "collective sweep": ["collective", "all-gather", "--ranks", "16", "--cluster", "dgx-h100", "--sweep"],
    "collective on links": [
        "collective", "all-reduce", "--size", "1GiB", "--ranks", "16", "--cluster", "dgx-h100", "--engine", "fluid",
    ],
    "list": ["list", "gpus"],
    "show": ["show", str(EXAMPLES / "simai-gpt-13b.txt")],
    "show a trace": ["show", MEGATRON],
    "show a framework": ["show", str(EXAMPLES / "frameworks" / "my-trainer.toml")],
    "show several": ["show", MEGATRON, str(EXAMPLES / "optimus-llama-1b.txt"), "dgx-h100"],
    "calibrate": ["calibrate", str(EXAMPLES / "operators-h200.csv"), "--gpu", "h200"],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a few measured rows in it."""
    monkeypatch.chdir(tmp_path)
    Path("rows").mkdir()
    head = (ROOT / "tests" / "data" / "h200" / "ops.csv").read_text().splitlines(keepends=True)[:30]
    Path("rows", "ops.csv").write_text("".join(head))
    return tmp_path


def page_and_facts(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Parsed, dict[str, object]]:
    status = main([*words, "--html", "page.html", "--json"])
    assert status in (0, 1)
    facts = json.loads(capsys.readouterr().out)
    return assert_safe(Path("page.html").read_bytes()), facts


@pytest.mark.parametrize("name", VERBS)
def test_every_page_is_whole_safe_small_and_says_where_it_comes_from(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = VERBS[name]
    page, facts = page_and_facts(words, capsys)
    assert Path("page.html").stat().st_size < MOST_BYTES
    assert f"stepcast {words[0]}" in page.text
    assert "--html page.html" in page.text
    ids = [attributes["id"] for _, attributes in page.elements if attributes.get("id")]
    assert len(ids) == len(set(ids))
    told = page.block("facts")
    for key in ("step_s", "days", "rows"):
        if key in facts and words[0] != "validate":
            assert told[key] == facts[key]
    for warning in facts.get("warnings", ()):  # type: ignore[attr-defined]
        assert warning[:60] in page.text
    kinds = [(attributes.get("class") or "").split() for _, attributes in page.elements]
    charts = [place for place, words in enumerate(kinds) if "plane" in words]
    for start, end in pairwise([*charts, len(kinds)]):
        assert any(word.startswith(("l-", "a-", "dot")) for words in kinds[start:end] for word in words), "empty chart"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("show several", "NVSwitch, one 400 Gb/s NIC per GPU"),
        ("alternatives", "with dgx-h100: the lowest cost of 2 alternatives"),
        ("collective sweep", "100KB 1MB 10MB"),
        ("replay changed", "s per step, with the change"),
        ("analyze a rank", "so the bubble is the time in receives, exposed communication contains"),
    ],
)
def test_pages_say_things_once_and_plainly(
    name: str, expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, _ = page_and_facts(VERBS[name], capsys)
    assert page.text.count(expected) == 1


@pytest.mark.parametrize("name", ["megatron-log", "torchtitan-log", "mlperf-log", "stragglers", "nccl-inspector", "flight-recorder", "nsys"])  # fmt: skip
def test_every_log_of_a_job_has_a_page(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("job").write_bytes(next(target for target in targets() if target.name == name).seeds[0])
    page, facts = page_and_facts(["analyze", "job"], capsys)
    assert facts["format"] == name
    if facts.get("step_s"):
        assert f"{format_seconds(float(facts['step_s']))} per step" in page.text  # type: ignore[arg-type]
    status, _, err = run(capsys, "analyze", "job", "--trace", "t.json")
    assert (status, "--trace has no effect" in err) == (2, True)


def test_the_page_of_a_step_answers_what_one_asks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, facts = page_and_facts(PREDICT, capsys)
    memory, breakdown = facts["memory_bytes"], facts["breakdown_s"]
    assert isinstance(memory, dict)
    assert isinstance(breakdown, dict)
    step_s = float(facts["step_s"])  # type: ignore[arg-type]
    assert f"{format_seconds(step_s)} per step" in page.text
    low, high = facts["uncertainty"]["low_s"], facts["uncertainty"]["high_s"]  # type: ignore[index]
    assert f"{format_seconds(low)} {format_seconds(high)}" in page.text
    assert f"Pipeline bubble {format_percent(breakdown['bubble'] / step_s)}" in page.text
    assert f"Memory Fits {format_bytes(memory['total'])} of {format_bytes(memory['capacity'])}" in page.text
    assert "Costliest communication tensor parallel" in page.text
    assert "Best of these" in page.text or "None of these is faster and fits" in page.text
    for part, seconds in breakdown.items():
        if seconds > 1e-3 * step_s:
            assert format_seconds(seconds) in page.text, part


def test_a_waterfall_adds_up_to_the_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page_and_facts(PREDICT, capsys)
    text = Path("page.html").read_text()
    rows = re.search(r'id="time-breakdown[^"]*".*?</section>', text, re.DOTALL)
    assert rows
    pieces = [(float(x), float(w)) for x, w in re.findall(r'<rect x="([\d.]+)%" y="0" width="([\d.]+)%"', rows[0])]
    each, whole = pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]
    assert each == whole
    for (x, width), (after, _) in pairwise(each):
        assert x + width == pytest.approx(after, abs=0.01)
    assert each[-1][0] + each[-1][1] == pytest.approx(100, abs=0.5)


def test_changes_are_predictions_of_the_commands_beside_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, _ = page_and_facts(PREDICT, capsys)
    tried = re.search(r"stepcast (predict (?:(?!stepcast|--html).)*?--micro-batch 2)(?! --)", page.text)
    assert tried
    assert "--micro-batch 2" in page.words  # a line breaks between options alone
    status, text, _ = run(capsys, *tried[1].split(), "--json")
    assert status == 0
    assert format_seconds(json.loads(text)["step_s"]) in page.text


def test_the_trace_that_is_written_beside_a_page_is_linked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pages").mkdir()
    assert main([*PREDICT, "--html", "pages/page.html", "--trace", "a trace&.json"]) == 0
    page = assert_safe((folder / "pages" / "page.html").read_bytes())
    links = {attributes["href"] for tag, attributes in page.elements if tag == "a"}
    assert "./../a%20trace%26.json" in links
    assert "wrote pages/page.html: open it in a browser" in capsys.readouterr().out


def test_a_step_that_does_not_fit_says_so_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "--model", "llama-3.1-70b", "--cluster", "dgx-h100", "--gpus", "8", "--tp", "8"]
    page, _ = page_and_facts(words, capsys)
    assert "Memory Does not fit" in page.text
    assert any(attributes.get("class") == "card bad" for _, attributes in page.elements)


def test_a_search_without_an_answer_says_what_would_help(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, _ = page_and_facts([*SEARCH, "--max-memory", "2GiB"], capsys)
    assert "Nothing fits" in page.text
    assert "Least change" in page.text


def test_dots_of_a_search_are_rows_of_its_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, _ = page_and_facts(SEARCH, capsys)
    dots = [attributes["data-row"] for tag, attributes in page.elements if tag == "circle" and "data-row" in attributes]
    rows = [attributes["data-row"] for tag, attributes in page.elements if tag == "tr" and "data-row" in attributes]
    assert dots == rows == ["1", "2", "3"]


def test_a_page_is_not_written_over_what_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rank.txt").write_text(Path(MEGATRON).read_text())
    status, _, told = run(capsys, "analyze", "rank.txt", "--html", "rank.txt")
    assert status == 2
    assert "use another name" in told


# ---- text of others ----------------------------------------------------------------------------------------


def test_the_page_of_a_step_that_does_not_fit_shows_the_remedies_of_the_text(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "8", "--framework"]
    assert main([*run, "transformers", "--micro-batch", "4", "--html", "page.html", "--json"]) == 0
    remedies = json.loads(capsys.readouterr().out)["remedies"]
    assert remedies
    page = assert_safe(Path("page.html").read_bytes())
    assert "How to make it fit" in page.text
    assert all(each["options"] in page.text for each in remedies)
    assert main([*run, "transformers", "--micro-batch", "1", "--zero", "3", "--html", "page.html"]) == 0
    assert "How to make it fit" not in assert_safe(Path("page.html").read_bytes()).text


HTML = "<img src=x onerror=alert(1)>\"'--><script>alert(2)</script>"
NAMES = {"html": HTML, "long": "n" * 10_000, "turned": "\u202eabc\u2066", "escapes": HOSTILE}


@pytest.mark.parametrize("kind", NAMES)
def test_hostile_names_of_a_timeline_are_text(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = NAMES[kind]
    events = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": f"{name}{at}",
            "pid": 0,
            "tid": 7,
            "ts": 10.0 * at,
            "dur": 5.0,
            "args": {name: name},
        }
        for at in range(20)
    ]
    trace = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": name}], "traceEvents": events}
    Path("trace.json").write_text(json.dumps(trace))
    assert main(["analyze", "trace.json", "--html", "page.html"]) == 0
    page = assert_safe(Path("page.html").read_bytes())
    shown = page.block("timeline-data")["names"]
    assert all(len(each) <= 200 for each in shown)
    assert not any("\u202e" in each or "\x1b" in each for each in shown)
    if kind == "html":
        assert HTML[:20] in page.text
    assert Path("page.html").stat().st_size < MOST_BYTES


@pytest.mark.parametrize("kind", NAMES)
def test_hostile_file_names_are_text(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = NAMES[kind].replace("/", "_")[:100] + ".json"
    found = {"step_s": 1.0, "breakdown_s": {"compute": 1.0}, "run": {"model": NAMES[kind]}}
    Path(name).write_text(json.dumps(found))
    assert main(["compare", name, name, "--html", "page.html"]) in (0, 1)
    page = assert_safe(Path("page.html").read_bytes())
    assert "\x1b" not in page.text
    assert "\u202e" not in page.text


@pytest.mark.parametrize("name", FILES)
def test_no_text_of_a_file_becomes_more_than_text(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (
        FILES[name],
        FILES[name].replace(json.dumps(HOSTILE)[1:-1], json.dumps(HTML)[1:-1]).replace(HOSTILE, HTML),
    ):
        Path("given").write_text(text, errors="surrogateescape")
        for words in (
            ["analyze", "given"],
            ["simulate", "given", "--cluster", "dgx-h100"],
            ["compare", "given", "given"],
        ):
            Path("page.html").unlink(missing_ok=True)
            assert main([*words, "--html", "page.html"]) in (0, 1, 2)
            capsys.readouterr()
            if Path("page.html").exists():
                assert_safe(Path("page.html").read_bytes())


def test_a_cluster_file_with_hostile_words_is_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("<i>c.toml").write_text(f'base = "dgx-h100"\ndescription = {json.dumps(HTML)}\n')
    name = "<b>model.json"
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    Path(name).write_text(json.dumps({**config, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}))
    status = main(["predict", "--model", name, "--cluster", "<i>c.toml", "--gpus", "1", "--html", "page.html"])
    told = capsys.readouterr().err
    assert status == 0, told
    assert "<b>model" in assert_safe(Path("page.html").read_bytes()).text


def test_the_demo_ends_with_a_page_that_links_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--examples", str(EXAMPLES), "-o", "out"]) == 0
    assert "wrote out/index.html" in capsys.readouterr().out
    index = assert_safe(Path("out", "index.html").read_bytes())
    links = [
        attributes["href"]
        for tag, attributes in index.elements
        if tag == "a" and (attributes["href"] or "").startswith("./")
    ]
    assert len(links) >= 6
    assert "./prediction.html" in links
    for link in links:
        assert_safe(Path("out", link or "").read_bytes())


@pytest.mark.parametrize("words", [PREDICT, SEARCH], ids=["predict", "search"])
def test_pages_begin_with_what_the_report_begins_with(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Model, cluster, framework, layout and batch, word for word; the command is at the end, to be copied."""
    page = tmp_path / "page.html"
    _, out, _ = run(capsys, *words, "--html", str(page))
    shown = page.read_text()
    head = re.sub(r"\n +", " ", out.split("\n\n")[0]).splitlines()
    assert len(head) >= 4
    assert head.pop().startswith("stepcast 0.")
    begin = shown.index('class="asked"')
    assert begin < shown.index('class="answer"')
    asked = shown[begin : shown.index("</dl>", begin)]
    told = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", asked)
    for line, (name, value) in zip(head, told, strict=True):
        assert line.startswith(name)
        assert re.sub(r"\s+", " ", line.removeprefix(name).strip()) == value


def test_every_page_names_version_and_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    run(capsys, "analyze", MEGATRON, "--html", str(page))
    shown = page.read_text()
    end = shown[shown.index("The command that made this page") :]
    assert "stepcast analyze" in end[: end.index("</pre>")]
    assert "stepcast 0." in end[end.index("<footer") :]
