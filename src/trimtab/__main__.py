"""`python -m trimtab` is the command line."""

from trimtab.cli import app

if __name__ == "__main__":
    app(prog_name="trimtab")
