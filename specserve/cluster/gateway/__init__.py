"""What a gateway does with requests: choose an engine, resume on another one."""
