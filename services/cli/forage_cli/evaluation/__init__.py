"""Policies measured on files of questions: through the loop that training uses, beside baselines, with intervals."""
