"""What every Forage service shares: contracts, settings, streams, telemetry and the `forage` command."""

__version__ = "0.1.0"
