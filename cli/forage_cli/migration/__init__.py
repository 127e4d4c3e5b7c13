"""Settings of verl and Search-R1 as settings of Forage: `forage config from-verl`."""
