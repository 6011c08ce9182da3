"""The app over the wire: it answers its own page, and refuses everybody else."""

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stepcast.cli.main import main
from tests.pages.test_pages import HTML, NAMES
from tests.shared import ROOT

pytest.importorskip("starlette", reason="needs the extra web: pip install 'stepcast[web]'")
pytest.importorskip("uvicorn", reason="needs the extra web: pip install 'stepcast[web]'")

QUERY = "model=llama-3.1-8b&cluster=dgx-h100&gpus=16&tp=2&global_batch=32&seq=2048"
MOST_BYTES = 64 * 2**20


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def found(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    port: int
    token: str
    folder: Path
    process: int

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, token: str | None = None, **headers: str
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        given = {"Host": f"127.0.0.1:{self.port}", **{name.replace("_", "-"): value for name, value in headers.items()}}
        if method == "POST" and "Origin" not in given:
            given["Origin"] = f"http://127.0.0.1:{self.port}"
        connection.request(method, f"/{self.token if token is None else token}{path}", body, given)
        answer = connection.getresponse()
        found = Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        connection.close()
        return found

    def upload(self, name: str, data: bytes, cluster: str = "") -> Reply:
        files = json.dumps([{"name": name, "size": len(data)}])
        return self.ask(f"/analyze?ran_on={cluster}", "POST", data, X_Files=files)


def children(process: int) -> list[str]:
    """Searches that run beside the server."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent, words = (path.read_text().rpartition(")")[2].split()[1], (path.parent / "cmdline").read_bytes())
            if int(parent) == process and b"spawn_main" in words:
                found.append(path.parent.name)
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "secret.txt").write_text("do not tell")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-m", "stepcast", "serve", "--port", "0"]
    with subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout
        found = re.fullmatch(r"open http://127\.0\.0\.1:(\d+)/([\w-]{32})/\n", running.stdout.readline())
        assert found
        yield Server(int(found[1]), found[2], folder, running.pid)
        running.terminate()
    assert sorted(path.name for path in folder.iterdir()) == ["secret.txt"], "the app writes no files"


# ---- what it answers ---------------------------------------------------------------------------------------


def test_an_answer_is_a_page_its_command_and_what_to_keep(server: Server) -> None:
    reply = server.ask(f"/answer?{QUERY}")
    assert reply.status == 200
    found = reply.found
    assert (
        found["command"]
        == "stepcast predict --model llama-3.1-8b --cluster dgx-h100 --gpus 16 --tp 2 --global-batch 32 --seq 2048"
    )
    assert "Time breakdown" in found["html"]
    assert found["summary"]["step_s"] > 0
    whole = server.ask(f"/whole?{QUERY}").found["html"]
    assert "timeline-data" in whole
    assert "Best of these" in whole or "None of these" in whole


def test_a_page_is_the_file_of_the_command_line(server: Server) -> None:
    reply = server.ask(f"/page?{QUERY}")
    assert reply.status == 200
    assert reply.body.startswith(b"<!doctype html>")
    assert "sha256-" in reply.headers["content-security-policy"]


def test_every_reply_says_what_a_browser_may_do(server: Server) -> None:
    for path in ("/", "/app.js", f"/answer?{QUERY}", "/nowhere"):
        headers = server.ask(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-frame-options"] == "DENY"
        assert "server" not in headers


def test_what_a_user_gets_wrong_is_told(server: Server) -> None:
    assert server.ask(f"/answer?{QUERY}&tp=3").status == 400
    assert "multiple" in server.ask(f"/answer?{QUERY.replace('tp=2', 'tp=3')}").found["error"]
    assert "unrecognised value" in server.ask("/answer?model=nothing").found["error"]


def test_a_search_streams_how_far_it_is_and_then_its_page(server: Server) -> None:
    reply = server.ask("/search?model=llama-3.2-1b&cluster=dgx-h100&gpus=8&global_batch=16&seq=2048&top=3")
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = re.findall(r"event: (\w+)\ndata: (.*)\n", reply.body.decode())
    assert events[-1][0] == "done"
    assert {name for name, _ in events[:-1]} <= {"progress"}
    found = json.loads(events[-1][1])
    assert "Pareto frontier" in found["html"]
    assert found["command"].startswith("stepcast search --model llama-3.2-1b")


def refusal(server: Server, path: str, words: str) -> str:
    """Return the error with which *path* is refused, which has these *words*."""
    reply = server.ask(path)
    assert (reply.status, words in reply.found["error"]) == (400, True), reply.body
    return str(reply.found["error"])


def test_errors_name_the_fields_of_the_page(server: Server) -> None:
    no_gpus = QUERY.replace("gpus=16", "gpus=")
    for path, words in (
        (f"/answer?{QUERY.replace('tp=2', 'tp=3')}", "use Tensor parallel 2 or 4"),
        (f"/answer?{no_gpus}", "GPUs: expected a whole number"),
        (f"/answer?{QUERY}&sharding=hybrid-fsdp", "Ranks per copy"),
        (f"/alternatives?{QUERY}&cluster_2=dgx-b200&failures=none", "Tokens: "),
        (f"/alternatives?{QUERY}&cluster_2=dgx-b200&price=2", "Tokens: "),
    ):
        assert " --" not in refusal(server, path, words)
    # A browser shows events alone, not the body of a refused request.
    for query, words in ((f"{QUERY}&top=99", "Strategies to show: "), (QUERY.replace("global_batch=32", ""), "Global")):
        reply = server.ask(f"/search?{query}")
        assert reply.status == 200
        assert words in json.loads(re.findall(r"event: failed\ndata: (.*)\n", reply.body.decode())[0])["error"]


def test_a_search_that_nobody_waits_for_ends(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    query = "model=llama-3.1-405b&cluster=dgx-h100&gpus=4096&global_batch=4096&seq=8192&top=50"
    connection.request("GET", f"/{server.token}/search?{query}", headers={"Host": f"127.0.0.1:{server.port}"})
    answer = connection.getresponse()
    deadline = time.monotonic() + 60
    while not children(server.process) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children(server.process)
    answer.close()
    connection.close()
    while children(server.process) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not children(server.process)
    assert server.ask(f"/answer?{QUERY}").status == 200


def test_two_predictions_are_laid_side_by_side(server: Server) -> None:
    def coded(query: str) -> str:
        return query.replace("=", "%3D").replace("&", "%26")

    reply = server.ask(f"/compare?first={coded(QUERY)}&second={coded(QUERY.replace('tp=2', 'tp=4'))}")
    assert reply.status == 200
    assert "Parts of the step" in reply.found["html"]


def test_plans_and_comparisons_answer_as_the_command_line_does(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that an answer names gives the same figures."""
    large = QUERY.replace("8b", "70b")  # which does not fit
    for path in (
        *(f"/plan?{query}&tokens=100&price=2.5" for query in (QUERY, large)),
        f"/alternatives?{QUERY}&cluster_2=dgx-b200&tokens=100&price=2",
    ):
        reply = server.ask(path)
        assert reply.status == 200
        words = reply.found["command"].split()[1:]
        assert main([*words, "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        cost = facts["cost"] if "cost" in facts else facts["rows"][0]["cost"]
        assert f"{cost:,.0f}" in reply.found["html"]


def test_forms_refuse_what_they_may_not_ask(server: Server) -> None:
    for path, words in (
        (f"/plan?{QUERY}&price=-1", "expected a number"),
        (f"/plan?{QUERY}&tokens=ten", "whole number"),
        (f"/alternatives?{QUERY}", "choose a second cluster"),
        (f"/alternatives?{QUERY}&cluster_2=/etc/passwd", "unrecognised value"),
        (f"/alternatives?{QUERY}&cluster_4=dgx-h100", "no field"),
    ):
        refusal(server, path, words)


def test_a_trace_is_analysed(server: Server) -> None:
    reply = server.upload("rank7.txt", (ROOT / "examples" / "megatron-rank7.txt").read_bytes())
    assert reply.status == 200, reply.body[:300]
    assert "Megatron run" in reply.found["html"]
    packed = server.upload("trace.json.gz", (ROOT / "examples" / "kineto-llama-1b.json.gz").read_bytes())
    assert "profiler trace" in packed.found["html"]
    assert "cluster" in server.upload("log", (ROOT / "examples" / "nccl-8-h100.txt").read_bytes()).found["error"]
    assert server.upload("log", (ROOT / "examples" / "nccl-8-h100.txt").read_bytes(), "dgx-h100").status == 200


def test_two_hundred_at_once_are_all_answered(server: Server) -> None:
    replies: list[int] = []
    queries = [f"{QUERY.replace('tp=2', f'tp={2 ** (at % 3)}')}&micro_batch={1 + at % 2}" for at in range(200)]

    def ask(query: str) -> None:
        reply = server.ask(f"/answer?{query}")
        replies.append(reply.status if "error" not in reply.found else 0)

    threads = [threading.Thread(target=ask, args=(query,)) for query in queries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == [200] * 200


def test_what_was_asked_before_is_answered_at_once(server: Server) -> None:
    server.ask(f"/answer?{QUERY}")
    took = []
    for _ in range(5):
        began = time.perf_counter()
        server.ask(f"/answer?{QUERY}")
        took.append(time.perf_counter() - began)
    assert min(took) < 0.1


# ---- what it refuses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/answer?" + QUERY, "/page.js", "/search?" + QUERY])
@pytest.mark.parametrize("token", ["", "x", "A" * 32])
def test_without_the_token_nothing_is_answered(path: str, token: str, server: Server) -> None:
    assert server.ask(path, token=token).status == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "localhost:1", "127.0.0.1.evil.example:80", "", "[::1]", "169.254.169.254"]
)
def test_another_host_is_refused(host: str, server: Server) -> None:
    assert server.ask("/", Host=host).status in (400, 421)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1:1", "http://127.0.0.1", "file://"]
)
def test_another_origin_is_refused(origin: str, server: Server) -> None:
    assert server.ask(f"/answer?{QUERY}", Origin=origin).status == 403
    assert server.ask("/analyze", "POST", b"x", Origin=origin, X_Files='[{"name": "x", "size": 1}]').status == 403


def test_a_browser_that_says_it_comes_from_elsewhere_is_refused(server: Server) -> None:
    for site in ("cross-site", "same-site"):
        assert server.ask(f"/answer?{QUERY}", Sec_Fetch_Site=site).status == 403
    assert server.ask(f"/answer?{QUERY}", Sec_Fetch_Site="same-origin").status == 200


def test_a_post_without_an_origin_is_refused(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", f"/{server.token}/analyze", b"x", {"Host": f"127.0.0.1:{server.port}"})
    assert connection.getresponse().status == 403
    connection.close()


def test_other_methods_are_refused(server: Server) -> None:
    for method in ("PUT", "DELETE", "OPTIONS", "TRACE"):
        assert server.ask("/", method).status == 405


def test_two_gigabytes_are_refused_before_they_are_read(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("POST", f"/{server.token}/analyze", skip_host=True)
    for name, value in (
        ("Host", f"127.0.0.1:{server.port}"),
        ("Origin", f"http://127.0.0.1:{server.port}"),
        ("Content-Length", str(2 * 2**30)),
    ):
        connection.putheader(name, value)
    connection.endheaders()
    connection.send(b"x" * 1000)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_that_hides_its_length_is_refused_when_it_is_too_long(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("POST", f"/{server.token}/analyze", skip_host=True)
    for name, value in (
        ("Host", f"127.0.0.1:{server.port}"),
        ("Origin", f"http://127.0.0.1:{server.port}"),
        ("Transfer-Encoding", "chunked"),
    ):
        connection.putheader(name, value)
    connection.endheaders()
    piece, sent = b"x" * 2**20, 0
    try:
        while sent <= MOST_BYTES + 8 * 2**20:
            connection.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            sent += len(piece)
    except OSError:  # it hung up, as it may
        pass
    with contextlib.suppress(OSError, http.client.HTTPException):
        assert connection.getresponse().status == 413
    connection.close()
    assert server.ask(f"/answer?{QUERY}").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/page.js/../../secret.txt",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/assets/page.js",
        "/page.css%00",
    ],
)
def test_no_path_reaches_a_file(path: str, server: Server) -> None:
    reply = server.ask(path)
    assert reply.status in (400, 403, 404)
    assert b"do not tell" not in reply.body


@pytest.mark.parametrize("name", ["model", "cluster", "framework", "precision", "schedule"])
@pytest.mark.parametrize("value", ["secret.txt", "../secret.txt", "%2Fetc%2Fpasswd", "c.toml", "config.json"])
def test_no_field_reaches_a_file(name: str, value: str, server: Server) -> None:
    reply = server.ask(
        f"/answer?{QUERY}&{name}={value}".replace(f"{name}=llama-3.1-8b", "").replace(f"{name}=dgx-h100", "")
    )
    assert reply.status == 400
    assert "unrecognised value" in reply.found["error"]


@pytest.mark.parametrize(
    "name",
    ["../../secret.txt", "/etc/passwd", "secret.txt", "C:\\x\\secret.txt", "a\nb", HTML, "n" * 10_000, "\u202eabc"],
)
def test_a_name_of_an_upload_is_a_word_to_show(name: str, server: Server) -> None:
    """The text of the request is read, never the file of that name."""
    reply = server.upload(name, b"nothing that is known")
    assert reply.status == 400
    assert b"do not tell" not in reply.body
    assert len(reply.body) < 3000
    reply = server.upload(name, (ROOT / "examples" / "kineto-llama-1b.json.gz").read_bytes())
    assert reply.status == 200
    assert "<img" not in reply.found["html"]
    assert ".." not in reply.found["command"].replace("...", "")


def test_files_that_do_not_add_up_are_refused(server: Server) -> None:
    for files in (
        "",
        "{}",
        "[]",
        '[{"name": "x", "size": 5}]',
        '[{"name": "x", "size": -1}, {"name": "y", "size": 2}]',
        "[1]",
        "\x7f",
    ):
        assert server.ask("/analyze", "POST", b"x", X_Files=files).status == 400


@pytest.mark.parametrize("kind", NAMES)
def test_hostile_names_of_a_trace_are_text(kind: str, server: Server) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": NAMES[kind], "pid": 0, "tid": 7, "ts": 10.0 * at, "dur": 5.0, "args": {}}
        for at in range(5)
    ]
    reply = server.upload("t.json", json.dumps({"schemaVersion": 1, "traceEvents": events}).encode())
    assert reply.status == 200
    page = reply.found["html"]
    assert "<img" not in page
    assert "<script>" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_a_path_without_a_slash_is_refused_like_any_other(server: Server) -> None:
    for path in ("foo", "*", "http://elsewhere/x", "foo/bar"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
            reply = raw.makefile("rb").read().decode()
        assert reply.split()[1] in ("400", "403"), reply
        assert "x-content-type-options: nosniff" in reply or reply.split()[1] == "400"


def test_connections_that_ask_nothing_are_closed(server: Server) -> None:
    """Half a request, or none: each holds a place until it is closed."""
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(20)]
    for connection in idle[::2]:
        connection.sendall(b"GET / HTTP/1.1\r\nHost:")
    assert [connection.recv(10) for connection in idle] == [b""] * 20
    for connection in idle:
        connection.close()


def test_searches_do_not_keep_others_waiting(server: Server) -> None:
    query = "cluster=dgx-h100&gpus=4096&global_batch=4096&seq=8192&top=50"
    searches = []
    for model in ("llama-3.1-405b", "deepseek-v3", "gpt3-175b"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        path = f"/{server.token}/search?model={model}&{query}"
        connection.request("GET", path, headers={"Host": f"127.0.0.1:{server.port}"})
        searches.append((connection, connection.getresponse()))
    try:
        assert "timeline-data" in server.ask(f"/whole?{QUERY}&micro_batch=2").found["html"]
        assert server.ask(f"/page?{QUERY}&micro_batch=2").status == 200
        assert server.upload("rank7.txt", (ROOT / "examples" / "megatron-rank7.txt").read_bytes()).status == 200
    finally:
        for connection, answer in searches:
            answer.close()
            connection.close()


# ---- how it starts -----------------------------------------------------------------------------------------


def test_other_machines_are_let_in_only_when_told(capsys: pytest.CaptureFixture[str]) -> None:
    from stepcast.cli.main import main

    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert "--expose" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told(server: Server) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-m", "stepcast", "serve", "--port", str(server.port)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "cannot listen on port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dropped_configuration_is_predicted(server: Server) -> None:
    script = (ROOT / "examples" / "configs" / "megatron-llama3-8b.sh").read_bytes()
    files = json.dumps([{"name": "../run.sh", "size": len(script)}])
    found = server.ask("/analyze?cluster=dgx-h100&gpus=16", "POST", script, X_Files=files).found
    assert found["command"] == "stepcast predict --config run.sh --cluster dgx-h100"
    assert "llama-3-8b on 8 GPUs" in found["summary"]["title"]
    model = json.dumps({"model_type": "llama", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 512}).encode()  # fmt: skip
    files = json.dumps([{"name": "config.json", "size": len(model)}])
    found = server.ask("/analyze?cluster=dgx-h100&gpus=8&seq=256", "POST", model, X_Files=files).found
    assert "config.json on 8 GPUs" in found["summary"]["title"]
    local = b"base_model: /etc/hostname\nadapter: lora\nlora_r: 8\nmicro_batch_size: 1\nsequence_len: 512\n"
    files = json.dumps([{"name": "axolotl.yaml", "size": len(local)}])
    reply = server.ask("/analyze?cluster=dgx-h100&gpus=8", "POST", local, X_Files=files)
    assert reply.status == 400
    assert "names no known model" in reply.found["error"]  # a path in a file is not followed
