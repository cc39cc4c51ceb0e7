"""Prompts of tiny-world add up slot by slot, and say what they understood."""

import pytest

from engine.models.tiny.text import MEANING, PHRASES, VOCABULARY, Caption, read


def test_a_new_prompt_replaces_only_the_slots_it_speaks_of() -> None:
    night = read("a rainy night in the city with a red car").caption
    later = read("the storm clears", night).caption
    assert [later.value(slot) for slot in ("place", "time", "weather", "subject")] == ["city", "night", "clear", "car"]


def test_every_phrase_of_the_vocabulary_is_read_as_what_it_means() -> None:
    for phrase, (slot, value) in MEANING.items():
        assert read(phrase).caption.value(slot) == value, phrase


def test_the_longest_phrase_wins() -> None:
    found = read("a hot air balloon over snow field")
    assert found.understood == ("hot air balloon", "snow field")


def test_unknown_words_are_reported_and_change_nothing() -> None:
    before = read("desert at dawn").caption
    found = read("purple elephants", before)
    assert found.ignored == ("purple", "elephants")
    assert found.caption == before


@pytest.mark.parametrize(
    ("prompt", "slot", "value"),
    [("no rain", "weather", "clear"), ("without birds", "subject", "none"), ("the storm passes", "weather", "clear")],
)
def test_what_is_refused_goes_away(prompt: str, slot: str, value: str) -> None:
    before = Caption("beach", "day", "storm", "birds")
    assert read(prompt, before).caption.value(slot) == value


def test_inflected_words_are_understood() -> None:
    assert read("two sailboats").caption.value("subject") == "boat"
    assert read("a cityscape").caption.value("place") == "city"


def test_only_a_named_place_is_said_to_have_been_named() -> None:
    assert read("to the castle").named_place
    assert not read("night falls", read("to the castle").caption).named_place


def test_every_word_the_model_reads_has_its_own_row() -> None:
    words = [p for slot, values in PHRASES.items() if slot != "place" for phrases in values.values() for p in phrases]
    assert sorted(VOCABULARY.values()) == list(range(len(words)))


def test_snow_in_a_sentence_is_weather_and_the_arctic_is_a_place() -> None:
    found = read("it snows in the city").caption
    assert (found.value("place"), found.value("weather")) == ("city", "snow")
    assert read("the arctic").caption.value("place") == "snow"
