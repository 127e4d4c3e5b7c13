"""What protects the wires: certificates, tokens, signatures, and the record of who changed what."""
