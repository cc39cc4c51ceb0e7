"""The rows of text that a MAGI-1 world reads: special tokens before captions, and the null text."""

from __future__ import annotations

import pytest
import torch

from engine.models import Prompt
from engine.models.magi_text import Row, SpecialTokens, TokenFlags, caption_row, null_row
from tests.small_magi import CONFIG, small_model


def row(valid: int, length: int = 8) -> Row:
    embedding = torch.arange(length * 2.0).view(length, 2)
    return Row(embedding, torch.arange(length) < valid)


TOKENS = SpecialTokens(torch.full((1, 2), -1.0), torch.full((1, 2), -2.0), -10 - torch.arange(200.0).view(100, 2))


def test_the_last_token_added_stands_first_and_counts() -> None:
    got = caption_row(row(2), TokenFlags(), TOKENS, blocks_left=3)
    assert torch.equal(got.kept[0], torch.cat([TOKENS.other(9), TOKENS.other(1), row(2).kept[0]]))
    assert len(got.mask) == 8


@pytest.mark.parametrize(("left", "token"), [(1, 7), (8, 14), (9, 14), (500, 14)])
def test_the_duration_token_says_how_many_blocks_are_left_up_to_eight(left: int, token: int) -> None:
    assert torch.equal(caption_row(row(1), TokenFlags(), TOKENS, left).kept[0, :1], TOKENS.other(token))


def test_a_caption_that_fills_its_row_loses_its_end() -> None:
    got = caption_row(row(8), TokenFlags(), TOKENS, blocks_left=1)
    assert len(got.kept[0]) == 8 and torch.equal(got.kept[0, 2:], row(8).embedding[:6])


def test_an_endless_world_reads_the_same_text_in_every_block() -> None:
    model = small_model()
    prompt = model.encode("a cat", None)
    assert model.text(prompt, None) is model.text(prompt, 8) is model.text(prompt, 99)
    assert model.text(prompt, 7) is not model.text(prompt, 8)


def test_a_caption_of_nothing_reads_as_the_null_text() -> None:
    model = small_model()
    model.captions = lambda text: Row(torch.zeros(800, CONFIG.caption_channels), torch.zeros(800, dtype=torch.bool))
    assert model.text(model.encode("…", None), None) is model.null


def test_negative_tokens_stand_before_the_null_text_whose_length_stays() -> None:
    embedding = torch.arange(1600.0).view(800, 2)
    plain, negative = null_row(embedding, TokenFlags(), TOKENS), null_row(embedding, TokenFlags(negative=True), TOKENS)
    assert plain.kept.shape == negative.kept.shape == (1, 50, 2)
    wanted = [TOKENS.other(4), TOKENS.other(0), TOKENS.logo, TOKENS.caption, embedding[:46]]
    assert torch.equal(negative.kept[0], torch.cat(wanted))


def test_a_prompt_of_another_model_is_refused() -> None:
    with pytest.raises(TypeError, match="expected one that this model encoded, got Prompt"):
        small_model().text(Prompt("a", torch.zeros(1, 1, 6)), None)
