"""What `dcr doctor` reports: the kernels in use, the machine, the versions, what is slow and why.

Nothing here imports torch or opens a device: versions come from package metadata, features from /proc.
"""

from __future__ import annotations

import os
import platform
from ctypes.util import find_library
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

PACKAGES = ("dcr", "torch", "numpy", "zstandard", "msgspec", "anyio")
# The instruction sets that a compiled kernel may be dispatched to, or that decide how fast it is.
FEATURES = frozenset({"bmi2", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512_vbmi2", "asimd", "sve", "sve2"})
CPUINFO = Path("/proc/cpuinfo")
NVIDIA = Path("/proc/driver/nvidia/version")


class Symptom(msgspec.Struct, frozen=True):
    """One thing that is slow (`fatal` false) or that cannot work (`fatal` true): why, and what helps."""

    what: str
    why: str
    remedy: str
    fatal: bool = False


class Diagnosis(msgspec.Struct, frozen=True):
    """What this machine runs. `healthy` is false only if something cannot work; slow is still right."""

    healthy: bool
    kernels: dict[str, str]
    python: str
    packages: dict[str, str | None]
    machine: str
    cpus: int
    cpu_features: tuple[str, ...]
    gpu_driver: str | None
    findings: tuple[Symptom, ...]


def examine(*, cpuinfo: Path = CPUINFO, nvidia: Path = NVIDIA) -> Diagnosis:
    """Look at this process and its machine; needs no torch, no GPU and no privilege."""
    chosen, broken = _kernels()
    packages = {name: _version(name) for name in PACKAGES}
    features = cpu_features(cpuinfo)
    driver = gpu_driver(nvidia)
    cpus = len(os.sched_getaffinity(0))
    findings = (*broken, *_missing(packages), *slow_kernels(chosen), *_few_cpus(cpus), *_idle_gpu(driver))
    return Diagnosis(
        healthy=not any(finding.fatal for finding in findings),
        kernels=chosen,
        python=platform.python_version(),
        packages=packages,
        machine=platform.machine(),
        cpus=cpus,
        cpu_features=features,
        gpu_driver=driver,
        findings=findings,
    )


def render(report: Diagnosis) -> str:
    """The report as text, one thing a line."""
    features = " ".join(report.cpu_features) or "no known vector features"
    lines = [
        f"dcr        {report.packages['dcr'] or 'not installed'}, python {report.python}",
        f"machine    {report.machine}, {report.cpus} CPUs; {features}",
        f"gpu        {report.gpu_driver or 'no driver found'}",
        "packages   " + ", ".join(f"{name} {version or 'MISSING'}" for name, version in report.packages.items()),
        f"kernels    {report.kernels['implementation']}, {report.kernels['level']} ({report.kernels['reason']})",
    ]
    for finding in report.findings:
        kind = "BROKEN" if finding.fatal else "slow"
        lines += ["", f"{kind}: {finding.what}", f"  why: {finding.why}", f"  do:  {finding.remedy}"]
    return "\n".join(lines if report.findings else [*lines, "", "nothing here is slower than it has to be"])


def cpu_features(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """Those of `FEATURES` that every processor of this machine has; empty where /proc does not tell."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return ()
    lines = [
        set(line.partition(":")[2].split()) for line in text.splitlines() if line.startswith(("flags", "Features"))
    ]
    return tuple(sorted(FEATURES.intersection(*lines))) if lines else ()


def gpu_driver(nvidia: Path = NVIDIA) -> str | None:
    """The NVIDIA kernel driver's own line, or the driver library's name; none is loaded."""
    try:
        return nvidia.read_text().splitlines()[0].removeprefix("NVRM version:").strip()
    except (OSError, IndexError):
        return find_library("cuda")


def slow_kernels(chosen: dict[str, str]) -> list[Symptom]:
    """What there is to say about kernels that load but are not the fast ones."""
    if chosen["implementation"] == "reference":
        what = "the numpy reference computes everything: exact, but tens of times slower than compiled kernels"
        remedy = "install a C++20 compiler, then dcr again, without -C cmake.define.DCR_NATIVE=OFF"
        return [Symptom(what, chosen["reason"], remedy)]
    if chosen["level"] == "portable":
        why = "the vector kernels are for x86-64 with AVX2 or AVX-512, which this machine does not have"
        return [Symptom("compiled kernels run without vector instructions", why, "use a newer x86-64 machine")]
    return []


def _kernels() -> tuple[dict[str, str], list[Symptom]]:
    try:
        from dcr import kernels
    except ImportError as error:
        finding = Symptom("the kernels do not load", str(error), "install dcr again on this machine", fatal=True)
        return {"implementation": "none", "level": "none", "reason": "they do not load"}, [finding]
    return kernels.describe(), []


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _missing(packages: dict[str, str | None]) -> list[Symptom]:
    return [
        Symptom(f"{name} is not installed", "dcr needs it", "install dcr again, with its dependencies", fatal=True)
        for name, found in packages.items()
        if found is None
    ]


def _few_cpus(cpus: int) -> list[Symptom]:
    if cpus > 1:
        return []
    return [
        Symptom(
            "the stages of a refit share one CPU",
            "this process may run on one CPU only, so compare, compress and transfer cannot overlap",
            "give the process more CPUs (taskset, cgroup cpuset)",
        )
    ]


def _idle_gpu(driver: str | None) -> list[Symptom]:
    if driver is None:
        return []
    return [
        Symptom(
            "the GPU is not used",
            "this version compares and applies on the host: it works on CPU storages only",
            "keep the weights that dcr reads and writes in host memory",
        )
    ]
