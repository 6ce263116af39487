"""Named methods and attachments: the registry, the catalog, and the parser of names such as `sspo + s2t`."""
