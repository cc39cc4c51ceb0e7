"""MAGI-1's text: cleaning a caption, encoding it with T5, and the special tokens that are put in front of it.

A row is the text of one block: `caption_tokens` positions and a mask of those that count. Knows no blocks in flight;
it is told how many blocks are left when that is known.
"""

from __future__ import annotations

import html
import re
import urllib.parse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

CAPTION_TOKENS = 800
NULL_TOKENS = 50  # positions of the null caption that count
LONGEST_DURATION = 8  # "8 or more blocks left, this one included"
TRANSITION, HIGH_QUALITY, STATIC, DYNAMIC, BORDERNESS, FIRST_DURATION, MODEL_3D, ANIME_2D = 0, 1, 2, 3, 4, 7, 15, 16
TOKENS_FILE = "special_tokens.npz"


class SpecialTokensMissing(FileNotFoundError):
    """The file of special tokens is not where it should be; the message says where to get it."""


class TextEncoderUnavailable(RuntimeError):
    """The libraries or files that encode captions are not there; the message says which."""


@dataclass(frozen=True)
class Row:
    """The text of one block: (length, channels), and (length,) with True where a position counts."""

    embedding: Tensor
    mask: Tensor

    @property
    def kept(self) -> Tensor:
        """(1, positions that count, channels)"""
        return self.embedding[self.mask][None]

    def behind(self, token: Tensor) -> Row:
        """This row with one more token (1, channels) in front, cut to its length."""
        length = len(self.mask)
        token = token.to(self.embedding)
        return Row(torch.cat([token, self.embedding])[:length], torch.cat([self.mask.new_ones(1), self.mask])[:length])


@dataclass(frozen=True)
class TokenFlags:
    """Which special tokens are on; the published launch scripts switch on quality and duration."""

    quality: bool = True
    duration: bool = True
    static: bool = False
    dynamic: bool = False
    borderness: bool = False
    model_3d: bool = False
    anime_2d: bool = False
    negative: bool = False  # what should not be seen, in front of the null caption


@dataclass(frozen=True)
class SpecialTokens:
    """The vectors themselves."""

    caption: Tensor  # (1, channels)
    logo: Tensor  # (1, channels)
    others: Tensor  # (100, channels)

    @classmethod
    def load(cls, folder: Path, channels: int) -> SpecialTokens:
        """Read `special_tokens.npz`; its float64 values are rounded through float16, as the model was trained."""
        path = folder / TOKENS_FILE
        if not path.is_file():
            raise SpecialTokensMissing(
                f"expected MAGI-1's special tokens at {path}, found nothing. The file is example/assets/{TOKENS_FILE} "
                f"of the MAGI-1 source repository (SandAI-org/MAGI-1 on GitHub): copy it there."
            )
        with np.load(path) as arrays:
            names = ("caption_token", "logo_token", "other_tokens")
            missing = [n for n in names if n not in arrays]
            if missing:
                raise SpecialTokensMissing(f"{path}: expected arrays {names}, missing {missing}")
            tokens = cls(*(torch.from_numpy(arrays[n].astype(np.float16).astype(np.float32)) for n in names))
        if tokens.others.shape[1] != channels or len(tokens.others) <= ANIME_2D:
            shape = tuple(tokens.others.shape)
            raise SpecialTokensMissing(f"{path}: expected other_tokens >= {ANIME_2D + 1} x {channels}, got {shape}")
        return tokens

    def other(self, row: int) -> Tensor:
        return self.others[row : row + 1]


def caption_row(caption: Row, flags: TokenFlags, tokens: SpecialTokens | None, blocks_left: int) -> Row:
    """The caption behind its special tokens; `blocks_left` counts this block too. The last token added comes first."""
    if tokens is None:
        return caption
    wanted = (
        (flags.static, STATIC),
        (flags.dynamic, DYNAMIC),
        (flags.borderness, BORDERNESS),
        (flags.quality, HIGH_QUALITY),
        (flags.model_3d, MODEL_3D),
        (flags.anime_2d, ANIME_2D),
        (flags.duration, FIRST_DURATION + min(blocks_left, LONGEST_DURATION) - 1),
    )
    for on, row in wanted:
        caption = caption.behind(tokens.other(row)) if on else caption
    return caption


def null_row(embedding: Tensor, flags: TokenFlags, tokens: SpecialTokens | None) -> Row:
    """The learned null caption (length, channels), of which the first 50 positions count, negative tokens included."""
    row = Row(embedding, torch.arange(len(embedding), device=embedding.device) < NULL_TOKENS)
    if not flags.negative or tokens is None:
        return row
    for token in (tokens.caption, tokens.logo, tokens.other(TRANSITION), tokens.other(BORDERNESS)):
        row = row.behind(token)
    return Row(row.embedding, torch.arange(len(embedding), device=embedding.device) < NULL_TOKENS)


class TextEncoder(Protocol):
    """A caption to a row."""

    def __call__(self, text: str) -> Row: ...


class T5Caption:
    """The T5 encoder of `transformers` with its tokeniser."""

    def __init__(self, model: Any, tokenizer: Any, length: int = CAPTION_TOKENS) -> None:
        self.model, self.tokenizer, self.length = model, tokenizer, length

    def __call__(self, text: str) -> Row:
        """Clean and encode. Padding is added after encoding: the mask hides it from every token that counts."""
        ids = self.tokenizer(
            clean_twice(text), max_length=self.length, truncation=True, add_special_tokens=True, return_tensors="pt"
        )["input_ids"]
        hidden = self.hidden(ids.to(self.model.device))[0].float()
        padding = self.length - len(hidden)
        embedding = torch.cat([hidden, hidden.new_zeros(padding, hidden.shape[1])])
        return Row(embedding, torch.arange(self.length, device=hidden.device) < len(hidden))

    @torch.inference_mode()
    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """(1, L) token ids -> (1, L, channels)"""
        out: Tensor = self.model(input_ids=ids, attention_mask=torch.ones_like(ids) if mask is None else mask)[0]
        return out.clone()


def clean_twice(text: str) -> str:
    """What the model was trained on: the cleaner below, run on its own result once more."""
    return clean_caption(clean_caption(text))


def clean_caption(text: str) -> str:
    """The caption cleaner of DeepFloyd IF, as later text-to-image models took it over."""
    text = urllib.parse.unquote_plus(text).strip().lower().replace("<person>", "person")
    text = _rewrite(text, _WEB)
    text = _rewrite(_strip_markup(text), _CHARACTERS)
    if len(_JOINERS.findall(text)) > 3:
        text = _JOINERS.sub(" ", text)
    text = _rewrite(_mend(text), _WORDS)
    return _rewrite(text, _EDGES).strip()  # not stripped before: a blank at an edge keeps what follows it


def _rewrite(text: str, rules: Sequence[tuple[re.Pattern[str], str]]) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _strip_markup(text: str) -> str:
    soup = _optional("bs4", "BeautifulSoup")
    with warnings.catch_warnings():  # it warns that a caption looks like a file name; so it may
        warnings.simplefilter("ignore")
        return str(soup(text, features="html.parser").text)


def _mend(text: str) -> str:
    """Undo broken encodings and entities."""
    text = str(_optional("ftfy", "fix_text")(text))
    return html.unescape(html.unescape(text)).strip()


def _optional(module: str, name: str) -> Callable[..., Any]:
    try:
        return getattr(__import__(module), name)  # type: ignore[no-any-return]
    except ImportError as error:
        raise TextEncoderUnavailable(f"cleaning captions needs the `models` extra: {error}") from error


def _rules(*pairs: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


_DOMAIN = r"[a-zA-Z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b\/?(?!@)"
_FILES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_JOINERS = re.compile(r"[-_]")
_WEB = _rules(
    (rf"\b((?:https?:(?:\/{{1,3}}|[a-zA-Z0-9%])|{_DOMAIN}))", ""),
    (rf"\b((?:www:(?:\/{{1,3}}|[a-zA-Z0-9%])|{_DOMAIN}))", ""),
)
_CHARACTERS = _rules(
    (r"@[\w\d]+\b", ""),
    (r"[\u31c0-\u31ef\u31f0-\u31ff\u3200-\u32ff\u3300-\u33ff\u3400-\u4dbf\u4dc0-\u4dff\u4e00-\u9fff]+", ""),
    (
        r"[\u002d\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0"
        r"\ufe31\ufe32\ufe58\ufe63\uff0d]+",
        "-",
    ),
    (r"[`´«»“”¨]", '"'),
    (r"[‘’]", "'"),
    (r"&quot;?", ""),
    (r"&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),  # IP addresses
    (r"\d:\d\d\s+$", ""),  # times at the end
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"[\S]+\.(?:{_FILES})", ""),
    (r"[\"']{2,}", '"'),
    (r"[\.]{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~)(\]\[}{|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
_WORDS = _rules(
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # article numbers
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_FILES})(\simage[s]?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    (r"\b\d+\.?\d*[xх×]\d+\.?\d*\b", ""),  # sizes
    (r"\b\s+\:\s+", ": "),
    (r"(\D[,\./])\b", r"\1 "),
    (r"\s+", " "),
)
_EDGES = _rules(
    (r"^[\"']([\w\W]+)[\"']$", r"\1"),
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)
