"""Captions and their variants. Knows words, no model."""

import re

from instgenie.bench.photos import Photos
from training.colours import COLOURS

SPECIES_WORDS = {
    "cat": ("a photo of a cat", "a cat", "cat", "kitten", "a kitten", "a pet", "an animal", "kitty"),
    "dog": ("a photo of a dog", "a dog", "dog", "puppy", "a puppy", "a pet", "an animal", "doggy"),
    "flower": ("a photo of a flower", "a flower", "flower", "flowers", "a blossom", "a plant", "blossom", "bloom"),
    "clothing": ("a photo of clothes", "clothes", "clothing", "garment", "a garment", "outfit", "apparel", "wear"),
}
SYNONYMS = {
    "pants": "trousers",
    "t-shirt": "tee",
    "outerwear jacket": "coat",
    "undershirt": "tank top",
    "hoodie": "hooded sweater",
    "shoes": "footwear",
    "hat": "cap",
    "long sleeve shirt": "longsleeve",
}
BACKGROUND_CAPTIONS = (
    "background", "nothing", "an empty background", "a photo of the background", "empty", "remove", "remove it",
    "an empty scene", "no object", "just the background", "clean", "erase",
)  # fmt: skip
BEHIND = ("on a {} background", "with a {} background", "in front of a {} background", "{} background")
NUM_VARIANTS = 16
NUM_PLACELESS = 14  # the first of them: these say nothing of the background


def caption_variants(caption: str, label: str, species: str, colour: str = "", behind: str = "") -> list[str]:
    """Sixteen wordings of a caption, from a sentence with colour and background to the species alone.

    Each is drawn equally often. A colour that the caption has already is not said twice.
    """
    phrase = caption.removeprefix("a photo of ")
    bare = re.sub(r"^(an?|pair of|a pair of) ", "", phrase)
    tinted = phrase if not colour or colour in phrase.split() else coloured(phrase, colour)
    other = next((phrase.replace(word, new) for word, new in SYNONYMS.items() if word in phrase), phrase)
    place = BEHIND[sum(map(ord, caption + behind)) % len(BEHIND)].format(behind) if behind else ""
    texts = [
        caption,
        caption,
        caption.replace(" grey ", " gray "),
        phrase,
        phrase,
        bare,
        label.lower(),
        SPECIES_WORDS[species][sum(map(ord, label)) % len(SPECIES_WORDS[species])],
        f"a picture of {phrase}",
        f"a photo of {tinted}",
        tinted,
        f"{species} {colour}".strip() if species != "clothing" else bare,
        f"a photo of {other}",
        f"close-up of {phrase}",
        f"{phrase} {place}".strip(),
        f"a photo of {tinted} {place}".strip(),
    ]
    return [with_articles(text) for text in texts]


def coloured(phrase: str, colour: str) -> str:
    """`a tulip` -> `a red tulip`; `a pair of pants` -> `a pair of red pants`."""
    return re.sub(r"^((?:a pair of|an?) )?", lambda m: (m[1] or "") + colour + " ", phrase, count=1)


def recoloured(caption: str, colour: str, new: str) -> str:
    """`a photo of a red hat` -> `a photo of an orange hat`; without a colour, the new one is put in."""
    prefix, of, phrase = caption.rpartition("a photo of ")
    changed = re.sub(rf"\b{colour}\b", new, phrase) if colour else coloured(phrase, new)
    return with_articles(prefix + of + changed)


def with_articles(text: str) -> str:
    """Make every `a` or `an` fit the word after it."""
    return re.sub(r"\ban? (?=\w)(\w)", lambda m: ("an " if m[1].lower() in "aeiou" else "a ") + m[1], text)


def vocabulary(photos: Photos) -> list[str]:
    """Every word that a caption may have, in a fixed order."""
    texts = [*BACKGROUND_CAPTIONS, *COLOURS, "gray", "an", *(w for words in SPECIES_WORDS.values() for w in words)]
    texts += [phrase.format("a") for phrase in BEHIND]
    for caption, label, species in zip(photos.captions, photos.labels, photos.species, strict=True):
        if species in SPECIES_WORDS:
            texts += caption_variants(caption, label, species)
    return sorted({word for text in texts for word in text.lower().split()})
