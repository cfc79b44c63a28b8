"""Errors that a user can cause. Each message says what was given and what was expected.

InstGenieError
├── PictureError      unreadable, too small, too large, too deep
├── MaskError         empty, of another shape than the picture, or without the channel that carries it
├── EditError         a parameter out of range, or one the model cannot honour
├── PlanError         a plan the model cannot run with the activations at hand
├── CalibrationError  a latency file that is malformed or cannot be written
├── ModelError        unknown name, not a pipeline folder, weights that are not safetensors or compute no numbers
├── LoraError         a LoRA that is unknown, cannot be read or does not fit the model
│   ├── LoraNotFoundError  no LoRA of that name, for this tenant
│   └── LoraStoreError     the store of remote LoRAs does not answer
├── ControlError      a ControlNet that cannot be read or does not fit the model, or its image
│   └── ControlNotFoundError  no ControlNet of that name
├── CacheError        a cache folder that cannot be used or has no room
├── OutOfMemoryError  the model or the edit does not fit
├── QueueFullError    more edits wait than the server accepts
├── TemplatesFullError  a tenant has as many templates as it may have
├── ClosedError       the server is stopping, or cannot work at all
├── WorkloadError     a workload, or the file it is drawn from, cannot be read
├── ConfigError       an unknown or invalid option, from a flag, the environment or a file
└── ServeError        the server cannot start, or a benchmark cannot reach one
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


class LoraError(InstGenieError):
    pass


class LoraNotFoundError(LoraError):
    pass


class LoraStoreError(LoraError):
    pass


class ControlError(InstGenieError):
    pass


class ControlNotFoundError(ControlError):
    pass


class CacheError(InstGenieError):
    pass


class OutOfMemoryError(InstGenieError):
    pass


class QueueFullError(InstGenieError):
    def __init__(self, num_waiting: int, limit: int, retry_after: float, is_own: bool = False) -> None:
        super().__init__(
            f"{num_waiting} edits are waiting: at most {limit} are accepted; try again in {retry_after:.0f} s"
        )
        self.num_waiting = num_waiting
        self.limit = limit
        self.retry_after = retry_after  # seconds
        self.is_own = is_own  # True if the limit is that of the tenant, and the edits are its own


class TemplatesFullError(InstGenieError):
    def __init__(self, message: str, passes: bool = False) -> None:
        super().__init__(message)
        self.passes = passes  # True if it clears without the tenant's doing


class ClosedError(InstGenieError):
    pass


class WorkloadError(InstGenieError):
    pass


class ConfigError(InstGenieError):
    pass


class ServeError(InstGenieError):
    pass
