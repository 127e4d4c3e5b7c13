"""Advantage estimators: one for each module, pure functions over (rows, tokens) tensors; `registry` has them by name.

They receive only the rows that take part (`groups.find_participants`); advantages and returns are 0 outside the mask.
"""
