"""trimtab inside verl: a trainer mode that plans on the driver, and a loss that reads the plan on the workers.

Nothing here changes verl's code: it uses `register_trainer`, `set_loss_fn` and the data that travel with a batch.
"""
