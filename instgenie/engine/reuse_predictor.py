"""The predictor of reuse: a logistic regression over what is known of a token or a tile, as a file.
`engine.reuse_training` makes one, `engine.changed` asks it."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from instgenie.errors import ConfigError
from instgenie.jobs.blocks import BLOCK_FEATURES
from instgenie.machine.model_folders import model_folder

FEATURES = BLOCK_FEATURES[:6]  # of a step
FILE_NAME = "reuse.json"  # in the folder of a model
DEFAULT_FILE = Path(__file__).with_name(FILE_NAME)  # trained with the built-in model


@dataclass(frozen=True)
class ReusePredictor:
    """Numbers with which the features of a token become the logit of the probability that its guess is too wrong."""

    weights: tuple[float, ...]  # one per feature
    bias: float
    tolerance: float  # the relative error of a guess above which it is too wrong
    max_steps: int  # consecutive steps that reuse a token at most
    per_block: bool = False  # True: it is asked before each block, not once for a whole step
    tile: int = 0  # side of the squares that a block reuses together; 0: the whole picture is one
    trust: float = 0.8  # share of a prediction's movement that a guess expects to go on; 0: the last one is taken

    @property
    def features(self) -> tuple[str, ...]:
        return BLOCK_FEATURES if self.per_block else FEATURES

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"features": self.features} | asdict(self), indent=1) + "\n")


def read_predictor(path: Path) -> ReusePredictor:
    try:
        fields = json.loads(path.read_text())
        names = tuple(map(str, fields.pop("features")))
        predictor = ReusePredictor(**fields | {"weights": tuple(map(float, fields["weights"]))})
        check(predictor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no predictor of `instgenie train-reuse`: {error}; train it again") from None
    expected = predictor.features
    if names != expected or len(predictor.weights) != len(expected):
        raise ConfigError(f"{path} has the features {', '.join(names)}: {', '.join(expected)} are expected")
    if predictor.tile and not predictor.per_block:
        raise ConfigError(f"{path} has tiles of {predictor.tile} tokens for whole steps: tiles are chosen per block")
    return predictor


def check(predictor: ReusePredictor) -> None:
    """Raise a ValueError for numbers that no training gives."""
    for name in ("bias", "tolerance", "trust"):
        if not isinstance(value := getattr(predictor, name), int | float) or not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}: a finite number is expected")
    if not all(map(math.isfinite, predictor.weights)):
        raise ValueError(f"weights are {predictor.weights}: finite numbers are expected")
    for name, least in (("max_steps", 1), ("tile", 0)):
        if not isinstance(value := getattr(predictor, name), int) or value < least:
            raise ValueError(f"{name} is {value!r}: a whole number of at least {least} is expected")
    if not 0 <= predictor.trust <= 1:
        raise ValueError(f"trust is {predictor.trust}: a number from 0 to 1 is expected")


def find_predictor(model: str) -> ReusePredictor:
    """The predictor in the model's folder, if it has one, or that of the built-in model."""
    own = model_folder(model) / FILE_NAME
    return read_predictor(own if own.exists() else DEFAULT_FILE)
