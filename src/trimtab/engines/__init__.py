"""The same objectives inside other trainers: `trimtab.engines.trl` and `trimtab.engines.verl`."""
