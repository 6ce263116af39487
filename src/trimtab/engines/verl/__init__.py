"""trimtab inside verl: a trainer mode that plans on the driver, and a loss that reads the plan on the workers.

verl itself is not patched: the adapter uses `register_trainer`, `set_loss_fn` and fields of verl's batches.
"""

from trimtab.engines import check_version, missing_engine

try:
    import verl  # noqa: F401  (first: it loads the plug-in)
except ImportError as error:
    raise missing_engine("verl", error) from error

check_version("verl")
