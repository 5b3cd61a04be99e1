"""`python -m epee`: the same as the `epee` command."""

from .cli.main import main

if __name__ == "__main__":
    main()
