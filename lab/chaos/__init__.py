"""Fault injection by `python -m lab.chaos`: kill or stop server processes under load.

Every client's text is compared with the text that the same request got without a fault.
"""
