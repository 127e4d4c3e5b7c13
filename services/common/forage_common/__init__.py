"""Parts shared by all Forage services: contracts, settings, streams, clients, files and telemetry."""

__version__ = "0.1.0"
