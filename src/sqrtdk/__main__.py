"""`python -m sqrtdk` is the program `sqrtdk`."""

from sqrtdk.cli import main

if __name__ == "__main__":
    main()
