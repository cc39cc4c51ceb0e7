"""How fast videos are judged, and whether memory grows with their length.

    python -m engine.lvbench.bench --seconds 10 60

Makes 480p clips of the given lengths (H.264, 24 frames a second), judges each with the classic measures in a process
of its own, and prints one JSON object: seconds of video per second of one core, and the process's largest resident
memory.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import av
import cv2

from engine.lvbench.faults import clip
from engine.lvbench.judge import Method, judge_video

WIDTH, HEIGHT, FPS = 854, 480, 24
LOOP_FRAMES = 240  # a clip is this loop again and again, so that making it costs little


@dataclass(frozen=True)
class Measured:
    """One clip's cost, on one core."""

    video_s: float
    core_s: float
    video_s_per_core_s: float
    peak_rss_bytes: int


def measure(seconds: float) -> Measured:
    """Judges a clip of so many seconds in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="inferix-bench-") as folder:
        path = Path(folder) / "clip.mp4"
        _write_clip(path, round(seconds * FPS))
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            return fresh.submit(_judge, path, seconds).result()


def _judge(path: Path, seconds: float) -> Measured:
    cv2.setNumThreads(1)
    began = time.process_time()
    judge_video(path, Method())
    core_s = time.process_time() - began
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Measured(seconds, core_s, seconds / core_s, 1024 * peak_kib)


def _write_clip(path: Path, frames: int) -> None:
    loop = list(clip("none", min(frames, LOOP_FRAMES)))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for index in range(frames):
            picture = av.VideoFrame.from_ndarray(loop[index % len(loop)], format="rgb24")
            container.mux(stream.encode(picture.reformat(WIDTH, HEIGHT)))
        container.mux(stream.encode(None))


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description="How fast LV-Bench judges 480p video with the classic measures.")
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=[10.0, 60.0], metavar="S", help="lengths of the clips"
    )
    found = [asdict(measure(seconds)) for seconds in parser.parse_args().seconds]
    sys.stdout.write(json.dumps({"width": WIDTH, "height": HEIGHT, "fps": FPS, "clips": found}) + "\n")


if __name__ == "__main__":
    main()
