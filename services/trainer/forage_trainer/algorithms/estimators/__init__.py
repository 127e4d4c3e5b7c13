"""Advantage estimators: one a module, pure functions over (rows, tokens) tensors; `registry` has them by name.

Only rows that take part are given (`groups.participation`); advantages and returns are 0 outside the mask.
"""
