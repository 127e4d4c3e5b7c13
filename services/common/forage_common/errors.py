"""The errors an operator may meet. Each carries one sentence that names the thing and the remedy."""


class ForageError(Exception):
    """Base of all typed errors of Forage."""


class UserError(ForageError):
    """The input or the machine is at fault: processes end with exit code 2 and this one sentence."""

    exit_code = 2


class SettingsError(UserError):
    """A setting is unknown, missing or malformed."""


class DataError(UserError):
    """A corpus, Parquet file or model folder is missing or not what it should be."""


class FencedError(ForageError):
    """A newer trainer has taken over; this one must stop."""


class UnavailableError(ForageError):
    """A service did not answer within its deadline, after bounded retries."""


class InterruptedWorkError(ForageError):
    """Work ended early because its process was asked to stop. Nothing has failed."""
