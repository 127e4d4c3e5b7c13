"""The `forage` command: the stack on one machine, data sets, evaluation, probes and reports."""
