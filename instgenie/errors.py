"""The errors a user can cause. Each message says what was given and what is expected.

InstGenieError
├── PictureError      unreadable, too small, too large
├── MaskError         empty, of another size, without the channel that carries it
├── EditError         a parameter out of range, or one the model cannot honour
├── PlanError         a plan the model cannot run with the activations at hand
├── CalibrationError  a latency file that is not one of ours, or cannot be written
├── ModelError        unknown name, not a pipeline folder, weights that are not safetensors
├── CacheError        a cache folder that cannot be used, or has no room
└── OutOfMemoryError  the model or the edit does not fit
"""


class InstGenieError(Exception):
    """Base of everything a user can cause; the command line prints it and exits with 2."""


class PictureError(InstGenieError):
    pass


class MaskError(InstGenieError):
    pass


class EditError(InstGenieError):
    pass


class PlanError(InstGenieError):
    pass


class CalibrationError(InstGenieError):
    pass


class ModelError(InstGenieError):
    pass


class CacheError(InstGenieError):
    pass


class OutOfMemoryError(InstGenieError):
    pass
