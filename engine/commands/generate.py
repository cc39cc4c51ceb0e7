"""`inferix generate`: a world from prompts to a file, with a progress bar.

Everything that can be wrong is found before anything is computed. Ctrl-C, and a full disk, leave a file that plays.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from engine import hooks, profiler
from engine.accelerator import annotation, device_event, torch_profiled
from engine.bench.result import machine
from engine.commands.refusal import printable, refuse, say
from engine.hooks import HooksWrong
from engine.kvcache.policy import PolicyError
from engine.kvcache.pool import CacheFull
from engine.layers.attention import AttentionUnavailable
from engine.loader import DeviceUnavailable, device_named
from engine.models.files import MissingFiles
from engine.models.presets import LoadOptions, UnknownModel
from engine.movie import Movie, OutputError, Picture, contact_sheet, write_png
from engine.parallel.launch import RankLost
from engine.parallel.split import SplitError
from engine.parallel.together import opened
from engine.parallel.wish import Wish
from engine.plan import size
from engine.profiler import Profiler
from engine.protocol import ActionState, PromptChange, PromptMode
from engine.recipe import RecipeError
from engine.report import write_report, write_trace
from engine.rollout import WORLD, Part, Request, Rollout, use_threads
from engine.samplers import NotFinite
from engine.signals import SignalError
from engine.start import StartError
from engine.weights import WeightsError

SHEET_PICTURES = 30
PROFILE_SPANS = 500_000
BAD_INPUT = 2
INTERRUPTED = 130

Refusals = (
    SignalError,
    StartError,
    PolicyError,
    CacheFull,
    RecipeError,
    OutputError,
    UnknownModel,
    MissingFiles,
    DeviceUnavailable,
    NotFinite,
    WeightsError,
    AttentionUnavailable,
    HooksWrong,
    SplitError,
    RankLost,
)
"""What a user can cause: said in one line, exit status 2."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-world", help="a name of `inferix models list` (default: %(default)s)")
    parser.add_argument("--prompt", required=True, help="what the world is at the start")
    parser.add_argument(
        "--at",
        action="append",
        default=[],
        metavar="'6s: TEXT'",
        help="a prompt that takes effect later; '6s cut: …', '6s recache: …' or '6s blend 4: …' say how",
    )
    parser.add_argument(
        "--hold",
        action="append",
        default=[],
        metavar="'2s: KEY,…'",
        help="keys held from a time on, until the next --hold; '5s:' lets go",
    )
    parser.add_argument("--start", type=Path, metavar="FILE", help="a picture or a video that the world begins with")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the video (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="denoising steps per block (default: the model's)")
    parser.add_argument("--kv", default="", help="KV policy, as in 'window=12 sink=3 store=int8'")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 …, or auto")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the computation, a GPU each on cuda")
    parser.add_argument("--ulysses", type=int, help="how many of them share heads (default: chosen by measurement)")
    parser.add_argument("--ring", type=int, help="how many of them share keys")
    parser.add_argument("--pipeline", type=int, help="into how many teams of them blocks in flight go (MAGI-1)")
    parser.add_argument(
        "--cfg", type=int, help="teams of them that share the branches of guidance (default: if it fits)"
    )
    parser.add_argument(
        "--share-decoding",
        choices=("on", "off"),
        default="on",
        help="whether they share decoding, where the model's decoder can be shared (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, help="threads torch computes with (default: torch's)")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("world.mp4"), help="an .mp4 or .gif (default: world.mp4)"
    )
    parser.add_argument("--frames-dir", type=Path, help="also write every picture as a PNG into this folder")
    parser.add_argument("--sheet", type=Path, help="also write a contact sheet of the video to this PNG")
    parser.add_argument(
        "--profile",
        type=Path,
        help="also write where the time went: .html a page, .json a trace",
    )
    parser.add_argument(
        "--torch-profile",
        type=Path,
        metavar="FILE",
        help="also write the trace of torch's own profiler, phases marked in it; seconds of video make it large",
    )
    parser.add_argument("--nvtx", action="store_true", help="mark phases as NVTX ranges, for nsys (CUDA)")
    parser.add_argument(
        "--hooks", type=Path, metavar="FILE.py", help="a file of yours that adds measures to the profile"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object last, and nothing else on stdout")


def run(args: argparse.Namespace) -> int:
    """Make the video; 0 when it is whole, 2 on input that cannot be, 130 when interrupted or terminated."""
    console = Console(stderr=args.json)
    try:
        return _generate(args, console)
    except Refusals as error:
        refuse(console, "generate", error)
        return BAD_INPUT
    except KeyboardInterrupt:
        say(console, "interrupted")
        return INTERRUPTED


def request_of(args: argparse.Namespace) -> Request:
    """What the arguments ask for. Raises SignalError or DeviceUnavailable."""
    if args.threads is not None:
        if not 1 <= args.threads <= 256:
            raise SignalError(f"threads: expected 1 to 256, got {args.threads}")
        use_threads(args.threads)
    prompts = (PromptChange(0.0, args.prompt), *(parse_prompt(text) for text in args.at))
    actions = tuple(parse_hold(text) for text in args.hold)
    load = LoadOptions(device=device_named(args.device))
    return Request(args.model, prompts, args.seconds, args.seed, actions, args.kv, args.steps, args.start, load)


_AT = re.compile(
    r"\s*(?P<at>[0-9.]+)\s*s?(?:\s+(?P<mode>cut|recache|blend)(?:\s+(?P<over>\d{1,6}))?)?\s*:\s*(?P<rest>.*)", re.S
)


def parse_prompt(text: str) -> PromptChange:
    """`6s: TEXT`, with `cut`, `recache` or `blend N` before the colon."""
    match = _AT.fullmatch(text)
    if match is None:
        raise SignalError(f"--at: expected 'SECONDS: TEXT' as in '6s: a thunderstorm arrives', got {text!r}")
    at_s, mode = _seconds(match["at"]), cast(PromptMode, match["mode"] or "auto")
    return PromptChange(at_s, match["rest"].strip(), mode, int(match["over"] or 4))


def parse_hold(text: str) -> tuple[float, ActionState]:
    """`2s: left,fast`."""
    match = _AT.fullmatch(text)
    if match is None or match["mode"]:
        raise SignalError(f"--hold: expected 'SECONDS: KEY,KEY' as in '2s: right', got {text!r}")
    keys = tuple(key.strip() for key in match["rest"].split(",") if key.strip())
    return _seconds(match["at"]), ActionState(keys=keys)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SignalError(f"time: expected seconds, got {text!r}") from None


@dataclass
class _Sums:
    """What the summary is computed from."""

    pictures: int = 0
    spent_s: float = 0.0
    kv_bytes: int = 0
    digest: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    sheet: list[Picture] = field(default_factory=list)


def _generate(args: argparse.Namespace, console: Console) -> int:
    request = request_of(args)
    teams = {"pipeline": args.pipeline, "cfg": args.cfg}
    wish = Wish(args.ranks, args.ulysses, args.ring, **teams, share_decoding=args.share_decoding == "on")
    request.check()
    _check_files(args)
    if args.frames_dir is not None:
        _make_folder(args.frames_dir)
    with ExitStack() as stack:
        recorder = _recorder(args, stack)
        rollout = stack.enter_context(opened(request, wish))
        g = rollout.model.geometry
        movie = stack.enter_context(Movie(args.output, g.width, g.height, g.fps, rollout.total_pictures))
        sums = _Sums()
        began = time.perf_counter()
        with stopped_by_signals() as stop:
            _make(args, rollout, movie, sums, console, stop)
        status = INTERRUPTED if stop.is_set() and sums.pictures < rollout.total_pictures else 0
        sums.spent_s = time.perf_counter() - began
        movie.close()
        if recorder is not None and args.profile is not None:
            _write_profile(args, rollout, sums, recorder)
        _report(args, rollout, sums, console)
    if status == INTERRUPTED:
        say(console, f"interrupted: the first {sums.pictures / g.fps:.1f} s are in {args.output}")
    return status


def _recorder(args: argparse.Namespace, stack: ExitStack) -> Profiler | None:
    """What records the run until `stack` closes; None when nobody wants to know."""
    files = [path for path in (args.profile, args.torch_profile) if path is not None]
    if args.hooks is not None and args.profile is None:
        raise HooksWrong("hooks: expected --profile FILE to show their measures in, got none")
    if not files and not args.nvtx:
        return None
    if args.hooks is not None:
        for name in hooks.load(args.hooks):
            stack.callback(profiler.remove_hook, name)
    device = torch.device(device_named(args.device))
    annotate = annotation(device, torch_profile=args.torch_profile is not None, nvtx=args.nvtx)
    recorder = Profiler(PROFILE_SPANS, device_event(device), annotate)
    if args.torch_profile is not None:
        stack.enter_context(torch_profiled(args.torch_profile, device))
    profiler.enable(recorder)
    stack.callback(profiler.disable)
    return recorder


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets, seen between two blocks; a second one interrupts at once.

    An exception raised by the signal itself could come anywhere, also where a library swallows it.
    """
    stop = threading.Event()

    def note(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _make(
    args: argparse.Namespace, rollout: Rollout, movie: Movie, sums: _Sums, console: Console, stop: threading.Event
) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[facts]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("generating", total=rollout.total_pictures, facts="")
        every = max(1, rollout.total_pictures // SHEET_PICTURES)
        began = time.perf_counter()
        for part in rollout:
            movie.add(part.pictures)
            _note(args, part, sums, every)
            _show(bar, task, part, sums, rollout.model.geometry.fps, time.perf_counter() - began)
            if stop.is_set():
                return


def _note(args: argparse.Namespace, part: Part, sums: _Sums, every: int) -> None:
    for picture in part.pictures:
        if args.frames_dir is not None:
            write_png(args.frames_dir / f"{sums.pictures:06d}.png", picture)
        if args.sheet is not None and sums.pictures % every == 0 and len(sums.sheet) < SHEET_PICTURES:
            sums.sheet.append(picture.copy())
        sums.pictures += 1
    sums.digest.update(np.ascontiguousarray(part.pictures).tobytes())
    sums.kv_bytes = sum(part.kv_bytes.values())


def _show(bar: Progress, task: TaskID, part: Part, sums: _Sums, fps: float, spent_s: float) -> None:
    rate = sums.pictures / spent_s
    facts = (
        f"block {part.block.index} · {rate:.1f} fps · {rate / fps:.2f}× real time · cache {sums.kv_bytes / 1e6:.1f} MB"
    )
    bar.update(task, completed=sums.pictures, facts=facts)


def _report(args: argparse.Namespace, rollout: Rollout, sums: _Sums, console: Console) -> None:
    fps = rollout.model.geometry.fps
    if args.sheet is not None and sums.sheet:
        write_png(args.sheet, contact_sheet(sums.sheet))
    summary = {
        "frames": sums.pictures,
        "fps": fps,
        "seconds": sums.pictures / fps,
        "real_time_factor": round(sums.pictures / fps / max(sums.spent_s, 1e-9), 3),
        "kv_bytes": sums.kv_bytes,
        "model": args.model,
        "seed": args.seed,
        "digest": sums.digest.hexdigest(),
        "model_digest": rollout.model.digest(),
        "output": printable(str(args.output)),
    }
    if args.json:
        Console(soft_wrap=True).out(msgspec.json.encode(summary).decode(), highlight=False)
    else:
        seconds, factor = summary["seconds"], summary["real_time_factor"]
        said = f"{seconds:.1f} s at {fps:g} fps, made at {factor}× real time (seed {args.seed})"
        say(console, f"{args.output}: {said}")


def _write_profile(args: argparse.Namespace, rollout: Rollout, sums: _Sums, recorder: Profiler) -> None:
    g = rollout.model.geometry
    try:
        if args.profile.suffix == ".json":
            write_trace(args.profile, recorder)
            return
        factor = sums.pictures / g.fps / max(sums.spent_s, 1e-9)
        facts = (
            ("times real time", f"{factor:.2f}"),
            ("pictures per second", f"{factor * g.fps:.1f}"),
            ("video made", f"{sums.pictures / g.fps:.1f} s"),
            ("blocks", str(rollout.world.block)),
            ("cache at the end", size(sums.kv_bytes)),
        )
        what = f"{args.model}, {g.width}x{g.height} at {g.fps:g} fps, cache: {rollout.world.caches[0].policy}"
        where = ", ".join(f"{name} {value}" for name, value in machine().items())
        write_report(args.profile, recorder, WORLD, what, facts, g.block_s * 1e3, where)
    except OSError as error:
        raise OutputError(f"profile: cannot write {args.profile}: {error.strerror}") from error


def _check_files(args: argparse.Namespace) -> None:
    """Raise OutputError for files that get in each other's way, or cannot be written when their turn comes."""
    late = {"sheet": args.sheet, "profile": args.profile, "torch-profile": args.torch_profile}
    taken: dict[str, str] = {}
    for name, path in {"start": args.start, "output": args.output, **late}.items():
        if path is not None and (other := taken.setdefault(os.path.realpath(path), name)) != name:
            raise OutputError(f"{name}: expected another file than that of --{other}, got {path}")
    for name, path in late.items():
        if path is not None:
            _open_for_writing(name, path)


def _open_for_writing(name: str, path: Path) -> None:
    """Find out now whether a file can be written that is only written at the end."""
    try:
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise OutputError(f"{name}: cannot write {path}: {error.strerror}") from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"frames-dir: cannot make {folder}: {error}") from error
