"""Build wheel and sdist, install the wheel in an empty environment, and run it there, away from the checkout:
the demo and a prediction.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PREDICT = ("predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "8", "--sharding", "fsdp", "--json")


def run(*words: str | Path, cwd: Path | None = None) -> str:
    """What a command printed; ends the program where it fails."""
    done = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(python: Path) -> Path:
    """The wheel; made from the sdist, so that nothing is missing there either."""
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
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
        away = folder / "away"
        away.mkdir()
        shown = run(python, "-m", "stepcast", "demo", cwd=away)
        assert "The example files" in shown, shown
        step = json.loads(run(python, "-m", "stepcast", *PREDICT, cwd=away))
        assert step["memory_bytes"]["fits"], step
        sets = run(python, "-m", "stepcast", "validate", "--help", cwd=away)
        assert "measurement set" in sets
        size = wheel.stat().st_size / 1e6
        print(f"{wheel.name}: {size:.1f} MB, installed and run: step {step['step_s']:.3f} s")


if __name__ == "__main__":
    main()
