"""Data sets that `forage data` makes or imports."""
