"""Differential privacy and robust means: functions between client and server that know nothing of algorithms."""
