"""The engine's settings: one frozen record, read from arguments and environment here and nowhere else.

Arguments win over environment variables (`INFERIX_` and the setting's name in capitals). A wrong setting stops the
start and is named with what was expected and what was got. Knows no torch: whether a device exists is found out by
whoever uses it.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

ENVIRONMENT_PREFIX = "INFERIX_"
LOG_LEVELS = ("debug", "info", "warning", "error")
ENCODERS = ("auto", "h264_nvenc", "h264_qsv", "h264_v4l2m2m", "libx264")
DECODERS = ("full", "tiny")
EXCHANGES = ("auto", "pass-kv", "pass-q")
BYTE_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class ConfigError(ValueError):
    """A setting has a value that the engine cannot work with."""


@dataclass(frozen=True)
class EngineConfig:
    fd: int  # of the connected socket that leads to the server
    models: tuple[str, ...] = ("tiny-world",)
    device: str = "auto"  # auto, cpu, cuda, cuda:1 …
    ranks: int = 1  # processes that share each world's computation; on GPUs one each
    torchrun: bool = False  # has started this process and the other ranks; RANK says which this is
    ulysses: int | None = None  # ranks that share heads; None: chosen from what the links are measured to be
    ring: int | None = None  # ranks that share keys
    pipeline: int | None = None  # teams of ranks that blocks in flight are dealt out to (MAGI-1)
    cfg: int | None = None  # teams of ranks that share branches of guidance; None: where it goes, or pays
    exchange: str = "auto"  # of a ring; auto: chosen at each block
    share_decoding: bool = True  # by the ranks, where a model's decoder can be; False: rank 0 decodes alone
    threads: int = 1  # of the denoiser; decoding and encoding have threads of their own
    nice: int = 10  # niceness of the computing threads; playout keeps its own
    kv_budget_bytes: int | None = None  # for the pages of all worlds together; None: what the worlds admitted need
    host_budget_bytes: int = field(default_factory=lambda: memory_bytes() // 4)  # for pages that wait in host memory
    max_worlds: int = 16
    max_load: float = 0.95  # seconds of computing per second that admission may promise
    encoder: str = "auto"  # for H.264; auto: the first hardware encoder that encodes a frame, else libx264
    journal_dir: Path | None = None  # where each world's journal is kept
    weights_dir: Path | None = None  # where published checkpoints lie; None: ~/.cache/inferix
    decoder: str = "full"  # of the models that have a tiny one as well
    keep_text_encoder: bool = True  # False: it is read for each prompt and freed again
    compile: bool = False  # the layers of the models that can be compiled
    profile: bool = True
    hooks: Path | None = None  # a Python file that registers hooks with the profiler
    nvtx: bool = False  # spans are NVTX ranges too, for Nsight Systems; on CUDA only
    warm_up: bool = True  # make two blocks of each model before greeting: first pictures come sooner, costs are known
    log_level: str = "info"

    def __post_init__(self) -> None:
        _check("fd", self.fd, self.fd >= 0, "a file descriptor, 0 or more")
        _check("models", self.models, bool(self.models) and all(self.models), "at least one model name")
        _check("threads", self.threads, 1 <= self.threads <= 256, "1 to 256")
        _check("ranks", self.ranks, 1 <= self.ranks <= 256, "1 to 256")
        self._check_grid()
        _check("exchange", self.exchange, self.exchange in EXCHANGES, "one of " + ", ".join(EXCHANGES))
        _check("nice", self.nice, 0 <= self.nice <= 19, "0 to 19")
        budget = self.kv_budget_bytes
        _check("kv_budget_bytes", budget, budget is None or budget > 0, "a positive number of bytes")
        host = self.host_budget_bytes
        _check("host_budget_bytes", host, host >= 0, "a number of bytes, 0 or more")
        _check("max_worlds", self.max_worlds, 1 <= self.max_worlds <= 1024, "1 to 1024")
        _check("max_load", self.max_load, 0 < self.max_load <= 16, "above 0, at most 16")
        _check("encoder", self.encoder, self.encoder in ENCODERS, "one of " + ", ".join(ENCODERS))
        _check("log_level", self.log_level, self.log_level in LOG_LEVELS, "one of " + ", ".join(LOG_LEVELS))
        folder = self.journal_dir
        _check("journal_dir", folder, folder is None or folder.is_dir(), "an existing folder")
        file = self.hooks
        _check("hooks", file, file is None or (file.is_file() and self.profile), "an existing file, and --profile on")
        folder = self.weights_dir
        _check("weights_dir", folder, folder is None or folder.is_dir(), "an existing folder")
        _check("decoder", self.decoder, self.decoder in DECODERS, "one of " + ", ".join(DECODERS))

    def _check_grid(self) -> None:
        given = {name: n for name in ("ulysses", "ring", "pipeline", "cfg") if (n := getattr(self, name)) is not None}
        divisor = f"a number that divides the {self.ranks} ranks"
        for name, part in given.items():
            _check(name, part, part >= 1 and self.ranks % part == 0, divisor)
        product, whole = math.prod(given.values()), {"ulysses", "ring"} <= given.keys()
        fits = product == self.ranks if whole else self.ranks % product == 0
        _check(" x ".join(given), product, fits, f"{self.ranks}, the ranks" if whole else divisor)

    @classmethod
    def read(cls, arguments: Sequence[str], environ: Mapping[str, str]) -> EngineConfig:
        """The settings that `arguments` (without the program's name) and `environ` give."""
        found: dict[str, Any] = {}
        for name, convert in _CONVERTERS.items():
            text = environ.get(ENVIRONMENT_PREFIX + name.upper())
            if text is not None:
                found[name] = _convert(name, text, convert)
        given = vars(_parser().parse_args(arguments))
        given["models"] = ",".join(given["models"]) if given["models"] else None
        found |= {name: _convert(name, text, _CONVERTERS[name]) for name, text in given.items() if text is not None}
        if "fd" not in found:
            raise ConfigError("fd: expected --fd with the descriptor of the socket to the server, got none")
        return cls(**found)


def memory_bytes() -> int:
    """Of this machine; what a container may use of it is its operator's to say."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def parse_bytes(text: str) -> int:
    """Bytes written as a number with an optional k, m or g: `512m`."""
    unit = BYTE_UNITS.get(text[-1:].lower(), 1)
    count = float(text[:-1] if unit > 1 else text) * unit
    if not math.isfinite(count):
        raise ValueError("expected a finite number of bytes")
    return int(count)


def parse_bool(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError(f"expected one of {', '.join(words)}")
    return words[text.lower()]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "fd": int,
    "models": _names,
    "device": str,
    "ranks": int,
    "torchrun": parse_bool,
    "ulysses": int,
    "ring": int,
    "pipeline": int,
    "cfg": int,
    "exchange": str,
    "share_decoding": parse_bool,
    "threads": int,
    "nice": int,
    "kv_budget_bytes": parse_bytes,
    "host_budget_bytes": parse_bytes,
    "max_worlds": int,
    "max_load": float,
    "encoder": str,
    "journal_dir": Path,
    "weights_dir": Path,
    "decoder": str,
    "keep_text_encoder": parse_bool,
    "compile": parse_bool,
    "profile": parse_bool,
    "hooks": Path,
    "nvtx": parse_bool,
    "warm_up": parse_bool,
    "log_level": str,
}
assert set(_CONVERTERS) == {field.name for field in fields(EngineConfig)}


def _parser() -> argparse.ArgumentParser:
    """Every argument stays text here; it is converted together with the environment's."""
    parser = argparse.ArgumentParser(
        prog="python -m engine", description="The compute side of Inferix.", allow_abbrev=False
    )
    parser.add_argument("--fd", help="descriptor of the socket to the server")
    parser.add_argument("--model", dest="models", action="append", help="model to load (repeatable)")
    parser.add_argument("--device", help="auto, cpu, cuda, cuda:1 …")
    parser.add_argument("--ranks", help="processes that share each world's computation")
    parser.add_argument("--torchrun", help="whether torchrun has started this process and the other ranks")
    parser.add_argument("--ulysses", help="how many of them share heads; chosen by measurement where not given")
    parser.add_argument("--ring", help="how many of them share keys")
    parser.add_argument("--pipeline", help="into how many teams of them blocks in flight are dealt out (MAGI-1)")
    parser.add_argument("--cfg", help="teams of ranks that share the branches of classifier-free guidance")
    parser.add_argument("--exchange", help="of a ring: " + ", ".join(EXCHANGES))
    parser.add_argument("--share-decoding", help="whether ranks share decoding, where the decoder can be shared")
    parser.add_argument("--threads", help="threads of the denoiser")
    parser.add_argument("--nice", help="niceness of the computing threads")
    parser.add_argument("--kv-budget-bytes", help="bytes for all caches, as in 512m or 8g")
    parser.add_argument("--host-budget-bytes", help="bytes for pages in host memory (default: a quarter of the memory)")
    parser.add_argument("--max-worlds", help="worlds at a time at most")
    parser.add_argument("--max-load", help="seconds of computing per second that admission may promise")
    parser.add_argument("--encoder", help="for H.264: " + ", ".join(ENCODERS))
    parser.add_argument("--journal-dir", help="folder where each world's journal is kept")
    parser.add_argument("--weights-dir", help="folder of published checkpoints (default: ~/.cache/inferix)")
    parser.add_argument("--decoder", help="full or tiny, of the models that have both")
    parser.add_argument("--keep-text-encoder", help="whether the text encoder stays in memory between prompts")
    parser.add_argument("--compile", help="whether layers are compiled")
    parser.add_argument("--profile", help="whether to time the phases of each block")
    parser.add_argument("--hooks", help="Python file that registers hooks with the profiler")
    parser.add_argument("--nvtx", help="whether phases are NVTX ranges too (CUDA)")
    parser.add_argument("--warm-up", help="whether to make two blocks of each model before greeting")
    parser.add_argument("--log-level", help=", ".join(LOG_LEVELS))
    return parser


def _convert(name: str, text: str, convert: Callable[[str], Any]) -> Any:
    try:
        return convert(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}, got {text!r}") from error


def _check(name: str, value: object, good: bool, expected: str) -> None:
    if not good:
        raise ConfigError(f"{name}: expected {expected}, got {value!r}")
