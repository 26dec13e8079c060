"""`python -m tfswitch`: the command line."""

from tfswitch.cli import main

if __name__ == "__main__":
    main.main()
