"""`python -m noria`: the same as the `noria` command. Knows nothing but the command line's entry point."""

from noria.cli import main

if __name__ == "__main__":
    main()
