"""`python -m forage_retriever.command`."""

from forage_retriever.command.main import main

if __name__ == "__main__":  # not in the processes of a build, which import this module
    main()
