"""`inferix eval`: judge files, a session's recording, or worlds made for the purpose; build a data set's manifest.

    inferix eval a.mp4 b.mp4 --report drift.html --json
    inferix eval --session ID --server http://127.0.0.1:8000
    inferix eval --model tiny --prompts prompts.txt --seconds 60
    inferix eval --dataset DIR --split eval
    inferix eval manifest FOLDER --captions captions.csv --out FOLDER/manifest.jsonl

A video that cannot be judged is reported and skipped. Exit code: 0 all judged, 1 some were not, 2 nothing to do or a
wrong argument.
"""

import argparse
import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from engine.commands.refusal import printable, refuse, say
from engine.lvbench.dataset import DatasetBroken, Skipped, Split, build_manifest, read_dataset
from engine.lvbench.judge import FRAMES_PER_PART, Method, Verdict, judge_video
from engine.lvbench.measures import DIMENSIONS, MeasureSet, MeasuresUnavailable, measures_module
from engine.lvbench.recording import RecordingUnavailable, download_recording
from engine.lvbench.vde import DriftUndefined, WeightScheme
from engine.lvbench.video import VideoUnusable

CAPTIONS_OF_A_FOLDER = "captions.csv"


class NothingToJudge(ValueError):
    """The arguments name no video, or contradict each other."""


@dataclass(frozen=True)
class Source:
    """A file to judge, and what to call it."""

    path: Path
    name: str


@dataclass(frozen=True)
class Outcome:
    """What became of the videos."""

    verdicts: list[Verdict]
    skipped: list[Skipped]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `inferix eval`."""
    parser.add_argument("videos", nargs="*", metavar="VIDEO", help="files to judge; or: manifest FOLDER")
    method = parser.add_argument_group("method")
    method.add_argument("--measures", choices=get_args(MeasureSet), default="classic", help="default: classic")
    method.add_argument("--parts", type=int, default=10, metavar="N", help="parts a video is cut into (default 10)")
    method.add_argument("--weights", choices=get_args(WeightScheme), default="linear", help="default: linear")
    method.add_argument("--weights-dir", type=Path, metavar="DIR", help="weights of the published measures")
    method.add_argument("--jobs", type=int, default=1, metavar="N", help="videos judged at once")
    source = parser.add_argument_group("other sources")
    source.add_argument("--session", action="append", default=[], metavar="ID", help="a session's recording")
    source.add_argument("--server", default="http://127.0.0.1:8000", metavar="URL")
    source.add_argument("--token-file", type=Path, metavar="FILE", help="the server's bearer token")
    source.add_argument("--dataset", type=Path, metavar="DIR", help="the videos of a manifest")
    source.add_argument("--split", choices=get_args(Split), help="of the data set; default both")
    source.add_argument("--model", metavar="NAME", help="make the videos: from --prompts, or the captions of --dataset")
    source.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line")
    source.add_argument("--seconds", type=float, default=60.0, help="length of a made video (default 60)")
    source.add_argument("--seed", type=int, default=0)
    source.add_argument("--keep", type=Path, metavar="DIR", help="keep the made videos here")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object on standard output, last")
    output.add_argument("--report", type=Path, metavar="OUT.html", help="a page with curves and pictures")
    manifest = parser.add_argument_group("manifest")
    manifest.add_argument("--captions", type=Path, metavar="FILE", help=f"default: FOLDER/{CAPTIONS_OF_A_FOLDER}")
    manifest.add_argument("--out", type=Path, metavar="FILE", help="default: FOLDER/manifest.jsonl")


def run(args: argparse.Namespace) -> int:
    """Runs `inferix eval`; returns the exit code."""
    console = Console(stderr=True)
    try:
        if args.videos[:1] == ["manifest"]:
            return _run_manifest(args, console)
        return _run_judging(args, console)
    except (NothingToJudge, DatasetBroken, MeasuresUnavailable, RecordingUnavailable, DriftUndefined) as error:
        refuse(console, "eval", error)
        return 2


def _run_judging(args: argparse.Namespace, console: Console) -> int:
    method = Method(args.measures, args.parts, args.weights, args.weights_dir)
    if args.jobs < 1:
        raise NothingToJudge(f"--jobs: expected 1 or more, got {args.jobs}")
    if args.report:
        _check_writable(args.report)
    with tempfile.TemporaryDirectory(prefix="inferix-eval-") as scratch:
        sources = list(_sources(args, Path(scratch), console))
        if not sources:
            raise NothingToJudge("expected a VIDEO, --session, --dataset or --model, got none of them")
        outcome = judge_all(sources, method, args.jobs, console)
    if args.report:
        _write_report(args.report, outcome)
    _print_table(outcome, method, console)
    if args.json:
        sys.stdout.write(json.dumps(to_json(outcome), allow_nan=False) + "\n")
    return 1 if outcome.skipped else 0


def judge_all(sources: list[Source], method: Method, jobs: int, console: Console) -> Outcome:
    """Judges files in order, `jobs` at a time; what cannot be judged is listed, the rest goes on."""
    measures_module(method.measures)  # whether it can run at all is known before anything starts
    outcome = Outcome([], [])
    with _progress(console) as bar:
        results = _in_turn(sources, method, bar) if jobs == 1 else _side_by_side(sources, method, jobs, bar)
        for result in results:
            if isinstance(result, Verdict):
                outcome.verdicts.append(result)
            else:
                outcome.skipped.append(result)
    return outcome


def to_json(outcome: Outcome) -> dict[str, object]:
    """The object `--json` prints."""
    return {
        "videos": [verdict.to_json() for verdict in outcome.verdicts],
        "skipped": [{"path": str(skipped.video), "reason": skipped.reason} for skipped in outcome.skipped],
    }


def _in_turn(sources: list[Source], method: Method, bar: Progress) -> Iterator[Verdict | Skipped]:
    for number, source in enumerate(sources, 1):
        task = bar.add_task(printable(f"{number}/{len(sources)} {source.name}"), total=None)
        yield _judge_or_skip(source, method, functools.partial(_show, bar, task))


def _side_by_side(sources: list[Source], method: Method, jobs: int, bar: Progress) -> Iterator[Verdict | Skipped]:
    task = bar.add_task("videos", total=len(sources))
    workers = min(jobs, len(sources))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_use_one_thread) as pool:
        for result in pool.map(_judge_or_skip, sources, [method] * len(sources)):
            bar.advance(task)
            yield result


def _judge_or_skip(
    source: Source, method: Method, progress: Callable[[int, int], None] | None = None
) -> Verdict | Skipped:
    try:
        return judge_video(source.path, method, progress, source.name)
    except VideoUnusable as error:
        return Skipped(source.path, str(error))


def _show(bar: Progress, task: TaskID, done: int, total: int) -> None:
    bar.update(task, completed=done, total=total)


def _use_one_thread() -> None:
    """Each job has a core; OpenCV would start a thread for every core in every job."""
    importlib.import_module("cv2").setNumThreads(1)


def _sources(args: argparse.Namespace, scratch: Path, console: Console) -> Iterator[Source]:
    yield from (Source(Path(video), video) for video in args.videos)
    token = _token(args.token_file)
    for session in args.session:
        yield Source(download_recording(args.server, session, token, scratch), f"session {session}")
    if args.model:
        yield from _made(args, args.keep or scratch, console)
    elif args.dataset:
        yield from (Source(item.video, str(item.video)) for item in read_dataset(args.dataset, args.split))


def _token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NothingToJudge(f"--token-file: expected a file with a token, got: {error}") from error


def _made(args: argparse.Namespace, folder: Path, console: Console) -> Iterator[Source]:
    from engine.lvbench import made  # loads torch, which judging does not need

    if (args.prompts is None) == (args.dataset is None):
        raise NothingToJudge("--model: expected either --prompts or --dataset, got both or none")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if args.prompts is not None:
            scripts = made.scripts_of_file(args.prompts)
        else:
            scripts = [made.script_of_item(item, args.seconds) for item in read_dataset(args.dataset, args.split)]
        with _progress(console) as bar:
            for script, path in made.make_videos(args.model, scripts, args.seconds, args.seed, folder, bar):
                yield Source(path, str(path) if args.keep else script.name)
    except made.WorldRefused as error:
        raise NothingToJudge(str(error)) from error


def _run_manifest(args: argparse.Namespace, console: Console) -> int:
    if len(args.videos) != 2:
        raise NothingToJudge(f"manifest: expected one folder of videos, got {args.videos[1:]}")
    folder = Path(args.videos[1])
    captions, out = args.captions or folder / CAPTIONS_OF_A_FOLDER, args.out or folder / "manifest.jsonl"
    listed, skipped = build_manifest(folder, captions, out, FRAMES_PER_PART * args.parts)
    for left_out in skipped:
        say(console, f"left out: {left_out.video}: {left_out.reason}")
    say(console, f"{out}: {listed} videos, {len(skipped)} left out")
    if args.json:
        entries = [{"path": str(s.video), "reason": s.reason} for s in skipped]
        sys.stdout.write(json.dumps({"manifest": str(out), "videos": listed, "skipped": entries}) + "\n")
    return 1 if skipped else 0


def _write_report(path: Path, outcome: Outcome) -> None:
    from engine.lvbench.report import render  # needs OpenCV, which comes with the extra

    path.write_text(printable(render(outcome.verdicts, outcome.skipped)), encoding="utf-8")


def _check_writable(path: Path) -> None:
    """Find out before the judging whether its page can be written."""
    try:
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise NothingToJudge(f"--report: cannot write {path}: {error.strerror}") from error


def _print_table(outcome: Outcome, method: Method, console: Console) -> None:
    table = Table(title=f"mean drift, {method.measures} measures, {method.parts} parts, {method.weights} weights")
    table.add_column("video", overflow="fold")
    for name in DIMENSIONS:
        table.add_column(name, justify="right")
    for verdict in outcome.verdicts:
        found = [verdict.drifts[name] for name in DIMENSIONS]
        table.add_row(
            escape(printable(verdict.facts.path)), *(f"{100 * drift.mean:.1f} %" if drift else "–" for drift in found)
        )
    if outcome.verdicts:
        console.print(table)
    for skipped in outcome.skipped:
        say(console, f"skipped: {skipped.reason}")


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
