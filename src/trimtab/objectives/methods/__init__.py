"""The named methods and attachments: their registry, the catalog, and the parser of names such as `sspo + s2t`."""
