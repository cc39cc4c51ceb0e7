"""What Prometheus itself makes of our metrics, our rules and our scrape file, where its promtool is installed.

The rules of promtool are checked without it in `test_server.py`; here its own word is taken.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.metrics import PHASES, Metrics

ROOT = Path(__file__).parents[2]


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian has it in the package prometheus)")
    return found


def exposition() -> bytes:
    """Every metric with at least one value, names of a user's own measures among them."""
    metrics = Metrics()
    for phase in (*PHASES, "made up"):
        metrics.observe_block({phase: 12.5}, 12, -1.0)
    for gauge in (metrics.sessions, metrics.cache_bytes, metrics.queue_depth, metrics.custom):
        gauge.labels('a "quoted" name\nof two lines').set(1)
    metrics.outputs.labels("rtmp", "live").set(2)
    for counter in (metrics.packets_sent, metrics.packets_dropped, metrics.requests):
        counter.labels("x").inc()
    for histogram in (metrics.prompt_seconds, metrics.loop_lag_seconds):
        histogram.observe(0.02)
    return metrics.text()


def test_the_exposition_is_read_back_as_it_was_meant() -> None:
    families = {family.name: family for family in text_string_to_metric_families(exposition().decode())}
    assert families["inferix_blocks"].type == "counter" and families["inferix_block_seconds"].type == "histogram"
    assert [s.labels["name"] for s in families["inferix_world_metric"].samples] == ['a "quoted" name\nof two lines']
    late = [s.value for s in families["inferix_deadline_misses"].samples if s.name.endswith("_total")]
    assert late == [len(PHASES) + 1]


def test_promtool_finds_nothing_wrong_with_the_exposition(promtool: str) -> None:
    done = subprocess.run([promtool, "check", "metrics"], input=exposition(), capture_output=True)
    assert done.returncode == 0 and not done.stdout + done.stderr, (done.stdout + done.stderr).decode()


def test_promtool_would_find_something(promtool: str) -> None:
    bad = b"# HELP inferix_blocks Blocks.\n# TYPE inferix_blocks counter\ninferix_blocks 1\n"
    assert subprocess.run([promtool, "check", "metrics"], input=bad, capture_output=True).returncode != 0


@pytest.mark.parametrize(
    ("what", "file"), [("rules", "inferix.rules.yml"), ("config", "prometheus.yml")], ids=["rules", "config"]
)
def test_promtool_takes_rules_and_scrape_file(promtool: str, what: str, file: str) -> None:
    done = subprocess.run([promtool, "check", what, str(ROOT / "deploy" / file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
