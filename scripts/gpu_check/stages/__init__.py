"""The stages by name, in the order in which all of them run."""

from stages import colocated, demo, engine, environment, search, training, update

STAGES = {
    "environment": environment,
    "update": update,
    "engine": engine,
    "search": search,
    "demo": demo,
    "training": training,
    "colocated": colocated,
}
