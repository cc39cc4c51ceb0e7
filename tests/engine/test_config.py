"""Settings come from arguments and environment, arguments win, and a wrong one is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import ConfigError, EngineConfig, parse_bytes


def test_arguments_win_over_the_environment() -> None:
    environ = {"INFERIX_DEVICE": "cuda", "INFERIX_NICE": "5", "OTHER": "x"}
    config = EngineConfig.read(["--fd", "3", "--model", "a, b", "--model", "c", "--nice", "0"], environ)
    assert (config.fd, config.models, config.device, config.nice) == (3, ("a", "b", "c"), "cuda", 0)


def test_sizes_are_read_with_units() -> None:
    assert [parse_bytes(text) for text in ("12", "2k", "1.5M", "1g")] == [12, 2048, 3 << 19, 1 << 30]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fd", "3", "--decoder", "half"], ["decoder", "full, tiny", "half"]),
        (["--fd", "3", "--weights-dir", "/nowhere"], ["weights_dir", "existing folder", "/nowhere"]),
        ([], ["fd", "got none"]),
        (["--fd", "x"], ["fd", "'x'"]),
        (["--fd", "3", "--nice", "40"], ["nice", "0 to 19", "40"]),
        (["--fd", "3", "--kv-budget-bytes", "lots"], ["kv_budget_bytes", "'lots'"]),
        (["--fd", "3", "--encoder", "magic"], ["encoder", "libx264", "'magic'"]),
        (["--fd", "3", "--profile", "maybe"], ["profile", "'maybe'"]),
        (["--fd", "3", "--model", "a,,b"], ["models", "at least one model name"]),
        (["--fd", "3", "--journal-dir", "/no/such/folder"], ["journal_dir", "existing folder"]),
    ],
)
def test_a_wrong_setting_is_named_with_expected_and_got(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.read(arguments, {})
    assert all(word in str(caught.value) for word in words)


def test_a_wrong_environment_variable_is_named_too() -> None:
    with pytest.raises(ConfigError, match="threads.*'many'"):
        EngineConfig.read(["--fd", "3"], {"INFERIX_THREADS": "many"})


def test_settings_need_no_torch() -> None:
    code = "import sys, engine.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
