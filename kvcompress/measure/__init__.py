"""Time, memory and the machine, really measured; and the models built on such measurements (roofline, tiers, serving).

Imports `hook` and lower wings."""
