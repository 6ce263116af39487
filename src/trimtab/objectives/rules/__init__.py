"""Token rules, penalties and controllers: the parts that methods and attachments are put together from."""
