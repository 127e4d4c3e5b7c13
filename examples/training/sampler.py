"""A sampler: short questions first, each epoch; equal lengths in an order of the epoch's own."""

import random


def short_first(questions, epoch, seed):
    """Returns the indexes of the questions, each once. The same arguments must give the same order."""
    order = list(range(len(questions)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return sorted(order, key=lambda index: len(questions[index].messages[-1].content))
