"""Loads the five published networks from maintained libraries, weights from a local folder or, without one, by
download.

pyiqa gives MUSIQ, open_clip both CLIPs, timm DINO, vbench AMT-S; LAION's aesthetic head is one linear layer. The
folder holds the files under the names in `FILES`, as their authors publish them. Nothing here judges a video.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.lvbench.measures import MeasuresUnavailable
from engine.lvbench.pixels import Pixels

Vector = NDArray[np.float32]

FILES = {
    "musiq": "musiq_spaq_ckpt-358bb6af.pth",
    "clip_l14": "ViT-L-14.pt",
    "clip_b32": "ViT-B-32.pt",
    "laion": "sa_0_4_vit_l_14_linear.pth",
    "dino": "dino_vitbase16_pretrain.pth",
    "amt": "amt-s.pth",
}
LAION_URL = "https://github.com/LAION-AI/aesthetic-predictor/raw/main/sa_0_4_vit_l_14_linear.pth"
AMT_REPOSITORY = "lalala125/AMT"
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ENCODER_SIDE = 224
MUSIQ_LONGEST = 512  # VBench shrinks longer pictures to this
AMT_MULTIPLE = 16


@dataclass(frozen=True)
class Networks:
    """Five functions of RGB pictures (H, W, 3) uint8."""

    musiq: Callable[[Pixels], float]  # 0..100
    laion: Callable[[Pixels], float]  # about 0..10
    clip: Callable[[Pixels], Vector]  # any length
    dino: Callable[[Pixels], Vector]
    interpolate: Callable[[Pixels, Pixels], Pixels]  # the picture half way


class ImageEncoder(Protocol):
    """What both CLIPs are used for."""

    def encode_image(self, image: Tensor) -> Tensor: ...


@functools.lru_cache(maxsize=1)
def load_networks(weights_dir: Path | None) -> Networks:
    """All five, on the GPU where there is one. Raises `MeasuresUnavailable` naming the package or file that is
    missing.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    musiq = _musiq(weights_dir, device)
    clip_b32 = _clip("ViT-B-32-quickgelu", _file(weights_dir, "clip_b32"), device)
    clip_l14 = _clip("ViT-L-14-quickgelu", _file(weights_dir, "clip_l14"), device)
    head, dino, amt = _laion_head(weights_dir, device), _dino(weights_dir, device), _amt(weights_dir, device)
    return networks_of(musiq, clip_b32, clip_l14, head, dino, amt)


def networks_of(
    musiq: nn.Module, clip_b32: ImageEncoder, clip_l14: ImageEncoder, head: nn.Module, dino: nn.Module, amt: nn.Module
) -> Networks:
    """The modules as functions of pictures."""
    device = next(head.parameters()).device

    @torch.inference_mode()
    def musiq_score(picture: Pixels) -> float:
        return float(musiq(_shrink(_tensor(picture, device), MUSIQ_LONGEST)).item())

    @torch.inference_mode()
    def laion_score(picture: Pixels) -> float:
        features = clip_l14.encode_image(_encoder_input(picture, device, CLIP_MEAN, CLIP_STD))
        return float(head(nn.functional.normalize(features.float(), dim=-1)).item())

    @torch.inference_mode()
    def clip_features(picture: Pixels) -> Vector:
        return _vector(clip_b32.encode_image(_encoder_input(picture, device, CLIP_MEAN, CLIP_STD)))

    @torch.inference_mode()
    def dino_features(picture: Pixels) -> Vector:
        return _vector(dino(_encoder_input(picture, device, IMAGENET_MEAN, IMAGENET_STD)))

    @torch.inference_mode()
    def interpolate(before: Pixels, after: Pixels) -> Pixels:
        return _interpolate(amt, _tensor(before, device), _tensor(after, device))

    return Networks(musiq_score, laion_score, clip_features, dino_features, interpolate)


def _musiq(weights_dir: Path | None, device: torch.device) -> nn.Module:
    pyiqa = _package("pyiqa", "MUSIQ")
    path = _file(weights_dir, "musiq")
    options = {"pretrained_model_path": str(path)} if path else {}
    with contextlib.redirect_stdout(sys.stderr):  # it announces its weights
        module: nn.Module = pyiqa.create_metric("musiq-spaq", device=device, **options)
    return module


def _clip(architecture: str, path: Path | None, device: torch.device) -> ImageEncoder:
    open_clip = _package("open_clip", "CLIP", install="open-clip-torch")
    module: ImageEncoder = open_clip.create_model(
        architecture, pretrained=str(path) if path else "openai", device=device
    ).eval()
    return module


def _laion_head(weights_dir: Path | None, device: torch.device) -> nn.Module:
    path = _file(weights_dir, "laion")
    state = (
        torch.load(path, weights_only=True)
        if path
        else torch.hub.load_state_dict_from_url(LAION_URL, weights_only=True)
    )
    head = nn.Linear(768, 1)
    head.load_state_dict(state)
    return head.to(device).eval()


def _dino(weights_dir: Path | None, device: torch.device) -> nn.Module:
    timm = _package("timm", "DINO")
    path = _file(weights_dir, "dino")
    module: nn.Module = timm.create_model(
        "vit_base_patch16_224.dino", pretrained=path is None, checkpoint_path=str(path or ""), num_classes=0
    )
    return module.to(device).eval()


def _amt(weights_dir: Path | None, device: torch.device) -> nn.Module:
    vbench = _package("vbench.third_party.amt.networks.AMT-S", "AMT-S", install="--no-deps vbench decord")
    path = _file(weights_dir, "amt")
    if path is None:
        path = Path(_package("huggingface_hub", "AMT-S").hf_hub_download(AMT_REPOSITORY, FILES["amt"]))
    module: nn.Module = vbench.Model(corr_radius=3, corr_lvls=4, num_flows=3)
    module.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["state_dict"])
    return module.to(device).eval()


def _package(module: str, purpose: str, install: str = "'inferix-live[lvbench]'") -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MeasuresUnavailable(
            f"{purpose}: expected the package {module.partition('.')[0]}, got none ({error}); pip install {install}"
        ) from error


def _file(weights_dir: Path | None, key: str) -> Path | None:
    if weights_dir is None:
        return None
    path = weights_dir / FILES[key]
    if not path.is_file():
        raise MeasuresUnavailable(f"published measures: expected {FILES[key]} in {weights_dir}, got no such file")
    return path


def _tensor(picture: Pixels, device: torch.device) -> Tensor:
    """(1, 3, H, W) in 0..1."""
    return torch.from_numpy(np.ascontiguousarray(picture)).to(device).permute(2, 0, 1)[None].float() / 255.0


def _shrink(picture: Tensor, longest: int) -> Tensor:
    height, width = picture.shape[-2:]
    scale = longest / max(height, width)
    if scale >= 1.0:
        return picture
    size = (round(height * scale), round(width * scale))
    return nn.functional.interpolate(picture, size, mode="bilinear", antialias=True).clamp(0.0, 1.0)


def _encoder_input(picture: Pixels, device: torch.device, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """(1, 3, 224, 224): the shorter side to 224, the middle cut out, normalised."""
    tensor = _tensor(picture, device)
    height, width = tensor.shape[-2:]
    scale = ENCODER_SIDE / min(height, width)
    size = (max(ENCODER_SIDE, round(height * scale)), max(ENCODER_SIDE, round(width * scale)))
    tensor = nn.functional.interpolate(tensor, size, mode="bicubic", antialias=True).clamp(0.0, 1.0)
    top, left = (size[0] - ENCODER_SIDE) // 2, (size[1] - ENCODER_SIDE) // 2
    tensor = tensor[..., top : top + ENCODER_SIDE, left : left + ENCODER_SIDE]
    return (tensor - torch.tensor(mean, device=device)[:, None, None]) / torch.tensor(std, device=device)[:, None, None]


def _interpolate(amt: nn.Module, before: Tensor, after: Tensor) -> Pixels:
    height, width = before.shape[-2:]
    padding = (0, -width % AMT_MULTIPLE, 0, -height % AMT_MULTIPLE)
    half = torch.full((1, 1, 1, 1), 0.5, device=before.device)
    padded = [nn.functional.pad(p, padding, mode="replicate") for p in (before, after)]
    guess = amt(padded[0], padded[1], half, scale_factor=1.0, eval=True)["imgt_pred"]
    middle = guess[0, :, :height, :width].clamp(0.0, 1.0).mul(255.0).round().to(torch.uint8)
    return np.asarray(middle.permute(1, 2, 0).cpu().numpy(), dtype=np.uint8)


def _vector(features: Tensor) -> Vector:
    return np.asarray(features[0].float().cpu().numpy(), dtype=np.float32)
