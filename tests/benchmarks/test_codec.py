"""benchmarks/codec.py runs, small and once, and gives each number that has a target; not tested is what they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as Xml

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "codec.py"
METRICS = {
    "bytes_over_limit",
    "bytes_per_change",
    "compare_share_of_memcpy",
    "encode_share_of_memcpy",
    "encode_speedup_vs_gap16_xor_zstd",
    "fp32_compare_share_of_memcpy",
    "install_vs_index_put",
    "percent_of_dense",
    "prepare_vs_index_put",
    "scaling_vs_memcpy",
    "strided_over_contiguous",
}
FIELDS = {"metric", "workload", "density", "variant", "threads", "value", "unit"}


def test_the_benchmark_gives_a_row_for_every_target(tmp_path: Path) -> None:
    rows, plot = tmp_path / "rows.json", tmp_path / "plot.svg"
    command = [sys.executable, str(BENCHMARK), "--workload", "llm", "--scale", "0.002", "--density", "0.01", "0.03"]
    process = subprocess.run(
        [*command, "--rounds", "1", "--json", str(rows), "--plot", str(plot)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(rows.read_bytes())
    assert all(row.keys() == FIELDS for row in found)
    assert {row["metric"] for row in found} >= METRICS
    assert {row["variant"] for row in found} >= {"fast", "balanced", "small", "gap16-xor-zstd"}
    assert {row["threads"] for row in found} == {1, 2}
    assert " met" in process.stdout or " SHORT" in process.stdout
    texts = {element.text for element in Xml.parse(plot).iter("{http://www.w3.org/2000/svg}text")}
    assert texts >= {"balanced", "small", "limit", "limit given old", "roofline"}
