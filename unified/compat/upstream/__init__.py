"""Counterparts of upstream's helper modules, for `unified.compat` alone: see `unified.compat.names`."""
