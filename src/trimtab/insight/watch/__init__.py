"""`trimtab watch`: the report while it happens, from a small server on loopback. See docs/watch.md."""

from trimtab.insight.watch.launch import newest_run, start_watch, watch

__all__ = ["newest_run", "start_watch", "watch"]
