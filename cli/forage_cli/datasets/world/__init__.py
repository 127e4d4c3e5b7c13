"""World facts: a corpus and questions about countries, cities, currencies, from installed packages' data."""
