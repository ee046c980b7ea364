"""What compression is worth to a server: request traces, prefix trees, an event simulation, and the costs it is fed with.

Needs no model except `measured_costs`, which opens sessions. All of its times and rates are simulated; hits are exact.
"""
