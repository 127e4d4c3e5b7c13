"""`python -m forage_reward.command`."""

from forage_reward.command.main import main

main()
