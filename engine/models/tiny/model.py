"""`tiny-world` behind the engine's contract: words and actions to conditioning, forward, and the streaming decoder.

The world is a ring of six places that the model has learned; a camera walks around it. Prompts are cumulative, a named
place moves the camera, and one scene dissolves into the next. Knows no cache policy and no sampler.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from engine.models import (
    BlockSignals,
    Conditioning,
    Context,
    Geometry,
    KVGeometry,
    LatentShape,
    Prompt,
    State,
)
from engine.models.presets import LoadOptions, Preset
from engine.models.tiny.camera import KEYS, VALUES, Motion, Step, walk
from engine.models.tiny.decoder import Keyframe, KeyframeDecoder, decode_latent
from engine.models.tiny.network import HEAD, HEADS, LAYERS, TOKENS, Given, Scenes, TinyNetwork
from engine.models.tiny.planet import (
    CHANNELS,
    CLOCK_PERIOD,
    COLUMNS,
    FPS,
    FRAMES_PER_LATENT,
    HEIGHT,
    LATENTS_PER_BLOCK,
    LATENTS_PER_SECOND,
    ROWS,
    WIDTH,
)
from engine.models.tiny.text import Caption, read
from engine.protocol import PromptMode, Signal
from engine.weights import assign, check, digest
from engine.weights import read as read_weights

WEIGHTS: Final = Path(__file__).parent / "weights"
SUGGESTIONS: Final = (
    "a sunny beach with a sailboat",
    "a thunderstorm over the city at night",
    "it snows in the mountains at dawn",
    "a hot air balloon over the desert at sunset",
    "a hiker in the forest on a rainy evening",
    "birds above the arctic in the morning",
)
TIME_SCALE: Final = 1000.0
"""The model's times run from 0 (clean) to 1000 (noise)."""
GEOMETRY: Final = Geometry(
    latent=LatentShape(CHANNELS, ROWS, COLUMNS),
    kv=KVGeometry(LAYERS, HEADS, HEAD, TOKENS),
    frames_per_block=LATENTS_PER_BLOCK,
    pictures_per_frame=FRAMES_PER_LATENT,
    width=WIDTH,
    height=HEIGHT,
    fps=float(FPS),
)


@dataclass(eq=False)
class TinyPrompt(Prompt):
    """A prompt with the caption it adds up to, and how many places have been named up to it."""

    parts = (Caption,)
    caption: Caption = Caption()
    arrivals: int = 0


@dataclass(eq=False)
class TinyConditioning(Conditioning):
    """What the network and the decoder are told about a block; every tensor has a leading batch axis."""

    mean: Tensor = torch.empty(0)
    tokens: Tensor = torch.empty(0)
    light: Tensor = torch.empty(0)
    cross: Tensor = torch.empty(0)
    share: Tensor = torch.empty(0)
    travel: Tensor = torch.empty(0)  # (B, F, 4): the camera's shift at each picture since the last keyframe

    def given(self) -> Given:
        return Given(self.mean, self.tokens, self.light, self.cross, self.share)


class TinyDecoder:
    """Latents to pictures, one latent frame at a time; the state is the last keyframe's tensors."""

    def __init__(self, network: KeyframeDecoder) -> None:
        self.network = network

    @torch.inference_mode()
    def decode(self, latents: Tensor, conditioning: Conditioning, state: State) -> tuple[Tensor, State]:
        """(F, C, 9, 16) -> (4 F, 144, 256, 3) uint8. `conditioning` is the block's own."""
        assert isinstance(conditioning, TinyConditioning)
        before = None if state is None else Keyframe(**state)
        pictures = []
        for latent, travel in zip(latents, conditioning.travel[0].tolist(), strict=True):
            now = self.network.keyframes(latent[None])[0]
            pictures.append(decode_latent(before, now, travel))
            before = now
        return torch.cat(pictures), None if before is None else before.state()


class TinyModel:
    """The BlockModel."""

    name: Final = "tiny-world"
    geometry: Final = GEOMETRY
    signals: tuple[Signal, ...] = ("prompt", "action")
    action_keys: Final = KEYS
    action_values: Final = VALUES
    suggestions: Final = SUGGESTIONS
    encoder: Final = None
    uses_previous: Final = False
    dtype: Final = torch.float32
    switch: tuple[PromptMode, int] = ("blend", 2)

    def __init__(self, network: TinyNetwork, decoder: KeyframeDecoder, device: str | torch.device = "cpu") -> None:
        self.network = network.to(device).eval().requires_grad_(False)
        self.decoder = TinyDecoder(decoder.to(device).eval().requires_grad_(False))
        self.device = torch.device(device)
        self._digest = ""

    @torch.inference_mode()
    def encode(self, text: str, previous: Prompt | None) -> TinyPrompt:
        """Merges `text` into the caption of `previous`, slot by slot."""
        before = previous if isinstance(previous, TinyPrompt) else None
        found = read(text, before.caption if before else None)
        ids = torch.tensor([found.caption.word_ids()], device=self.device)
        return TinyPrompt(
            text=str(found.caption),
            embedding=self.network.embed_words(ids),
            understood=found.understood,
            ignored=found.ignored,
            caption=found.caption,
            arrivals=(before.arrivals if before else 0) + found.named_place,
        )

    @torch.inference_mode()
    def condition(self, signals: BlockSignals) -> TinyConditioning:
        """One block: the walk, both scenes, what the scene memory says about them."""
        prompt, before = signals.prompt, signals.before
        assert isinstance(prompt, TinyPrompt)
        steps = walk(motion_at(signals, prompt), signals.action, signals.frames)
        scenes = self._scenes(steps, signals)
        cross = torch.cat([self._cross(before or prompt), self._cross(prompt)], -2)[:, None]
        old = (before or prompt).embedding[:, None]
        given = self.network.recall(scenes, old, prompt.embedding[:, None], cross)
        return TinyConditioning(
            prompt,
            motion=steps[-1].motion.values(),
            **vars(given),
            travel=torch.tensor([[step.travel for step in steps]]),
        )

    def negative(self, conditioning: Conditioning) -> Conditioning:
        """This model was not trained without conditioning; guidance towards nothing leaves it as it is."""
        return conditioning

    @torch.inference_mode()
    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning, context: Context) -> Tensor:
        """The flow of x = (1 - t) clean + t noise at times t in [0, 1000]. x: (B, F, C, 9, 16); t: (B, F)."""
        assert isinstance(conditioning, TinyConditioning)
        share = t / TIME_SCALE
        clean = self.network.predict(x, share, conditioning.given(), context)
        return (x - clean) / share.clamp(min=1e-3)[..., None, None, None]

    def digest(self) -> str:
        """Hash of all weights, computed once."""
        if not self._digest:
            self._digest = digest(torch.nn.ModuleList([self.network, self.decoder.network]))
        return self._digest

    def _cross(self, prompt: Prompt) -> Tensor:
        """Keys and values of a prompt in all cross-attention layers, made once: (1, layers, 2, WORDS, D)."""

        def project(embedding: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = self.network.cross_kv(embedding).unbind(2)
            return keys, values

        return torch.stack(prompt.cross_kv(0, project), 2)

    def _scenes(self, steps: list[Step], signals: BlockSignals) -> Scenes:
        def row(values: list[float]) -> Tensor:
            return torch.tensor([values], dtype=torch.float32, device=self.device)

        motions = [step.motion for step in steps]
        clock = [(signals.start + i + 1) / LATENTS_PER_SECOND % CLOCK_PERIOD for i in range(len(steps))]
        return Scenes(
            camera_before=row([m.left_behind for m in motions]),
            camera=row([m.camera for m in motions]),
            weight=row(dissolve(signals)),
            clock=row(clock),
            velocity=row([m.velocity for m in motions]),
            facing=row([m.facing for m in motions]),
        )


def dissolve(signals: BlockSignals) -> list[float]:
    """How far the new scene has replaced the old one at the end of each latent frame, with flat ends."""
    start, step = signals.weight_start, (signals.weight - signals.weight_start) / signals.frames
    weights = [start + step * (i + 1) for i in range(signals.frames)]
    return [w * w * (3 - 2 * w) for w in weights]


def motion_at(signals: BlockSignals, prompt: TinyPrompt) -> Motion:
    """The motion a block begins with: a prompt that named a place has moved the camera."""
    if not signals.motion:
        return Motion.start(prompt.caption.value("place"), prompt.arrivals)
    motion = Motion.of(signals.motion)
    if prompt.arrivals > motion.arrivals:
        return motion.jumped(prompt.caption.value("place"), prompt.arrivals)
    if signals.before is None or (
        isinstance(signals.before, TinyPrompt) and signals.before.arrivals == prompt.arrivals
    ):
        return Motion(**{**vars(motion), "left_behind": motion.camera})
    return motion


def load(preset: Preset, options: LoadOptions) -> TinyModel:
    """The shipped weights, or those in `options.folder`. Raises WeightsError."""
    del preset
    own = options.folder / "tiny-world" if options.folder else WEIGHTS
    return load_from(own if own.is_dir() else WEIGHTS, options.device)


def load_from(folder: Path, device: str = "cpu") -> TinyModel:
    """A model of `world.safetensors` and `decoder.safetensors` in `folder`. Raises WeightsError."""
    network, decoder = TinyNetwork(), KeyframeDecoder()
    for module, name in ((network, "world"), (decoder, "decoder")):
        path = folder / f"{name}.safetensors"
        tensors = read_weights(path)
        check(tensors, {k: tuple(v.shape) for k, v in module.state_dict().items()}, path)
        assign(module, tensors, device, torch.float32, path)
    decoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return TinyModel(network, decoder, device)
