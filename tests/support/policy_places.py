"""Settings of engines whose tests publish anywhere on this machine."""

from __future__ import annotations

from forage_runtime.settings import SecuritySettings

ANYWHERE_HERE = SecuritySettings(allowed_addresses=("/",))
