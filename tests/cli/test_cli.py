"""The command line: what it prints, how it exits, and what it hands on."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from typer.testing import CliRunner

from dcr import kernels
from dcr.cli import main
from dcr.cli.doctor import Diagnosis, Symptom, cpu_features, examine, gpu_driver, render, slow_kernels
from dcr.errors import DigestMismatch
from dcr.plugins import GROUPS

CLI = CliRunner()


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Put a recorder in the demo's place; it exits with the seed."""
    calls: list[dict[str, object]] = []
    module = ModuleType("dcr.cli.demo")

    def run(**options: object) -> object:
        calls.append(options)
        return options["seed"]

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dcr.cli.demo", module)
    monkeypatch.setattr("dcr.cli.demo", module, raising=False)
    return calls


def test_version_is_that_of_the_distribution() -> None:
    result = CLI.invoke(main, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"dcr {version('dcr')}\n")


def test_help_names_the_commands() -> None:
    result = CLI.invoke(main, ["--help"])
    assert result.exit_code == 0
    assert [name for name in ("demo", "plugins", "doctor") if name not in result.stdout] == []


def test_demo_has_defaults(demo: list[dict[str, object]]) -> None:
    assert CLI.invoke(main, ["demo"]).exit_code == 0
    assert demo == [{"refits": 12, "inject_fault": None, "seed": 0}]


@pytest.mark.parametrize("fault", ["weights", "wire"])
def test_demo_hands_on_its_options_and_the_exit_code(demo: list[dict[str, object]], fault: str) -> None:
    result = CLI.invoke(main, ["demo", "--refits", "3", "--inject-fault", fault, "--seed", "7"])
    assert result.exit_code == 7
    assert demo == [{"refits": 3, "inject_fault": fault, "seed": 7}]
    assert type(demo[0]["inject_fault"]) is str


@pytest.mark.parametrize("options", [["--inject-fault", "cosmic"], ["--refits", "0"], ["--refits", "many"]])
def test_demo_refuses_what_it_does_not_know(demo: list[dict[str, object]], options: list[str]) -> None:
    assert CLI.invoke(main, ["demo", *options]).exit_code == 2
    assert demo == []


def test_an_error_of_the_demo_is_one_line_and_a_failure(monkeypatch: pytest.MonkeyPatch, demo: object) -> None:
    def run(**options: object) -> int:
        raise DigestMismatch("expected a, found b")

    monkeypatch.setattr("dcr.cli.demo.run", run)
    result = CLI.invoke(main, ["demo"])
    assert result.exit_code == 2
    assert result.stderr == "dcr demo: DigestMismatch: expected a, found b\n"


def test_plugins_lists_the_built_in_ones() -> None:
    result = CLI.invoke(main, ["plugins"])
    assert result.exit_code == 0
    assert "dcr.transports.local:transport" in result.stdout


def test_plugins_as_json_has_every_group() -> None:
    listed = json.loads(CLI.invoke(main, ["plugins", "--json"]).stdout)
    assert tuple(listed) == GROUPS
    local = {"name": "local", "distribution": "dcr", "value": "dcr.transports.local:transport"}
    assert local in listed["dcr.transports"]


def test_doctor_as_json_is_the_report_that_it_renders() -> None:
    result = CLI.invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0
    assert msgspec.json.decode(result.stdout, type=Diagnosis) == examine()


def test_doctor_tells_the_versions_without_torch_being_imported() -> None:
    result = CLI.invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert f"torch {version('torch')}" in result.stdout
    assert f"numpy {version('numpy')}" in result.stdout


@pytest.mark.parametrize("damage", ["dcr._native", "dcr._build"])
def test_doctor_fails_and_says_why_if_the_kernels_do_not_load(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dcr.kernels", "dcr.kernels.compiled"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("dcr.kernels", damage):
        monkeypatch.delattr(name, raising=False)
    monkeypatch.setitem(sys.modules, damage, None)
    result = CLI.invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "BROKEN: the kernels do not load" in result.stdout


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"implementation": "reference", "level": "numpy", "reason": "built with DCR_NATIVE=OFF"}, "numpy reference"),
        ({"implementation": "compiled", "level": "portable", "reason": "of portable"}, "without vector instructions"),
    ],
)
def test_doctor_names_slow_kernels_and_a_remedy(chosen: dict[str, str], said: str) -> None:
    (finding,) = slow_kernels(chosen)
    assert said in finding.what
    assert finding.why
    assert finding.remedy
    assert not finding.fatal


def test_doctor_has_nothing_to_say_about_fast_kernels() -> None:
    assert slow_kernels({"implementation": "compiled", "level": "avx512", "reason": ""}) == []


def test_doctor_reports_the_kernels_that_run() -> None:
    assert examine().kernels == kernels.describe()


def test_cpu_features_are_those_that_all_cores_have(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t: fpu avx2 bmi2 avx512f\nmodel: 1\n\nflags\t: fpu avx2 bmi2\n")
    assert cpu_features(cpuinfo) == ("avx2", "bmi2")


def test_a_machine_that_tells_nothing_is_not_an_error(tmp_path: Path) -> None:
    report = examine(cpuinfo=tmp_path / "absent", nvidia=tmp_path / "absent")
    assert report.cpu_features == ()
    assert "no known vector features" in render(report)


def test_a_gpu_driver_is_reported_with_what_it_means(tmp_path: Path) -> None:
    nvidia = tmp_path / "version"
    nvidia.write_text("NVRM version: NVIDIA UNIX Module  570.1\nGCC version: 12\n")
    assert gpu_driver(nvidia) == "NVIDIA UNIX Module  570.1"
    assert "the GPU is not used" in [finding.what for finding in examine(nvidia=nvidia).findings]


def test_a_fatal_finding_is_rendered_as_broken() -> None:
    report = examine()
    broken = msgspec.structs.replace(report, findings=(Symptom("a", "b", "c", fatal=True), Symptom("d", "e", "f")))
    assert "BROKEN: a\n  why: b\n  do:  c\n\nslow: d" in render(broken)
