"""placeholder"""

KeelStrategy = LocalSGD = keel_mod = None
