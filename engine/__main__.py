"""The engine process: `python -m engine --fd N --model NAME`, started by the server with one end of a socket pair.

It ends with 0 when the server says Shutdown or goes away, with 2 on wrong settings, 3 when what comes over the link
is no protocol, 4 when a model cannot be loaded, 5 when a rank is lost.
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence

import torch

from engine import hooks, profiler
from engine.accelerator import annotation, device_event
from engine.config import ConfigError, EngineConfig
from engine.decoding import set_niceness
from engine.encoder import choose_encoder
from engine.hooks import HooksWrong
from engine.link import Link, LinkClosed, LinkStalled
from engine.loader import Loaded, load
from engine.loop import Engine
from engine.parallel.launch import RankLost
from engine.parallel.lead import follow_torchrun, led, start
from engine.parallel.mesh import ExchangeFailed
from engine.parallel.split import SplitError
from engine.playout import Playout
from engine.protocol import Codec, Hello, Log, ProtocolError, WantBitrate, WantKeyframe

log = logging.getLogger("engine")

SWITCH_S = 0.0005  # how long a computing thread may keep the interpreter from playout; Python's own is ten times that
STEP_ASIDE = 5  # niceness that computing adds where the process came with one already


def main() -> int:
    try:
        config = EngineConfig.read(sys.argv[1:], os.environ)
        if config.torchrun and os.environ.get("RANK", "0") != "0":
            return _follow(config)
        sock = socket.socket(fileno=config.fd)
        sock.getpeername()
        if config.hooks is not None:
            hooks.load(config.hooks)
    except (ConfigError, HooksWrong, OSError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2
    _log_to_stderr(config, "engine")
    faulthandler.enable()
    sys.setswitchinterval(SWITCH_S)
    return serve(config, sock, sys.argv[1:])


def _follow(config: EngineConfig) -> int:
    """A rank other than 0 that torchrun has started: `fd` leads nowhere."""
    _log_to_stderr(config, f"rank {os.environ['RANK']}")
    try:
        follow_torchrun(config)
    except (ExchangeFailed, ValueError, OSError, RuntimeError) as error:
        log.error("%s: this rank ends", error)
        logging.shutdown()
        os._exit(5)  # a transport that has lost a peer has threads that may not end
    return 0


def _log_to_stderr(config: EngineConfig, name: str) -> None:
    form = f"{name} %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=config.log_level.upper(), format=form, stream=sys.stderr)


def serve(config: EngineConfig, sock: socket.socket, arguments: Sequence[str] = ()) -> int:
    """Run an engine at the end of a connected socket until it is told to end. Other ranks are given `arguments`."""
    encoders: dict[Codec, str] = {"h264": choose_encoder("h264", config.encoder), "vp8": choose_encoder("vp8")}
    screens: list[Playout] = []

    def urgent(command: WantKeyframe | WantBitrate) -> None:
        if isinstance(command, WantKeyframe):
            screens[0].keyframe(command.world, command.codec)
        else:
            screens[0].bitrate(command.world, command.codec, command.bits_per_second)

    link = Link(sock, urgent)
    playout = Playout(link.send, encoders)
    screens.append(playout)
    playout.start()  # and the link: before computing steps aside, so that they keep their place
    link.start()
    try:
        return _compute(config, arguments, link, playout, encoders)
    finally:
        playout.close()
        link.close()
        profiler.disable()


def _compute(
    config: EngineConfig, arguments: Sequence[str], link: Link, playout: Playout, encoders: dict[Codec, str]
) -> int:
    niceness = _step_aside(config.nice)
    torch.set_num_threads(config.threads)
    engine = Engine(config, link, playout, niceness)
    try:
        ranks = start(config, arguments)
    except SplitError as error:
        log.error("%s", error)
        return 2
    try:
        models = {name: load(name, config, engine.pulse) for name in config.models}
    except (ValueError, OSError, RuntimeError) as error:
        log.error("a model cannot be loaded: %s", error)
        link.send(Log("error", f"a model cannot be loaded: {error}"))
        if ranks is not None:
            ranks.close()
        return 4
    if config.profile:
        profiler.enable(_profiler(config, models))
    try:
        with led(ranks, config, models) as models:
            engine.run(models, _hello(models, encoders), ranks.check if ranks else None)
        log.info("shut down")
    except ProtocolError as error:
        log.error("what came over the link is no protocol of ours: %s", error)
        return 3
    except (RankLost, ExchangeFailed, SplitError) as error:
        log.error("%s: the engine ends", error)
        link.send(Log("error", str(error)))
        return 5
    except (LinkClosed, LinkStalled) as error:
        log.info("%s: the engine ends", error)
    return 0


def _hello(models: dict[str, Loaded], encoders: dict[Codec, str]) -> Hello:
    try:
        version = importlib.metadata.version("inferix-live")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    devices = {str(loaded.model.device) for loaded in models.values()}
    names: dict[str, str] = {codec: name for codec, name in encoders.items()}
    return Hello(version, ", ".join(sorted(devices)), tuple(loaded.card for loaded in models.values()), names)


def _profiler(config: EngineConfig, models: dict[str, Loaded]) -> profiler.Profiler:
    device = next(iter(models.values())).model.device
    made = profiler.Profiler(
        device_event=device_event(device), annotate=annotation(device, torch_profile=False, nvtx=config.nvtx)
    )
    made.facts |= {f"attention of {name}": loaded.attention for name, loaded in models.items()}
    return made


def _step_aside(wanted: int) -> int:
    """Let this thread and those it starts give way to playout, the link and the server; return their niceness."""
    if not hasattr(os, "getpriority"):
        return 0
    given = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    niceness = min(19, max(wanted, given + STEP_ASIDE if given > 0 else wanted))
    set_niceness(niceness)
    return niceness


if __name__ == "__main__":
    sys.exit(main())
