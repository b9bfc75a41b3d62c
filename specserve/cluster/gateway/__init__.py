"""The way of a request from a gateway: choose an engine, resume on another one."""
