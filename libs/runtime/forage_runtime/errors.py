"""Errors that an operator may see. Each message is one sentence that names the cause and the remedy."""


class ForageError(Exception):
    """Base of all typed errors of Forage."""

    exit_code = 1


class UserError(ForageError):
    """Wrong input or a problem of the machine: the process prints this sentence and exits with code 2."""

    exit_code = 2


class StartError(ForageError):
    """A service cannot start, and would not at another try: its process prints this sentence and exits with code 4."""

    exit_code = 4


class RolledBackError(ForageError):
    """A guard rolled the run back to its newest checkpoint: the trainer exits with code 3, and resumes from there."""

    exit_code = 3


class SettingsError(UserError):
    """A setting is unknown, missing or malformed."""


class DataError(UserError):
    """A corpus, Parquet file or model folder is missing, damaged or of the wrong format."""


class FencedError(ForageError):
    """A trainer with a higher epoch has taken over; this one must stop."""


class CollectiveTimeoutError(ForageError):
    """A process of the trainer waited too long for another one."""


class UnavailableError(ForageError):
    """A service did not answer within its deadline, after bounded retries."""


class DiskFullError(ForageError):
    """A disk, or a quota, has no room for a file; nothing of it is left. It may be written once there is room."""


class InterruptedWorkError(ForageError):
    """Work ended early because its process was asked to stop; this is not a failure."""
