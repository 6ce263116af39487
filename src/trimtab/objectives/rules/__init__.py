"""Token rules, penalties and controllers that methods and attachments are composed of."""
