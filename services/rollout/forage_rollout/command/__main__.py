"""`python -m forage_rollout.command`."""

from forage_rollout.command.main import main

main()
