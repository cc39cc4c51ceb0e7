"""Words for `tiny-world`: which phrases name a place, a time, a weather or a subject, and how prompts add up.

A prompt is searched for known phrases, longest first. What it says about a slot replaces what the caption said before;
everything else is reported as ignored. The row of a phrase in the model's word table is its index in VOCABULARY.
Knows nothing of cameras or weights.
"""

import re
from dataclasses import dataclass
from typing import Final

SLOTS: Final = ("place", "time", "weather", "subject")
SEEN_SLOTS: Final = ("time", "weather", "subject")
"""Slots that the model reads as words; the place is read by the camera."""

PHRASES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "place": {
        "beach": (
            "beach",
            "seaside",
            "coast",
            "ocean",
            "sea",
            "shore",
            "seashore",
            "lighthouse",
            "palm trees",
            "palms",
        ),
        "city": ("city", "downtown", "town", "skyline", "skyscrapers", "street", "streets", "metropolis", "tv tower"),
        "forest": ("forest", "woods", "woodland", "cabin", "pine forest", "log cabin", "pines"),
        "mountains": ("mountains", "mountain", "castle", "alps", "peaks", "highlands"),
        "snow": (
            "arctic",
            "igloo",
            "tundra",
            "snowfield",
            "snow field",
            "polar",
            "glacier",
            "north pole",
            "snowy plain",
        ),
        "desert": ("desert", "pyramids", "pyramid", "dunes", "sand dunes", "sahara", "wasteland", "cactus", "cacti"),
    },
    "time": {
        "dawn": ("dawn", "sunrise", "morning", "daybreak", "early morning", "first light", "the sun rises"),
        "day": (
            "day",
            "noon",
            "daylight",
            "midday",
            "daytime",
            "afternoon",
            "day breaks",
            "the sun is high",
            "day comes",
        ),
        "sunset": ("sunset", "dusk", "evening", "twilight", "golden hour", "the sun sets", "sundown", "evening comes"),
        "night": ("night", "midnight", "nighttime", "dark", "moonlight", "moonlit", "night falls", "starry", "stars"),
    },
    "weather": {
        "clear": ("clear", "sunny", "clear sky", "clear skies", "fair weather", "blue sky", "cloudless", "sky clears")
        + ("storm passes", "rain stops", "snow stops", "weather clears", "storm clears", "clears up", "good weather"),
        "cloudy": ("cloudy", "clouds", "overcast", "grey sky", "gray sky", "clouds gather"),
        "rain": ("rain", "rainy", "drizzle", "raining", "downpour", "shower", "showers", "monsoon", "wet"),
        "storm": ("storm", "thunderstorm", "lightning", "stormy", "thunder", "tempest", "hurricane"),
        "snow": (
            "snowfall",
            "snowing",
            "blizzard",
            "snowy",
            "snowstorm",
            "snowflakes",
            "starts to snow",
            "falling snow",
        ),
    },
    "subject": {
        "none": ("empty", "nobody", "deserted", "no one", "nothing else", "goes away", "alone", "disappears"),
        "boat": ("sailboat", "boat", "ship", "sailing boat", "yacht", "sails"),
        "car": ("car", "red car", "automobile", "driving", "vehicle", "taxi"),
        "walker": ("hiker", "walker", "person", "traveler", "traveller", "person walking", "man", "woman", "someone")
        + ("walking", "wanderer", "girl", "boy"),
        "birds": ("birds", "flock of birds", "seagulls", "bird", "geese", "gulls", "flock"),
        "balloon": ("balloon", "hot air balloon", "airship", "hot-air balloon", "zeppelin"),
    },
}
ALIASES: Final = {
    "snow": "snowing",
    "snows": "snowing",
    "cloud": "clouds",
    "sun": "sunny",
    "sunshine": "sunny",
    "sunlight": "daylight",
    "nightfall": "night falls",
    "ice": "glacier",
    "polar landscape": "polar",
    "skyscraper": "skyscrapers",
    "palm tree": "palm trees",
    "people": "someone",
    "dusky": "dusk",
}
"""Phrases that are read as another one and have no row of their own."""
DEFAULTS: Final = {"place": "beach", "time": "day", "weather": "clear", "subject": "empty"}
NEGATED: Final = {"weather": "clear", "subject": "empty", "time": "day"}
"""What a slot becomes when one of its phrases is refused ("no rain", "without birds", "the storm is over")."""
NEGATIONS: Final = frozenset({"no", "without", "not", "stop", "stops", "end", "ends"})
STOP_WORDS: Final = frozenset(
    "a an and at the in on of by with under over to into from is are it there we go now then here this that its as for "
    "up sky weather world scene view begins starts starting comes arrives appears falls falling gets becomes very "
    "some near through while during beautiful light little slowly suddenly towards you i see show me".split()
)


@dataclass(frozen=True)
class Caption:
    """What a world shows: one phrase of the vocabulary per slot."""

    place: str = DEFAULTS["place"]
    time: str = DEFAULTS["time"]
    weather: str = DEFAULTS["weather"]
    subject: str = DEFAULTS["subject"]

    def value(self, slot: str) -> str:
        """What the phrase of `slot` means, as in planet.TIMES and so on."""
        return MEANING[getattr(self, slot)][1]

    def word_ids(self) -> list[int]:
        """Rows of the word table of the slots that the model reads."""
        return [VOCABULARY[getattr(self, slot)] for slot in SEEN_SLOTS]

    def __str__(self) -> str:
        subject = "" if self.value("subject") == "none" else f", {self.subject}"
        return f"{self.place}, {self.time}, {self.weather}{subject}"


@dataclass(frozen=True)
class Reading:
    """What became of a prompt."""

    caption: Caption
    understood: tuple[str, ...]
    ignored: tuple[str, ...]
    named_place: bool


MEANING: Final = {p: (slot, value) for slot, values in PHRASES.items() for value, ps in values.items() for p in ps}
VOCABULARY: Final = {phrase: i for i, phrase in enumerate(p for p, (slot, _) in MEANING.items() if slot != "place")}
LONGEST: Final = max(len(phrase.split()) for phrase in (*MEANING, *ALIASES))


def read(prompt: str, before: Caption | None = None) -> Reading:
    """Merges `prompt` into the caption `before` (or the defaults) slot by slot."""
    words = re.findall(r"[a-z][a-z'-]*", prompt.lower())
    slots = {slot: getattr(before or Caption(), slot) for slot in SLOTS}
    understood: list[str] = []
    ignored: list[str] = []
    named_place, refuse, i = False, False, 0
    while i < len(words):
        phrase, length = match(words[i:])
        if phrase is None:
            refuse = refuse or words[i] in NEGATIONS
            if words[i] not in STOP_WORDS | NEGATIONS:
                ignored.append(words[i])
        else:
            slot = MEANING[phrase][0]
            phrase = NEGATED.get(slot, phrase) if refuse else phrase
            slots[slot], named_place, refuse = phrase, named_place or slot == "place", False
            understood.append(" ".join(words[i : i + length]))
        i += length
    return Reading(Caption(**slots), tuple(understood), tuple(ignored), named_place)


def match(words: list[str]) -> tuple[str | None, int]:
    """The longest known phrase that `words` begin with, and how many words it took."""
    for length in range(min(LONGEST, len(words)), 0, -1):
        phrase = " ".join(words[:length])
        phrase = ALIASES.get(phrase, phrase)
        if phrase in MEANING:
            return phrase, length
    if words[0] in STOP_WORDS | NEGATIONS:
        return None, 1
    return next((stem for stem in stems(words[0]) if stem in MEANING), None), 1


def stems(word: str) -> list[str]:
    """Simpler forms of a word: boats -> boat, cityscape -> city."""
    cut = [word[: -len(end)] for end in ("'s", "s", "es", "ing", "y", "scape", "side") if word.endswith(end)]
    return [stem for stem in cut if len(stem) > 2]
