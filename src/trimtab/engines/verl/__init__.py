"""trimtab inside verl: a trainer mode that plans on the driver, and a loss that reads the plan on the workers.

Nothing here changes verl's code: it uses `register_trainer`, `set_loss_fn` and the data that travel with a batch.
"""

from trimtab.engines.common import check_version, missing_engine

try:
    import verl  # noqa: F401  (before our modules: it loads the plug-in, which imports them in the right order)
except ImportError as error:
    raise missing_engine("verl", error) from error

check_version("verl")
