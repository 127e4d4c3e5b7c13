"""Generated from proto/forage/v1 by `make proto`; do not edit."""
