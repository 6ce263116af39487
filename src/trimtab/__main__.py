"""`python -m trimtab` is the command line; `trimtab` is the better way to start it.

`python -m` puts the current folder first on `sys.path`, so a file there that is called like a module would run instead
of it. Here the folder is removed before anything else is imported, but Python itself has imported a few modules by
then. `trimtab` and `python -P -m trimtab` never look there.
"""

import os
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path and os.path.isdir(os.curdir) and sys.path[0] == os.getcwd():
        del sys.path[0]

    from trimtab.cli import app

    app(prog_name="trimtab")
