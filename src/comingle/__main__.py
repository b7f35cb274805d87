"""``python -m comingle``: the command line."""

from comingle.cli import main

if __name__ == "__main__":
    main()
