"""`python -m forage_retriever.command`."""

from forage_retriever.command.main import main

main()
