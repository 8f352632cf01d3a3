"""Behaviour probes of the built-in families, one folder each.

`flashpatch.verify.run` finds a family's probe as ``flashpatch.verify.probes.FAMILY.probe:probe``; families of other
packages give theirs as `flashpatch.record.Family.probe`."""
