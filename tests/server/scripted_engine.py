"""A test double for the engine: speaks the protocol, paints a moving bar, encodes it for real. Never shipped.

Prompts beginning with `!` are orders: `!exit N`, `!hang` (stop reading for ever), `!garbage` (break the protocol),
`!refuse` (SignalRefused), `!fail` (this world alone); a world that opens with `!late` shows nothing until
it is steered or resumed. `--worlds N` is its capacity.
"""

from __future__ import annotations

import argparse
import json
import math
import select
import socket
import sys
import time
from fractions import Fraction
from typing import Any

import av
import numpy as np
from av.video.frame import PictureType

from engine.protocol import (
    BlockDone,
    Close,
    Codec,
    Command,
    Encode,
    Event,
    Framer,
    Hello,
    ModelCard,
    Open,
    Opened,
    Packet,
    Pause,
    Ping,
    Pong,
    Profile,
    PromptChange,
    Refused,
    Resume,
    Shutdown,
    SignalApplied,
    SignalRefused,
    Stats,
    Steer,
    WantBitrate,
    WantKeyframe,
    WantProfile,
    WorldChanged,
    decode_command,
    frame,
)

WIDTH, HEIGHT, FPS, BLOCK = 128, 80, 20, 5
TICKS = 90_000 // FPS
CARD = ModelCard(
    "scripted",
    WIDTH,
    HEIGHT,
    FPS,
    BLOCK,
    ("prompt", "action"),
    ("left", "right"),
    ("zoom",),
    ("a moving bar",),
    "d1gest",
)


class Encoder:
    def __init__(self, codec: Codec) -> None:
        self.wants_keyframe = True
        context = av.CodecContext.create("libx264" if codec == "h264" else "libvpx", "w")
        assert isinstance(context, av.VideoCodecContext)
        context.width, context.height, context.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        context.time_base, context.framerate = Fraction(1, 90_000), Fraction(FPS)
        context.bit_rate, context.gop_size, context.max_b_frames, context.thread_count = 300_000, 2 * FPS, 0, 1
        if codec == "h264":
            context.profile = "Baseline"
            context.options = {"preset": "ultrafast", "tune": "zerolatency"}
        else:
            context.options = {"deadline": "realtime", "cpu-used": "8", "lag-in-frames": "0"}
        self._context = context

    def encode(self, picture: np.ndarray[Any, Any], pts: int) -> list[tuple[bytes, bool]]:
        image = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuv420p")
        image.pts, image.time_base = pts, Fraction(1, 90_000)
        image.pict_type = PictureType.I if self.wants_keyframe else PictureType.NONE
        self.wants_keyframe = False
        return [(bytes(packet), packet.is_keyframe) for packet in self._context.encode(image)]


class World:
    def __init__(self, name: str, prompts: tuple[PromptChange, ...]) -> None:
        self.name = name
        self.schedule = list(prompts)
        self.encoders: dict[Codec, Encoder] = {"h264": Encoder("h264")}
        self.frames = 0
        self.due_s = math.inf if any(change.text == "!late" for change in prompts) else time.monotonic()
        self.paused = False
        self.paused_ticks = 0
        self.bitrate = 300_000
        self.steers: list[Steer] = []
        self.told_s = time.monotonic()


class Engine:
    def __init__(self, link: socket.socket, capacity: int) -> None:
        self.link = link
        self.capacity = capacity
        self.worlds: dict[str, World] = {}
        self.framer = Framer()

    def run(self) -> None:
        self.say(Hello("scripted", "none", (CARD,), {"h264": "libx264", "vp8": "libvpx"}))
        while True:
            due = [world.due_s for world in self.worlds.values() if not world.paused]
            wait_s = max(0.0, min([0.5, *(due_s - time.monotonic() for due_s in due)]))
            if select.select([self.link], [], [], wait_s)[0]:
                data = self.link.recv(65536)
                if not data:
                    return
                for body in self.framer.feed(data):
                    self.obey(decode_command(body))
            for world in list(self.worlds.values()):
                if not world.paused and time.monotonic() >= world.due_s:
                    self.show(world)

    def say(self, event: Event) -> None:
        self.link.sendall(frame(event))

    def obey(self, command: Command) -> None:
        match command:
            case Ping(n):
                self.say(Pong(n, 1000, len(self.worlds)))
            case Shutdown():
                sys.exit(0)
            case Open():
                self.open(command)
            case WantProfile(id, world, blocks, trace):
                self.say(Profile(id, world, json.dumps({"blocks": blocks, "trace": trace}).encode()))
            case _ if command.world in self.worlds:
                self.obey_world(self.worlds[command.world], command)

    def obey_world(self, world: World, command: Any) -> None:
        match command:
            case Pause():
                world.paused = True
                self.say(WorldChanged(world.name, "paused", media_ms=world.frames * 1000 // FPS))
            case Resume():
                if world.paused:
                    world.paused_ticks += round(max(0.0, time.monotonic() - world.due_s) * 90_000)
                world.paused, world.due_s = False, time.monotonic()
                self.say(WorldChanged(world.name, "running", media_ms=world.frames * 1000 // FPS))
            case Close(_, reason):
                del self.worlds[world.name]
                self.say(WorldChanged(world.name, "ended", reason))
            case Encode(_, codec, on):
                world.encoders.pop(codec, None)
                if on:
                    world.encoders[codec] = Encoder(codec)
            case WantKeyframe(_, codec) if codec in world.encoders:
                world.encoders[codec].wants_keyframe = True
            case WantBitrate(_, _, bits_per_second):
                world.bitrate = bits_per_second
            case Steer():
                self.steer(world, command)

    def open(self, command: Open) -> None:
        if len(self.worlds) >= self.capacity:
            self.say(Refused(command.id, command.world, f"{self.capacity} worlds are all it can do", True, 1.0))
        elif command.spec.width not in (None, WIDTH):
            self.say(Refused(command.id, command.world, f"width: expected {WIDTH}, got {command.spec.width}"))
        else:
            self.worlds[command.world] = World(command.world, command.spec.prompts)
            self.say(Opened(command.id, command.world, CARD, WIDTH, HEIGHT, FPS, 250))

    def steer(self, world: World, steer: Steer) -> None:
        text = steer.prompt.text if steer.prompt else ""
        if text.startswith("!exit"):
            print("ordered to exit", flush=True)
            sys.exit(int(text.split()[1]))
        if text == "!hang":
            time.sleep(1000)
        if text == "!garbage":
            self.link.sendall(b"\x00\x00\x00\x02\xff\xff")
        elif text == "!refuse":
            self.say(SignalRefused(steer.id, world.name, "ordered to refuse"))
        elif text == "!fail":
            del self.worlds[world.name]
            self.say(WorldChanged(world.name, "failed", "ordered to fail"))
        else:
            world.steers.append(steer)
            if world.due_s == math.inf:
                world.due_s = time.monotonic()

    def show(self, world: World) -> None:
        block, first = divmod(world.frames, BLOCK)
        if world.frames == 0:
            self.say(WorldChanged(world.name, "running"))
        if first == 0:
            self.begin_block(world, block)
        picture = np.full((HEIGHT, WIDTH, 3), 40, np.uint8)
        at = world.frames * 4 % WIDTH
        picture[:, at : at + 12] = (220, 180, 60)
        for codec, encoder in world.encoders.items():
            for data, keyframe in encoder.encode(picture, world.frames * TICKS):
                ms = world.frames * 1000 // FPS
                pts = world.frames * TICKS + world.paused_ticks
                self.say(Packet(world.name, codec, data, pts, TICKS, keyframe, block, ms))
        world.frames += 1
        world.due_s = max(world.due_s + 1 / FPS, time.monotonic() - 0.2)
        if time.monotonic() - world.told_s >= 1:
            world.told_s = time.monotonic()
            ms = world.frames * 1000 // FPS
            self.say(
                Stats(world.name, FPS, 2.0, 250, 10, 0, 0, {"device": 4096}, world.bitrate, block, ms, {"drift": 0.1})
            )

    def begin_block(self, world: World, block: int) -> None:
        media_ms = block * BLOCK * 1000 // FPS
        for change in [one for one in world.schedule if one.at_s * 1000 <= media_ms]:
            world.schedule.remove(change)
            self.say(SignalApplied("", world.name, "prompt", block, media_ms, text=change.text))
        for steer in world.steers:
            kind: Any = "prompt" if steer.prompt else "action"
            understood = steer.action.keys if steer.action else ()
            text = steer.prompt.text if steer.prompt else ""
            self.say(SignalApplied(steer.id, world.name, kind, block, media_ms, understood, text=text))
        world.steers.clear()
        self.say(BlockDone(world.name, block, media_ms, BLOCK, {"denoise": 20.0, "decode": 5.0}, 100.0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--model", action="append")
    parser.add_argument("--worlds", type=int, default=4)
    parser.add_argument("--journal-dir", help="taken and not used: these worlds end with their engine")
    parser.add_argument("--torchrun", help="taken and not used: there is one rank")
    args = parser.parse_args()
    Engine(socket.socket(fileno=args.fd), args.worlds).run()
