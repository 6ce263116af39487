"""`python -m trimtab` is the command line; `trimtab` is the better way to start it.

`python -m` puts the current folder first on `sys.path`, so a file there that is called like a module would run instead
of it. Here the folder is removed before anything else is imported, but Python itself has imported a few modules by
then. `trimtab` and `python -P -m trimtab` never look there.
"""

import os
import signal
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path and os.path.isdir(os.curdir) and sys.path[0] == os.getcwd():
        del sys.path[0]

    # Ctrl-C while the command line is imported would print where; it handles signals from its call on.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from trimtab.cli import app

    app(prog_name="trimtab")
