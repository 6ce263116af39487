"""The command line, `trimtab`, and what its commands show in a terminal; `tt.train` runs as `trimtab train` does."""

from trimtab.cli.commands import app

__all__ = ["app"]
