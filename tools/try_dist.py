"""Build wheel and sdist, install the wheel in an empty environment, and run it there, away from the checkout:
the demo, and every verb that needs files of the package (catalogues, measurements, pages, the recorder's hook).
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
RUN = ("--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "8")
PREDICT = ("predict", *RUN, "--sharding", "fsdp", "--json")
# Commands, and words that each prints.
COMMANDS = {
    ("demo",): "The example files",
    ("list", "models"): "llama-3.1-8b",
    ("list", "gpus"): "h200",
    ("list", "clusters"): "dgx-h100",
    ("list", "frameworks"): "megatron-core",
    ("predict", *RUN, "--html", "step.html"): "step",
    ("search", *RUN, "--global-batch", "64", "--workers", "1", "--top", "2"): "step",
    ("plan", *RUN, "--global-batch", "64", "--sharding", "fsdp", "--tokens", "1B", "--failures", "llama-3"): "goodput",
    ("op", "matmul", "--m", "4096", "--n", "4096", "--k", "4096", "--gpu", "h200"): "us",
    ("collective", "all-reduce", "--size", "64MB", "--cluster", "dgx-h100", "--gpus", "16"): "bus",
    ("validate", "--set", "h200"): "h200",
    ("validate", "--help"): "measurement set",
    ("completion", "bash"): "stepcast",
}
# A stand-in for PyTorch: the recorder's hook must start when its optimizers are imported.
JOB = """
import sys, sitecustomize
assert any(type(finder).__name__ == "OptimizerFinder" for finder in sys.meta_path), sys.meta_path
print("hooked by", sitecustomize.__file__)
"""

SCRIPT = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.randn(4, 8, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(*words: str | Path, cwd: Path | None = None, status: int = 0) -> str:
    """Return what a command printed; end the program if its status is another."""
    done = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != status:
        sys.exit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(python: Path) -> Path:
    """Return the wheel, built from the sdist, so that nothing is missing there either."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "build")
    run(python, "-m", "build", "--outdir", DIST, ROOT)
    (wheel,) = DIST.glob("*.whl")
    (_,) = DIST.glob("*.tar.gz")
    return wheel


def environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(environment(folder / "builder"))
        python = environment(folder / "empty")
        constraints = ROOT / "constraints.txt"
        pinned = ["-c", constraints] if constraints.exists() else []
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pinned, wheel)
        away = folder / "away"
        away.mkdir()
        for words, expected in COMMANDS.items():
            shown = run(python, "-m", "stepcast", *words, cwd=away)
            assert expected in shown, (words, shown)
        assert (away / "step.html").stat().st_size > 10_000
        step = json.loads(run(python, "-m", "stepcast", *PREDICT, cwd=away))
        assert step["memory_bytes"]["fits"], step
        try_record(python, away)
        try_capture(wheel, folder / "with-torch", away)
        size = wheel.stat().st_size / 1e6
        print(f"{wheel.name}: {size:.1f} MB, {len(COMMANDS) + 2} commands run: step {step['step_s']:.3f} s")


def try_record(python: Path, away: Path) -> None:
    """Run a job under ``record`` with a package named torch that is nothing but a name."""
    (site,) = (python.parent.parent / "lib").glob("python*/site-packages")
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").touch()
    shown = run(python, "-m", "stepcast", "record", "-o", "run", "--", python, "-c", JOB, cwd=away, status=1)
    assert "hooked by" in shown, shown
    assert "pytorch/record/site/sitecustomize.py" in shown, shown


def try_capture(wheel: Path, site: Path, away: Path) -> None:
    """Capture and record a small script with the installed wheel, where the environment with PyTorch is at hand."""
    python = ROOT / ".venv-torch" / "bin" / "python"
    if not python.exists():
        print("capture and record were not tried: no .venv-torch")
        return
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", site, wheel)
    (away / "train.py").write_text(SCRIPT)
    words = f"import sys; sys.path.insert(0, {str(site)!r}); from stepcast.cli.start import main; sys.exit(main())"
    start = (python, "-W", "ignore", "-c", words)
    shown = run(*start, "capture", "--json", "--predict", "--gpu", "h200", "--", "python", "train.py", cwd=away)
    assert json.loads(shown)["parameters"] == 72, shown
    job = ("-o", "recorded", "--skip", "1", "--steps", "2", "--json", "--", python, "train.py")
    os.environ["PYTHONPATH"] = str(site)
    shown = run(*start, "record", *job, cwd=away)
    assert json.loads(shown[shown.index("{") :])["traces"] == ["rank00000.json"], shown


if __name__ == "__main__":
    main()
