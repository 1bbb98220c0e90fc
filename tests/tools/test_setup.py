"""The set-up tools: what is selected, and that nothing is done twice."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tools import setup_env
from tools.runtime_requirements import select


def test_requirements_are_selected_by_marker_and_name() -> None:
    requirements = [
        "numpy",
        "torchvision==1; sys_platform == 'linux'",
        "pywin32; sys_platform == 'win32'",
        "fastapi[standard]>=1; python_version >= '3.11'",
        "boto3; extra == 's3'",
    ]
    assert select(requirements, ["torchvision"]) == ["numpy", "fastapi[standard]>=1"]


def test_every_step_reads_what_pyproject_has() -> None:
    project = tomllib.loads((setup_env.ROOT / "pyproject.toml").read_text())
    installer = setup_env.Installer(setup_env.Environment(Path("unused")), project)
    labels = [label for label, _ in installer.steps()]
    assert len(labels) == 7 and all(labels)
    assert set(installer.options["extras"]) <= set(installer.extras)


class CountingInstaller:
    """Stands for the installer; counts how often its only step runs."""

    runs = 0

    def __init__(self, environment: setup_env.Environment, project: dict[str, Any]) -> None:
        self.environment = environment

    def steps(self) -> list[tuple[str, Any]]:
        return [("step", self.run)]

    def run(self) -> None:
        CountingInstaller.runs += 1
        self.environment.python.parent.mkdir(parents=True, exist_ok=True)
        self.environment.python.touch()


def test_second_run_does_nothing_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "Installer", CountingInstaller)
    environment = setup_env.Environment(tmp_path)
    for expected in (1, 1):
        setup_env.install(environment, {})
        assert CountingInstaller.runs == expected
    monkeypatch.setattr(setup_env, "fingerprint", lambda: "another")
    setup_env.install(environment, {})
    assert CountingInstaller.runs == 2


def test_failed_step_leaves_no_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: CountingInstaller) -> None:
        raise setup_env.SetupFailed("no network")

    monkeypatch.setattr(setup_env, "Installer", CountingInstaller)
    monkeypatch.setattr(CountingInstaller, "run", fail)
    environment = setup_env.Environment(tmp_path)
    with pytest.raises(setup_env.SetupFailed, match="no network"):
        setup_env.install(environment, {})
    assert not environment.stamp.exists()


def test_old_python_is_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 2, "final", 0))
    assert setup_env.main() == 1
    assert "needs Python 3.11 or newer, this is Python 3.10" in capsys.readouterr().err
