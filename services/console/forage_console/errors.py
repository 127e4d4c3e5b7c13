"""Errors of requests. Their one sentence is what a page shows; `app` decides on the status of the reply."""

from forage_runtime.errors import UserError


class NotFoundError(UserError):
    """A run, or something in it, does not exist."""
