"""Forage's dashboards, one a module. What to look at first is at the top of each, as single values."""
